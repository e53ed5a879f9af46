"""Speed of two files of one model, side by side in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.statistics import Ratio, paired_ratio
from paceline.backends.native import NativeModel
from paceline.quantize.check import build, forward_of

__all__ = ["speed_ratio"]

TURNS: Final = 15
# sequences decoded together, their prompts, and the steps that follow
_SEQUENCES: Final = 4
_PROMPT: Final = 192
_STEPS: Final = 48


def speed_ratio(
    ours: Path, theirs: Path, kind: str, windows: NDArray[np.int64], threads: int
) -> Ratio:
    """Return how many times as fast ``ours`` is, both in one format: prompts and steps of
    ``windows``, [sequences, tokens]."""
    text = windows[:_SEQUENCES, : _PROMPT + _STEPS]
    shape = (len(text), text.shape[1])
    models = [build(path, kind, threads, shape) for path in (ours, theirs)]
    seconds: list[list[float]] = [[], []]
    try:
        for turn in range(TURNS + 1):
            # each is the first one in half of the turns
            for side in (0, 1) if turn % 2 else (1, 0):
                took = _seconds(models[side], text)
                # the first turn reads the weights into memory
                if turn:
                    seconds[side].append(took)
    finally:
        for model in models:
            model.close()
    return paired_ratio(seconds[1], seconds[0])


def _seconds(model: NativeModel, text: NDArray[np.int64]) -> float:
    forward = forward_of(model, (len(text), text.shape[1]))
    began = time.perf_counter()
    forward(text[:, :_PROMPT], 0)
    for place in range(_PROMPT, text.shape[1]):
        forward(text[:, place : place + 1], place)
    return time.perf_counter() - began
