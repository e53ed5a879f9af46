"""``paceline pull``: have a model on this machine before it is needed."""

from __future__ import annotations

import argparse

from paceline.cli.arguments import Parser
from paceline.cli.options import DEFAULT_MODEL, resolve_path
from paceline.cli.table import table

__all__ = ["add_parser"]

_EPILOG = """\
examples:
  paceline pull                          the default model
  paceline pull Qwen/Qwen2.5-0.5B-Instruct
  paceline pull --list                   the short names

Aliases go to $PACELINE_CACHE (default ~/.cache/paceline), hub ids to Hugging Face's cache. A model
that is here already is left alone.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model",
        description="Download a model, check it, and move it into place in one step.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help=f"an alias or a hub id such as org/name; default {DEFAULT_MODEL}",
    )
    parser.add_argument("--list", action="store_true", help="list the aliases and stop")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list()
    name, path = resolve_path(args.model)
    print(f"{name}: {path}")
    return 0


def _list() -> int:
    from paceline.checkpoints.aliases import ALIASES
    from paceline.checkpoints.resolve import find_local

    rows = [("ALIAS", "MODEL", "SIZE", "LICENCE", "HERE")]
    for alias in ALIASES.values():
        here = "yes" if find_local(alias.name) else "no"
        size = f"{alias.gguf_bytes / 1e6:.0f} MB"
        rows.append((alias.name, alias.title, size, alias.licence, here))
    print(table(rows))
    return 0
