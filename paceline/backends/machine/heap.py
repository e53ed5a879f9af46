"""Return of memory that was freed to the system."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Trim the heap, once a process has loaded what it keeps, or threads have ended. glibc would
    otherwise hold the memory of vocabulary texts, dequantised layers and module sources for later
    allocations, which do not come. Takes some milliseconds; does nothing under other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
