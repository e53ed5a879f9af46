"""Experts that a folder stores as one tensor with a matrix each, as gpt-oss has them.

::

    gate_up_proj         [experts, inputs, 2 * width], and down_proj [experts, width, outputs]; or
    gate_up_proj_blocks  U8 [experts, outputs, blocks, 16], of MXFP4: 32 inputs, two in a byte, the
                         first in the lower bits
    gate_up_proj_scales  U8 [experts, outputs, blocks], the power of two of each, plus 127

Gate and up alternate, output by output. Sources: transformers' ``modeling_gpt_oss.py`` and
``integrations/mxfp4.py``; OCP Microscaling Formats (MX) v1.0 for the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.weights.quantised import MXFP4, QuantisedMatrix
from paceline.checkpoints.weights.safetensors import SafetensorsEntry, read_data, values_of
from paceline.errors import CheckpointError

__all__ = ["Stored", "unstacked"]

# one stored tensor, or a matrix made of several
Stored: TypeAlias = SafetensorsEntry | QuantisedMatrix

_E2M1: Final = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
_BLOCK: Final = 32
_BIAS: Final = 127
# the same limit as in ModelConfig
MAX_EXPERTS: Final = 4096
# contents of a stack: our names of its outputs, which alternate
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


def unstacked(entries: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return stored tensors by name, with stacks of experts as ``mlp.experts.N.gate_proj.weight``
    etc. under a folder's other names.

    Raises:
        CheckpointError: a stack has another number of dimensions, or its parts disagree.
    """
    found: dict[str, Stored] = dict(entries)
    for name in entries:
        base, _, last = name.rpartition(".")
        kind = last.removesuffix("_blocks").removesuffix("_bias")
        if not base.endswith("mlp.experts") or kind not in _PARTS or name not in found:
            continue
        entry = found.pop(name)
        if not isinstance(entry, SafetensorsEntry):
            continue
        scales = found.pop(f"{base}.{kind}_scales", None) if last.endswith("_blocks") else None
        if last.endswith("_blocks"):
            _check_mxfp4(name, entry, scales)
        is_bias = last.endswith("_bias")
        if len(entry.shape) != (2 if is_bias else 4 if scales is not None else 3):
            raise CheckpointError(f"{name} has shape {list(entry.shape)}, not that of all experts")
        if not all(entry.shape) or entry.shape[0] > MAX_EXPERTS:
            raise CheckpointError(
                f"{name} has shape {list(entry.shape)}; 1 to {MAX_EXPERTS} experts are read"
            )
        parts = _PARTS[kind]
        for expert in range(entry.shape[0]):
            stack = _of_expert(entry, expert)
            scale = _of_expert(scales, expert) if isinstance(scales, SafetensorsEntry) else None
            for first, part in enumerate(parts):
                ours = f"{base}.{expert}.{part}.{'bias' if is_bias else 'weight'}"
                found[ours] = _Expert(stack, scale, is_bias, slice(first, None, len(parts)))
    return found


def _check_mxfp4(name: str, blocks: SafetensorsEntry, scales: object) -> None:
    if not isinstance(scales, SafetensorsEntry):
        raise CheckpointError(f"{name} has no scales")
    shape = blocks.shape
    if len(shape) != 4 or shape[3] != _BLOCK // 2 or scales.shape != shape[:3]:
        raise CheckpointError(
            f"{name} has shape {list(shape)} with scales of {list(scales.shape)}: MXFP4 is "
            f"[experts, outputs, blocks, {_BLOCK // 2}] and scales the first three"
        )
    if (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise CheckpointError(
            f"{name} is stored as {blocks.dtype} and its scales as {scales.dtype}, must be U8"
        )


def _of_expert(entry: SafetensorsEntry, expert: int) -> SafetensorsEntry:
    size = entry.num_bytes // entry.shape[0]
    return replace(entry, shape=entry.shape[1:], start=entry.start + expert * size, num_bytes=size)


@dataclass(frozen=True, slots=True, eq=False)
class _Expert:
    """A matrix of one expert, or its bias: some outputs of a stack. A
    ``quantised.QuantisedMatrix``."""

    # [inputs, outputs], [outputs, blocks, 16] with scales, or [outputs]
    stack: SafetensorsEntry
    # [outputs, blocks]
    scales: SafetensorsEntry | None
    is_bias: bool
    rows: slice

    @property
    def path(self) -> Path:
        return self.stack.path

    @property
    def dtype(self) -> str:
        return self.stack.dtype if self.scales is None else MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        if self.is_bias:
            return (self._count(self.stack.shape[0]),)
        if self.scales is None:
            return (self._count(self.stack.shape[1]), self.stack.shape[0])
        return (self._count(self.stack.shape[0]), self.stack.shape[1] * _BLOCK)

    @property
    def num_bytes(self) -> int:
        whole = self.stack.num_bytes + (self.scales.num_bytes if self.scales else 0)
        return whole // (self.rows.step or 1)

    def part(self, rows: slice) -> QuantisedMatrix:
        chosen = range(*self.rows.indices(self._outputs))[rows]
        return replace(self, rows=slice(chosen.start, chosen.stop, chosen.step))

    def values(self) -> NDArray[np.float32]:
        if self.scales is None:
            values = values_of(self.stack)
            outputs = values if self.is_bias else values.T
            return np.ascontiguousarray(outputs[self.rows])
        blocks = np.frombuffer(read_data(self.stack), np.uint8).reshape(self.stack.shape)[self.rows]
        scales = np.frombuffer(read_data(self.scales), np.uint8).reshape(self.scales.shape)
        found = np.empty((*blocks.shape[:2], _BLOCK), np.float32)
        found[..., 0::2], found[..., 1::2] = _E2M1[blocks & 15], _E2M1[blocks >> 4]
        # powers of two: exact, and float32's subnormal numbers are far below any weight
        np.ldexp(found, scales[self.rows][..., None].astype(np.int32) - _BIAS, out=found)
        return found.reshape(len(found), -1)

    def blocks(self) -> NDArray[np.uint8]:
        """Return MXFP4 as GGUF's blocks: a scale, then bytes that each hold an input of the first
        half in the lower bits and one of the second half above it."""
        if self.scales is None:
            raise CheckpointError(f"experts stored as {self.dtype} have no blocks of 4 bits")
        blocks = np.frombuffer(read_data(self.stack), np.uint8).reshape(self.stack.shape)[self.rows]
        scales = np.frombuffer(read_data(self.scales), np.uint8).reshape(self.scales.shape)
        codes = np.empty((*blocks.shape[:2], _BLOCK), np.uint8)
        codes[..., 0::2], codes[..., 1::2] = blocks & 15, blocks >> 4
        found = np.empty((*blocks.shape[:2], 1 + _BLOCK // 2), np.uint8)
        found[..., 0] = scales[self.rows]
        found[..., 1:] = codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4
        return found.reshape(len(found), -1)

    @property
    def _outputs(self) -> int:
        return self.stack.shape[1 if self.scales is None and not self.is_bias else 0]

    def _count(self, outputs: int) -> int:
        return len(range(*self.rows.indices(outputs)))
