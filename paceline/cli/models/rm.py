"""``paceline rm``: remove a downloaded model."""

from __future__ import annotations

import argparse

from paceline.cli.flags.arguments import Parser

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "rm",
        help="remove a downloaded model",
        description="Remove downloaded models by their names in 'paceline list', never your own "
        "files.",
    )
    parser.add_argument("model", nargs="+", metavar="NAME", help="name as in 'paceline list'")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paceline.cli.models.list import find

    # all models must be found before one is removed
    for model in [find(name) for name in dict.fromkeys(args.model)]:
        model.remove()
        print(f"removed {model.name} ({model.size / 1e6:.0f} MB)")
    return 0
