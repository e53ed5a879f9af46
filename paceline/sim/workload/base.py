"""A workload: a recipe that yields the same arrivals every time it is read.

This module does not know formats or distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival

__all__ = ["Workload", "WorkloadError"]


class WorkloadError(ConfigError):
    """An error in a workload's description or in a row of its file; the message says where."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of ``at``, streamed: iterating again starts again, with equal arrivals.

    Raises (while iterating):
        WorkloadError: a malformed row, with file and line.
    """

    # description that it was made from, for tables
    name: str
    # tokens per entry of ``Arrival.prefix``
    prefix_block: int
    # starts a new stream
    start: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.start()
