"""Settings of the garbage collector while a process starts, and while it steps an engine.

Objects of a step are freed by reference counts; the collector is only for rare cycles. With its
usual thresholds it scans everything new in nearly every step, and from time to time every waiting
request: 0.3 to 0.6 ms, and some 60 ms with ten thousand of them.

This module changes the whole process, so only a process's own main function may call it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["collected_seldom", "uncollected"]

# net allocations per scan of the youngest generation; such scans per scan of the middle one; and
# such scans per scan of everything
_THRESHOLDS: Final = (10_000, 50, 1_000)


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the collector inside the block, for a start, which makes mostly lasting objects:
    scanning them again and again takes a tenth of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Exclude all present objects from collection inside the block, and make collections rare; call
    ``gc.collect`` in an idle moment. Restores the settings on exit."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
