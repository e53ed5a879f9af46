"""LoRA adapters packed for the native kernels. A step names them by sequence (``library.Step``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from paceline.backends.native.library import Owner, check, library
from paceline.backends.runner.interface import RowAdapter
from paceline.checkpoints.model.adapter import MODULES, AdapterValues

__all__ = ["NativeAdapter", "step_pointers"]

# as the library numbers them
_KINDS: Final = {"bfloat16": 0, "float32": 1, "int8": 2}


class NativeAdapter(Owner):
    """An adapter's matrices in panels, in memory of its own.

    Made on any thread, also while the model runs; each call of the library is a small part of the
    work and releases the interpreter lock.

    Args:
        model: handle of the model, whose matrices it adds to.
        layers: of the model.
        dtype: how values are kept: "bfloat16", "float32", or "int8", with a scale for each rank.
        pause: called after each matrix.

    Raises:
        ConfigError: the model lacks a matrix that the adapter adds to.
    """

    _FREE = "paceline_adapter_destroy"

    def __init__(
        self,
        model: int,
        layers: int,
        values: AdapterValues,
        *,
        dtype: str,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._library = library()
        ranks = np.zeros((layers, len(MODULES)), dtype=np.int64)
        scales = np.zeros((layers, len(MODULES)), dtype=np.float32)
        places = [(pair.layer, MODULES.index(pair.module)) for pair, _, _ in values.pairs]
        for place, (pair, _, _) in zip(places, values.pairs, strict=True):
            ranks[place], scales[place] = pair.rank, pair.scale
        self._handle = self._library.paceline_adapter(
            model, ranks.ctypes.data, scales.ctypes.data, _KINDS[dtype]
        )
        if self._handle is None:
            check(-1)
        for place, (_, a, b) in zip(places, values.pairs, strict=True):
            a, b = (np.ascontiguousarray(each, dtype=np.float32) for each in (a, b))
            check(
                self._library.paceline_adapter_set(
                    self.handle, *place, a.ctypes.data, b.ctypes.data
                )
            )
            pause()

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return int(self._library.paceline_adapter_bytes(self.handle))


def step_pointers(
    rows: Sequence[RowAdapter | None],
) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_float]]:
    """Return ``adapters`` and ``adapter_scales`` of a step, which must outlive it."""
    handles = (ctypes.c_void_p * len(rows))()
    scales = (ctypes.c_float * len(rows))()
    for index, row in enumerate(rows):
        if row is not None:
            handles[index], scales[index] = row.adapter.handle, row.scale
    return handles, scales
