"""Adapters of one loaded model: opened, read and packed next to its steps, and named by slot."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.backends.runner.interface import ADAPTER_BYTES, AdapterMaker, LoadedAdapter
from paceline.checkpoints.model.adapter import AdapterFile
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import open_adapter

__all__ = ["ModelAdapters", "PlannedAdapter"]

# ranks, inputs and outputs are padded to these (csrc/adapter.h), and memory to whole pages
_RANK: Final = 4
_WIDTH: Final = 32
_PAGE: Final = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAdapter:
    """An adapter's checked header, and how its values will be kept."""

    file: AdapterFile
    # of ``ADAPTER_BYTES``
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Most bytes that it takes once it is loaded."""
        values = 0
        for pair in self.file.pairs:
            (rank, inputs), (outputs, _) = pair.shapes
            # gate and up share panels, half of which may be of neither
            values += _padded(rank, _RANK) * (
                _padded(inputs, _WIDTH) + 2 * _padded(outputs, _WIDTH)
            )
        return _padded(values * ADAPTER_BYTES[self.dtype], _PAGE)

    @property
    def num_products(self) -> int:
        """Products for each token."""
        return self.file.num_values

    @property
    def max_rank(self) -> int:
        return self.file.max_rank

    @property
    def notes(self) -> tuple[str, ...]:
        return self.file.notes


class ModelAdapters:
    """Maker of one model's adapters.

    Args:
        make: the model's own maker.
        by_slot: where plans find adapters; each is put there whole.
        dtype: the model's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: AdapterMaker,
        by_slot: MutableMapping[int, LoadedAdapter],
        dtype: str,
    ) -> None:
        self._config, self._make, self._by_slot, self._dtype = config, make, by_slot, dtype

    def open(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> PlannedAdapter:
        """Check a file's header. Calls ``pause`` after each small part of the work. Raises
        CheckpointError.

        Args:
            dtype: of ``ADAPTER_BYTES``, or "auto": float32 where the model is, else bfloat16.
        """
        file = open_adapter(Path(path), self._config, max_rank, pause)
        if dtype == "auto":
            dtype = "float32" if self._dtype == "float32" else "bfloat16"
        return PlannedAdapter(file, dtype)

    def load(self, slot: int, opened: PlannedAdapter, pause: Callable[[], None]) -> tuple[str, int]:
        """Read an adapter and put it at ``slot``; return the digest of its contents and its bytes.
        Calls ``pause`` after each small part of the work. Raises CheckpointError."""
        values = opened.file.read(pause)
        adapter = self._make(values, dtype=opened.dtype, pause=pause)
        self._by_slot[slot] = adapter
        return values.digest, min(adapter.num_bytes, opened.num_bytes)

    def drop(self, slot: int) -> None:
        """Free an adapter; called between steps."""
        self._by_slot.pop(slot, None)


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
