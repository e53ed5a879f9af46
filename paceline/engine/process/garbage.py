"""The garbage collector in a process that starts, and in one that steps an engine.

What a step makes dies by reference counts; the collector is there for the rare cycle. With its
usual thresholds it looks at everything a step has made in nearly every step, and from time to time
at every request that waits: 0.3 to 0.6 ms, and some 60 ms with ten thousand of them.

This module changes the whole process, so only a process's own main function may call it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["collected_seldom", "uncollected"]

# allocations beyond releases until the youngest are looked at; such looks until the middle
# generation is; and such again until everything is
_THRESHOLDS: Final = (10_000, 50, 1_000)


@contextmanager
def uncollected() -> Iterator[None]:
    """For a start, which makes little but what stays: looking at all of it again and again takes a
    tenth of the time. On the way out all is as it was."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def collected_seldom() -> Iterator[None]:
    """From here on, what exists now is left out of every collection, and these are rare; an idle
    moment is the time to call ``gc.collect``. On the way out all is as it was."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
