"""Figures from a run's plans: gaps between tokens, rows per step, a timeline.

Serves as the simulator's ``on_plan``. This module does not know how plans are made.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from paceline.core.outputs import SchedulerOutput
from paceline.sim.report.metrics import Metrics
from paceline.timeline.chrome import StepEvent, TimelineWriter

__all__ = ["StepWatcher"]

# most dropped requests to remember, since they may return after a preemption
_MAX_PARKED = 100_000


class StepWatcher:
    """Observer of steps; passes gaps to ``metrics`` and slices to ``timeline`` where given.

    A gap is the time between two steps that sampled a token for the same request, also across a
    preemption or a move to another replica.
    """

    def __init__(
        self, metrics: Metrics | None = None, timeline: TimelineWriter | None = None
    ) -> None:
        self._metrics = metrics
        self._timeline = timeline
        # time of each request's newest token; dropped requests separately, oldest first
        self._last: dict[str, float] = {}
        self._parked: OrderedDict[str, float] = OrderedDict()
        self._row_seconds = 0.0
        self._seconds = 0.0

    def __call__(
        self, replica: int, plan: SchedulerOutput, made: float, start: float, end: float
    ) -> None:
        """Take one step: planned at ``made``, computed from ``start`` to ``end``."""
        self._row_seconds += len(plan.rows) * (end - start)
        self._seconds += end - start
        if self._metrics is not None:
            self._gaps(self._metrics, plan, end)
        if self._timeline is not None:
            self._timeline.add(_event(replica, plan, made, start, end))

    @property
    def mean_rows(self) -> float:
        """Requests per step, averaged over the time that steps took."""
        return self._row_seconds / self._seconds if self._seconds else 0.0

    def _gaps(self, metrics: Metrics, plan: SchedulerOutput, end: float) -> None:
        last, parked = self._last, self._parked
        for request_id in plan.released:
            seen = last.pop(request_id, None)
            if seen is not None:
                parked[request_id] = seen
        while len(parked) > _MAX_PARKED:
            parked.popitem(last=False)
        gaps: Counter[float] = Counter()
        for request_id, _, _, _, samples in plan.rows:
            if not samples:
                continue
            seen = last.get(request_id)
            if seen is None:
                seen = parked.pop(request_id, None)
            if seen is not None:
                gaps[end - seen] += 1
            last[request_id] = end
        for gap, count in gaps.items():
            metrics.add_gap(gap, count)


def _event(replica: int, plan: SchedulerOutput, made: float, start: float, end: float) -> StepEvent:
    wide = [row.num_tokens for row in plan.rows if row.num_tokens > 1]
    narrow = len(plan.rows) - len(wide)
    parts = [f"{len(wide)} chunks of {sum(wide)} tokens"] if wide else []
    parts += [f"{narrow} single tokens"] if narrow else []
    details: dict[str, int | float | str] = {
        "step": plan.step_id,
        "tokens": plan.num_tokens,
        "new requests": len(plan.new_requests),
        "planned ahead ms": round(1e3 * (start - made), 6),
    }
    return StepEvent(replica, start, end - start, ", ".join(parts), details)
