"""``paceline``: picks the command, maps errors to one line and an exit code.

Exit codes: 0 done; 1 the engine failed, or some lines of a batch did; 2 the command cannot be
carried out as given; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from paceline import __version__
from paceline.cli.flags.arguments import Parser
from paceline.errors import EngineError, PacelineError

__all__ = ["build_parser", "main"]

# commands, and the modules of this package that have an ``add_parser`` for them; in the order
# of --help
_COMMANDS: Final = {
    "serve": "serve.command",
    "gateway": "serve.gateway",
    "fleet": "serve.fleet",
    "chat": "offline.chat",
    "run": "offline.run",
    "generate": "offline.generate",
    "pull": "models.pull",
    "list": "models.list",
    "rm": "models.rm",
    "quantize": "models.quantize",
    "ps": "watch.ps",
    "top": "watch.top.command",
    "trace": "watch.trace",
    "doctor": "watch.doctor",
    "plan": "simulation.plan",
    "simulate": "simulation.simulate",
    "bench": "watch.bench",
    "calibrate": "watch.calibrate",
}

_EPILOG = """\
first steps:
  paceline serve                                 the default model on http://127.0.0.1:8000
  paceline chat                                  talk to it in this terminal
  echo 'Why is the sky blue?' | paceline chat    one question, one answer
  paceline generate prompts.jsonl -o answers.jsonl

'paceline COMMAND --help' explains a command.
"""


def build_parser(commands_of: Sequence[str] = tuple(_COMMANDS)) -> Parser:
    """Build the command line, with all commands or some. Imports nothing heavy."""
    parser = Parser(
        prog="paceline", description="Serve open-weight language models.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, parser_class=Parser
    )
    for name in commands_of:
        import_module(f"paceline.cli.{_COMMANDS[name]}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    # for a named command the others need not be imported
    named = argv[0] if argv and argv[0] in _COMMANDS else None
    args = build_parser(tuple(_COMMANDS) if named is None else (named,)).parse_args(argv)
    run: Callable[..., int] = args.run
    try:
        return run(args)
    except PacelineError as error:
        print(f"paceline {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output has closed it; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
