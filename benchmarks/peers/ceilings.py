"""Least seconds of a row, by the ceilings of the machine that ``benchmarks.kernels`` measures."""

from __future__ import annotations

from benchmarks.kernels.model import Ceilings
from benchmarks.peers.rows import Row

__all__ = ["floor_s"]

# tokens of a step while prompts are computed; the scheduler's default
_STEP_TOKENS = 2048


def floor_s(most: Ceilings, row: Row, formats: str) -> float:
    """Return the least seconds of a row in SmolLM2-135M's shape by "weights/KV cache" formats:
    prompts in full steps, a shared prefix once, then a step per token at the mean context."""
    once = row.shared + row.count * row.own
    steps = -(-once // _STEP_TOKENS)
    length = row.shared + row.own
    prompt = most.step_seconds(formats, once / steps, row.count / steps, length / 2)
    decode = most.step_seconds(formats, row.count, row.count, length + row.output / 2)
    return steps * prompt + (row.output - 1) * decode
