"""``paceline list``: the downloaded models, aliases in our cache folder and hub models in Hugging
Face's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from paceline.cli.flags.arguments import Parser
from paceline.cli.terminal.table import table
from paceline.errors import CheckpointError

__all__ = ["LocalModel", "add_parser", "find", "local_models"]


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "list",
        help="list downloaded models",
        description="List downloaded models; 'paceline pull --list' shows all models with a short "
        "name, 'paceline rm NAME' removes one.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model, by the name that ``paceline serve`` takes."""

    name: str
    size: int
    # unix time of its last change
    modified: float
    # folder that holds only this model
    folder: Path

    def remove(self) -> None:
        """Delete the folder. Raises CheckpointError."""
        try:
            shutil.rmtree(self.folder)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be removed: {error.strerror}") from error


def local_models() -> Iterator[LocalModel]:
    """Yield aliases, then hub models. Models in folders of the user's own are not known here."""
    from paceline.checkpoints.hub.catalogue import ALIASES
    from paceline.checkpoints.hub.resolve import default_cache_dir, find_local

    for name in ALIASES:
        path = find_local(name, default_cache_dir())
        if path is not None:
            stat = path.stat()
            yield LocalModel(name, stat.st_size, stat.st_mtime, path.parent)
    yield from sorted(_hub_models(), key=lambda model: model.name)


def find(name: str) -> LocalModel:
    """Return a model by name. Raises CheckpointError that lists the known ones."""
    models = {model.name: model for model in local_models()}
    if name not in models:
        there = f"downloaded are {', '.join(models)}" if models else "there is none"
        raise CheckpointError(f"no downloaded model is named {name!r}; {there}")
    return models[name]


def _hub_models() -> Iterator[LocalModel]:
    from paceline.checkpoints.hub.environment import cached_repositories

    for name, num_bytes, modified, folder in cached_repositories():
        yield LocalModel(name, num_bytes, modified, folder)
