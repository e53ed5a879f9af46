"""What a start has freed, handed back to the system."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Called once a process has loaded what it keeps: of a vocabulary's texts, of dequantised
    layers and of modules' sources glibc would hold the memory for the next allocations, which do
    not come. Some milliseconds; nothing under other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
