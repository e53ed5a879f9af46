"""Ceilings of the machine for a row, by the measures of ``benchmarks.kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import kernels
from benchmarks.peers.rows import Row
from paceline.backends.native.single_kernels import read_bandwidth

__all__ = ["Ceilings", "measure"]

_WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "q4": 0.625}
_LARGE_MIB = 256
# tokens of a step while prompts are computed; the scheduler's default
_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes a second by MiB read; multiply-accumulates a second by weights' dtype."""

    bandwidths: dict[int, float]
    rates: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "read_gb_s": {str(mib): round(r / 1e9, 1) for mib, r in self.bandwidths.items()},
            "gop_s": {dtype: round(2 * rate / 1e9) for dtype, rate in self.rates.items()},
        }

    def or_better(self, other: Ceilings) -> Ceilings:
        """Return the higher of each: disturbance only makes measurements lower."""
        return Ceilings(
            {mib: max(rate, other.bandwidths[mib]) for mib, rate in self.bandwidths.items()},
            {dtype: max(rate, other.rates[dtype]) for dtype, rate in self.rates.items()},
        )

    def floor_s(self, row: Row, formats: str) -> float:
        """Return the least seconds of a row in SmolLM2-135M's shape by "weights/KV cache" formats:
        prompts in full steps, a shared prefix once, then a step per token at the mean context."""
        once = row.shared + row.count * row.own
        steps = -(-once // _STEP_TOKENS)
        length = row.shared + row.own
        prompt = self._step(formats, once / steps, row.count / steps, length / 2)
        decode = self._step(formats, row.count, row.count, length + row.output / 2)
        return steps * prompt + (row.output - 1) * decode

    def _step(self, formats: str, rows: float, sequences: float, context: float) -> float:
        dtype, kv_dtype = formats.split("/")
        return kernels.floor_s(
            dtype,
            kv_dtype,
            rows,
            sequences,
            context,
            _WEIGHT_BYTES,
            self.bandwidths[_LARGE_MIB],
            self.rates[dtype],
        )


def measure(threads: int) -> Ceilings:
    """Measure the ceilings, which takes some seconds on a quiet machine."""
    return Ceilings(
        {mib: read_bandwidth(mib << 20, threads) for mib in kernels.SIZES_MIB},
        {dtype: kernels.dot_rate(dtype, threads) for dtype in _WEIGHT_BYTES},
    )
