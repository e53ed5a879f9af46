"""The model that kernels are measured with, its steps, and the ceilings of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from paceline.backends.native import NativeModel, NativeSettings
from paceline.backends.native.single_kernels import peak_rate, read_bandwidth
from paceline.checkpoints.model.checkpoint import expected_shapes
from paceline.checkpoints.model.config import ModelConfig, RopeConfig

__all__ = ["BLOCK", "CONFIG", "CONTEXT", "WEIGHT_BYTES", "Ceilings", "Step", "make_model"]

BLOCK: Final = 16
# length of the sequences of a decoding step
CONTEXT: Final = 192
# bytes per weight; those of 4-bit weights include scales and minimums
WEIGHT_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "q4": 0.625}
_KV_BYTES: Final = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}
_SIZES_MIB: Final = (2, 16, 64, 256)
# tokens in the cache
_TOKENS: Final = 64 * CONTEXT
# SmolLM2-135M's
CONFIG: Final = ModelConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=100000.0),
    tie_word_embeddings=True,
)


def make_model(
    dtype: str, kv_dtype: str, threads: int, *, config: ModelConfig = CONFIG, isa: str | None = None
) -> NativeModel:
    """Return a model in random weights, with room for all steps."""
    random = np.random.default_rng(0)
    angles = np.arange(2048)[:, None] * CONFIG.rope.theta ** (-np.arange(32) / 32)
    tensors = (
        (name, (random.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5))
        for name, shape in expected_shapes(config).items()
    )
    return NativeModel(
        config,
        tensors,
        (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)),
        NativeSettings(
            dtype=dtype, kv_dtype=kv_dtype, num_blocks=_TOKENS // BLOCK, threads=threads, isa=isa
        ),
    )


class Step:
    """One step of a model, to be computed repeatedly: each of ``sequences`` computes its last
    ``tokens`` tokens, up to ``length``, with logits for its last one."""

    def __init__(self, model: NativeModel, sequences: int, tokens: int, length: int) -> None:
        blocks = -(-length // BLOCK)
        random = np.random.default_rng(1)
        self._model = model
        self._tables = random.permutation(sequences * blocks).reshape(sequences, blocks)
        self._starts = np.arange(sequences + 1) * tokens
        self._positions = np.tile(np.arange(length - tokens, length), sequences)
        self._ids = random.integers(0, CONFIG.vocab_size, sequences * tokens)
        for row in range(sequences if tokens < length else 0):
            # finite keys and values, as in real use
            count = np.arange(length)
            model.forward(
                np.zeros_like(count), count, np.array([0, length]), self._tables[row : row + 1],
                count[-1:],
            )  # fmt: skip

    def __call__(self) -> None:
        self._model.forward(
            self._ids, self._positions, self._starts, self._tables, self._starts[1:] - 1
        )


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of the machine: bytes a second by MiB read, multiply-adds a second by weights'
    dtype; 0 where no loop is known."""

    bandwidths: dict[int, float]
    rates: dict[str, float]

    @classmethod
    def measure(cls, threads: int, isa: str | None = None) -> Ceilings:
        """Measure the ceilings, which takes some seconds on a quiet machine."""
        return cls(
            {mib: read_bandwidth(mib << 20, threads) for mib in _SIZES_MIB},
            {dtype: peak_rate(dtype, threads, isa) for dtype in WEIGHT_BYTES},
        )

    @property
    def bandwidth(self) -> float:
        """Bytes a second from memory."""
        return self.bandwidths[max(self.bandwidths)]

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

    def step_seconds(self, formats: str, rows: float, sequences: float, context: float) -> float:
        """Return the least time of a step in "weights/KV cache" formats: reading its weights once
        or computing its products, whichever takes longer, and reading keys and values once."""
        dtype, kv_dtype = formats.split("/")
        head = CONFIG.vocab_size * CONFIG.hidden_size
        matrices = (s for s in expected_shapes(CONFIG).values() if len(s) == 2)
        layers = sum(int(np.prod(shape)) for shape in matrices) - head
        per_head_weight = WEIGHT_BYTES["int8" if dtype == "q4" else dtype]
        read = (layers * WEIGHT_BYTES[dtype] + head * per_head_weight) / self.bandwidth
        rate = self.rates[dtype]
        compute = (layers * rows + head * sequences) / rate if rate else 0.0
        per_token = 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim
        kv = sequences * context * per_token * _KV_BYTES[kv_dtype] / self.bandwidth
        return max(read, compute) + kv
