"""Parts that a benchmark could not measure: it says so, goes on with the rest, and reports both."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

from benchmarks.common.processes import Unavailable

__all__ = ["Unmeasured"]


class Unmeasured:
    """The parts of one run that ended without their figures, and why."""

    def __init__(self) -> None:
        # by part, for the report
        self.reasons: dict[str, str] = {}
        # return value of a benchmark's ``main``: 1 if a part ended with an unexpected error (any
        # but ``Unavailable``), whose traceback is on standard error
        self.exit_code = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one part. An exception ends this part alone; the first of each name is kept."""
        try:
            yield
        except Exception as error:
            why = str(error) or type(error).__name__
            if not isinstance(error, Unavailable):
                traceback.print_exc()
                why = f"{type(error).__name__}: {error}"
                self.exit_code = 1
            self.reasons.setdefault(name, why)
            print(f"  {name} was not measured: {why}", file=sys.stderr, flush=True)
