"""``paceline list``: list the downloaded models."""

from __future__ import annotations

import argparse
import json
from datetime import datetime

from paceline.cli.flags.arguments import Parser
from paceline.cli.terminal.table import table

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "list",
        help="the models that were downloaded",
        description="List downloaded models; 'paceline pull --list' shows what else has a short "
        "name, 'paceline rm NAME' removes one.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from paceline.cli.models.local_models import local_models

    rows = [("NAME", "SIZE", "MODIFIED", "FOLDER")]
    for model in local_models():
        if args.json:
            fields = {"name": model.name, "bytes": model.size, "folder": str(model.folder)}
            print(json.dumps(fields))
        changed = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
        rows.append((model.name, f"{model.size / 1e6:.0f} MB", changed, str(model.folder)))
    if not args.json:
        print(table(rows))
    return 0
