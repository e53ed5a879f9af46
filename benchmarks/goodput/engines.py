"""The servers that are compared, ours with several sets of flags."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.goodput.loads import TARGETS
from benchmarks.peers.base import Command, Places, Unavailable
from paceline.checkpoints.base import open_checkpoint
from paceline.checkpoints.resolve import default_cache_dir, find_local

__all__ = ["Ours", "class_flags", "fixed", "our_places"]


def our_places() -> tuple[Places, int]:
    """Where servers find the default model and all processors, and the size of its vocabulary.
    Raises SystemExit with what to do if the model is not there."""
    model = find_local("smollm2-135m")
    if model is None:
        raise SystemExit("smollm2-135m is not here yet: run 'make model' first")
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    places = Places(root, model, tuple(sorted(os.sched_getaffinity(0))))
    return places, open_checkpoint(model).config.vocab_size


@dataclass(slots=True)
class Ours:
    """``paceline serve`` with flags; a ``peers.base.Peer`` for its server."""

    name: str
    places: Places
    flags: tuple[str, ...]
    variants: tuple[str, ...] = ("auto",)

    def setup(self) -> None:
        """Nothing to do."""

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        raise Unavailable("only the server is measured here")

    def server(self, port: int) -> Command:
        return Command(
            (sys.executable, "-m", "paceline.cli.main", "serve", str(self.places.model),
             "--host", "127.0.0.1", "--port", str(port), *self.flags)
        )  # fmt: skip


def fixed(budget: int, policy: str = "fcfs") -> tuple[str, ...]:
    """Flags of the baselines: an order and a token budget."""
    return (
        "--scheduling-policy", policy, "--default-ttft-ms", "0", "--default-tpot-ms", "0",
        "--no-adaptive-token-budget", "--no-relegate-late",
        "--no-pace-admission", "--no-future-memory-check", "--pressure-threshold", "1",
        "--max-queue", "0", "--preemption", "recompute",
        "--plan-lead-ms", "10000", "--max-num-batched-tokens", str(budget),
    )  # fmt: skip


def class_flags() -> tuple[str, ...]:
    """Flags that tell a server what TARGETS says."""
    flags: list[str] = []
    for name, targets in TARGETS.items():
        parts = [
            f"{kind}:{value * 1e3:g}"
            for kind, value in zip(("ttft", "tpot", "deadline"), targets, strict=True)
            if value is not None
        ]
        if name == "batch":
            parts.append("best-effort")
        flags += ["--slo-class", f"{name}={','.join(parts)}"]
    return tuple(flags)
