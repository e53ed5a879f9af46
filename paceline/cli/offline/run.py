"""``paceline run``: fetch a model if needed, and chat with it; with a prompt, answer once."""

from __future__ import annotations

import argparse

from paceline.cli.flags.arguments import Parser
from paceline.cli.flags.elsewhere import ASK
from paceline.cli.offline import chat

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline run smollm2-135m
  paceline run smollm2-135m 'Name three colours.'
  paceline run ./my-model.gguf --temperature 0 'Why is the sky blue?'

Without a prompt it is 'paceline chat MODEL'.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "run",
        help="talk to a model, or ask it one question",
        description="Download a model if needed, and talk to it in this terminal.",
        epilog=_EPILOG,
    )
    chat.add_options(parser)
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="one question; default: a conversation"
    )
    parser.add_argument(
        "--think",
        nargs="?",
        choices=("true", "false"),
        const="true",
        help="whether a model that can reason does so first; default: as its template says",
    )
    parser.set_defaults(run=chat.run)
    parser.rewrite = ASK.rewrite
    # ollama run takes its flags before the prompt too
    parser.intermixed = True
