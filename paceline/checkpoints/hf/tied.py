"""Check whether an embedding that a config ties to the head equals the head in the file.

A model that was fine-tuned with both apart may have been saved with a config that still ties them.
As in transformers, both are then used as they are stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoints.weights.quantised import QuantisedMatrix
from paceline.checkpoints.weights.safetensors import SafetensorsEntry, read_data, values_of

__all__ = ["are_equal", "rows_of"]

# bytes of a matrix that are compared at a time
_BYTES: Final = 8 << 20


def rows_of(entry: SafetensorsEntry, span: slice) -> SafetensorsEntry:
    """Return some rows of a stored tensor."""
    row_bytes = entry.num_bytes // entry.shape[0]
    count = span.stop - span.start
    return replace(
        entry,
        shape=(count, *entry.shape[1:]),
        start=entry.start + span.start * row_bytes,
        num_bytes=count * row_bytes,
    )


def are_equal(
    one: SafetensorsEntry | QuantisedMatrix, other: SafetensorsEntry | QuantisedMatrix
) -> bool:
    """Return whether two stored matrices have the same values. Reads both, some rows at a time."""
    if one.shape != other.shape:
        return False
    step = max(1, _BYTES // max(1, 4 * one.shape[-1]))
    for start in range(0, one.shape[0], step):
        span = slice(start, min(start + step, one.shape[0]))
        if not _are_equal(_part(one, span), _part(other, span)):
            return False
    return True


def _part(
    matrix: SafetensorsEntry | QuantisedMatrix, span: slice
) -> SafetensorsEntry | QuantisedMatrix:
    return rows_of(matrix, span) if isinstance(matrix, SafetensorsEntry) else matrix.part(span)


def _are_equal(
    one: SafetensorsEntry | QuantisedMatrix, other: SafetensorsEntry | QuantisedMatrix
) -> bool:
    if (
        isinstance(one, SafetensorsEntry)
        and isinstance(other, SafetensorsEntry)
        and one.dtype == other.dtype
        and read_data(one) == read_data(other)
    ):
        return True
    return np.array_equal(_values(one), _values(other))


def _values(matrix: SafetensorsEntry | QuantisedMatrix) -> NDArray[np.float32]:
    return values_of(matrix) if isinstance(matrix, SafetensorsEntry) else matrix.values()
