"""A switch for each mechanism of the scheduler, so that the ablation can turn it off.

Some are settings. The others have no setting, for no server is better off without them: they are
replaced inside the core, for as long as a run takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.pacing.budget import PACE_SHARE, StepBudget
from paceline.core.predict.chunk import ChunkSize
from paceline.core.queues.request_queue import WaitingQueue
from paceline.core.queues.waiting import WaitingQueues
from paceline.core.request import Request

__all__ = ["SWITCHES", "Switch"]

_NEVER: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Switch:
    """How one mechanism is turned off."""

    # fields of ``SchedulerConfig`` that replace the situation's own
    settings: Mapping[str, Any] = field(default_factory=dict)
    # attributes of modules and classes below ``paceline.core``, and what takes their place
    replaced: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The core without the mechanism."""
        with ExitStack() as stack:
            for path, value in self.replaced.items():
                stack.enter_context(patch(f"paceline.core.{path}", value))
            yield


def _nothing(*_: object, **__: object) -> None:
    pass


def _no(*_: object, **__: object) -> bool:
    return False


def _yes(*_: object, **__: object) -> bool:
    return True


def _no_requests(*_: object, **__: object) -> tuple[Request, ...]:
    return ()


def _no_entries(*_: object, **__: object) -> list[object]:
    return []


def _zero(*_: object, **__: object) -> int:
    return 0


def _whole_budget(self: ChunkSize) -> int:
    return self._most


def _pace_alone(self: StepBudget, paced: Sequence[Request], now: float) -> float:
    """Every step keeps the tightest pace, however far ahead of it requests are."""
    return min((PACE_SHARE * (r.targets.tpot or math.inf) for r in paced), default=math.inf)


def _late_in_order(
    make_queue: Callable[[], WaitingQueue], kv: KVCacheManager, *, newest_first: bool
) -> WaitingQueues:
    return WaitingQueues(make_queue, kv, newest_first=False)


def _last(self: object, candidates: Sequence[Request], expendable: object) -> Request:
    """The last in order gives its blocks up, as in vLLM."""
    return candidates[-1]


def _set(**settings: Any) -> Switch:
    return Switch(settings=settings)


def _swap(**replaced: Any) -> Switch:
    return Switch(replaced={path.replace("__", "."): value for path, value in replaced.items()})


# by the words of docs/understand/scheduling.md
SWITCHES: Final[Mapping[str, Switch]] = {
    # order
    "the policy's order": _set(policy="fcfs"),
    "skipping ahead": _set(max_skip_ahead=0),
    "displacement": _swap(step__limits__displace=_zero, pacing__paced__displace=_zero),
    # size of steps
    "adaptive budget": _set(adaptive_token_budget=False, max_num_batched_tokens=512),
    "the knee": _swap(predict__chunk__ChunkSize__knee=_whole_budget),
    "slack": _swap(pacing__budget__StepBudget___least_spare=_pace_alone),
    "late quantile": Switch(
        replaced={
            "pacing.budget.LATE_QUANTILE": 0.5,
            "predict.chunk.LATE_QUANTILE": 0.5,
        }
    ),
    "bound of gaps": _set(max_token_gap_s=None),
    "memory-bound region": _swap(predict__memory_bound__Hinge__look=_nothing),
    "exploration of chunks": _swap(predict__chunk___AROUND=_NEVER),
    "short steps of best effort": _set(best_effort_step_s=3600.0),
    # who is demoted
    "demotion of late requests": _set(demote_late=False),
    "triage": _swap(pacing__feasibility__Feasibility__triage=_nothing),
    "demotion while running": _swap(pacing__feasibility__Feasibility__settle=_no),
    "rejoining": _swap(pacing__limits__PacedStep___let_rejoin=_nothing),
    "newest first among the late": _swap(step__state__WaitingQueues=_late_in_order),
    "TPOT guard": _set(pace_admission=False),
    # best effort with deadlines
    "deadlines": _swap(pacing__deadlines__Deadlines__look=_no),
    "pressing": _swap(pacing__deadlines__all_in_time=_yes),
    "coming back": _swap(pacing__deadlines__Deadlines___that_may_come_back=_no_entries),
    "must run": _swap(pacing__deadlines__Deadlines__must_run=_no_requests),
    # best effort
    "best effort's share": _set(best_effort_share=0.0),
    # memory
    "look ahead at memory": _set(future_memory_check=False),
    "swapping": _set(preemption="recompute"),
    "victim by work lost": _swap(queues__running__RunningList__victim=_last),
    # the other way round: it is closed by default
    "(a valve at 88 %, closed by default)": _set(pressure_threshold=0.88),
    # tenants
    "light tenants": _swap(pacing__tenants__TenantShares__is_light=_no),
    "short steps while shared": _swap(pacing__tenants__TenantShares__step_rows=math.inf),
    "saved tokens": _swap(policies__fair___SAVED_STEPS=0.0),
    "queue share": _swap(pacing__request_admission___PER_PLACE=_NEVER),
    # what is learned
    "learned lengths": _swap(predict__output_length__LengthHistory__observe=_nothing),
    "learned bias of forecasts": _swap(pacing__first_token__FirstTokenForecast___learn=_nothing),
}
