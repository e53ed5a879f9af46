"""How far each peer's format is from float32 of the weights that all engines are given.

A peer is asked for its own logits (``GivesLogits``), so its kernels, activations and KV cache
count, and so does what its own tools made of the weights. A format whose engine gives no logits is
not measured, and counts as one that passes: no ratio gets better by leaving it out.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import Peer
from benchmarks.peers.report import OURS, rate_of
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.check import (
    CHUNK,
    REFERENCE,
    WINDOW,
    Figures,
    build,
    compare,
    forward_of,
    text_windows,
)  # fmt: skip

__all__ = ["GivesLogits", "distance", "failing", "headline", "headline_table", "qualities"]

# texts of the accuracy gate, and tokens of each, whose logits are compared; a file of them has
# 200 MB
TEXTS: Final = 4
TOKENS: Final = 256


@runtime_checkable
class GivesLogits(Protocol):
    """A peer that gives its logits."""

    name: str
    variants: tuple[str, ...]

    def variant_logits(self, variant: str, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return [windows * length, vocab], given token ids [windows, length]. Raises
        Unavailable."""


def distance(
    logits: NDArray[np.float32], model: Path, windows: NDArray[np.int64], threads: int
) -> Figures:
    """Return how far logits, [windows * length, vocab], are from ours in float32 of a file."""
    shape = (windows.shape[0], windows.shape[1])
    by_window = logits.reshape(*shape, -1)

    def theirs(tokens: NDArray[np.int64], first: int) -> NDArray[np.float32]:
        part = by_window[:, first : first + tokens.shape[1]]
        return np.array(part).reshape(-1, part.shape[-1])

    torch.set_num_threads(threads)
    exact = build(model, REFERENCE, threads, shape)
    try:
        return compare(windows, forward_of(exact, shape), {"": theirs}, CHUNK)[""]
    finally:
        exact.close()


def qualities(
    peers: Iterable[Peer], model: Path, accuracy: Mapping[str, Mapping[str, Any]], threads: int
) -> dict[str, dict[str, Any]]:
    """Return KL and top-1 by label ("peer variant"), of ours by their formats.

    Args:
        model: the file with the weights for all engines.
        accuracy: what the gate said of our formats.
    """
    found: dict[str, dict[str, Any]] = {
        f"{OURS} {name}": {
            "kl": result["prompts"]["kl"],
            "top1": result["prompts"]["top1"],
            "passes": result["passes"],
        }
        for name, result in accuracy.items()
    }
    giving = [peer for peer in peers if isinstance(peer, GivesLogits)]
    if not giving:
        return found
    windows = text_windows(load_tokenizer(model).encode, WINDOW)[:TEXTS, :TOKENS]
    windows = np.ascontiguousarray(windows)
    for peer in giving:
        for variant in peer.variants:
            label = f"{peer.name} {variant}"
            try:
                figures = distance(peer.variant_logits(variant, windows), model, windows, threads)
            except Unavailable as error:
                print(f"  the logits of {label} were not measured: {error}", file=sys.stderr)
                continue
            found[label] = {
                "kl": round(figures.kl, 5),
                "top1": round(figures.top1, 4),
                "passes": figures.passes,
            }
    return found


def failing(quality: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the labels whose format does not pass the gate."""
    return {label for label, figures in quality.items() if not figures["passes"]}


def headline(
    seconds: Mapping[str, Mapping[str, Sequence[float]]], left_out: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return, by row, ours over the fastest format of a peer that is not ``left_out``, and over the
    fastest of all.

    Args:
        seconds: by row and label.
    """
    found: dict[str, dict[str, Any]] = {}
    for row, of_row in seconds.items():
        rates = {label: rate_of(row, spent) for label, spent in of_row.items()}
        ours = max((r for label, r in rates.items() if label.split()[0] == OURS), default=None)
        rivals = {label: r for label, r in rates.items() if not label.startswith(OURS)}
        equal = {label: r for label, r in rivals.items() if label not in left_out}
        if ours is None or not rivals:
            continue
        found[row] = {}
        for key, among in (("equal", equal), ("all", rivals)):
            if among:
                best = max(among, key=lambda label: among[label])
                found[row][key] = {"ratio": round(ours / among[best], 3), "against": best}
    return found


def headline_table(
    results: Mapping[str, Mapping[str, Any]], quality: Mapping[str, Mapping[str, Any]]
) -> str:
    """Return both ratios of each row, with KL and top-1 of the format that each is against."""

    def cell(entry: Mapping[str, Any] | None) -> str:
        if entry is None:
            return "-"
        known = quality.get(entry["against"])
        of = "not measured" if known is None else f"KL {known['kl']:.4f}, top-1 {known['top1']:.1%}"
        return f"{entry['ratio']:.2f}x {entry['against']} ({of})"

    lines = [f"{'ours over':24}{'fastest that passes the gate':64}fastest of all"]
    for row, entries in results.items():
        lines.append(f"{row:24}{cell(entries.get('equal')):64}{cell(entries.get('all'))}")
    return "\n".join(lines)
