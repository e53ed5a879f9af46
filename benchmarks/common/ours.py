"""``paceline serve`` with any flags, to compare with other engines."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Places
from paceline.checkpoints.hub.resolve import default_cache_dir, find_local
from paceline.checkpoints.open import open_checkpoint

__all__ = ["Ours", "our_places"]


def our_places() -> tuple[Places, int]:
    """Return the places of the default model and all processors, and the size of its vocabulary.
    Raises SystemExit, which says what to do, if the model is not there."""
    model = find_local("smollm2-135m")
    if model is None:
        raise SystemExit("smollm2-135m is not here yet: run 'make model' first")
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    places = Places(root, model, tuple(sorted(os.sched_getaffinity(0))))
    return places, open_checkpoint(model).config.vocab_size


@dataclass(slots=True)
class Ours:
    """``paceline serve`` with flags; a ``setup.Peer`` for its server."""

    name: str
    places: Places
    flags: tuple[str, ...]
    variants: tuple[str, ...] = ("auto",)
    served: str = "auto/auto"

    def setup(self) -> None:
        """Do nothing: our own server needs no setup."""

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        raise Unavailable("only the server is measured here")

    def server(self, port: int) -> Command:
        return Command(
            (sys.executable, "-m", "paceline.cli.main", "serve", str(self.places.model),
             "--host", "127.0.0.1", "--port", str(port), *self.flags)
        )  # fmt: skip
