"""Running requests by kind, summed up once at the start of a step for all that limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request
from paceline.core.slo import NO_SLO
from paceline.core.tier import Tier

__all__ = ["NO_VIEW", "RunningView"]


@dataclass(frozen=True, slots=True)
class RunningView:
    """Running requests by kind. *Narrow* ones are at most one token behind, *wide* ones more."""

    # in order
    ordinary: list[Request]
    best_effort: list[Request]
    # ordinary and best-effort ones
    wide: list[Request]
    # number of ordinary narrow ones, and of their computed tokens
    narrow_rows: int
    narrow_keys: int
    # ordinary narrow ones with a TPOT target and a first token
    paced: list[Request]
    # TPOT targets of these, and of all ordinary ones
    paces: set[float]
    targets: set[float]
    # the least ITL target, s, of ordinary narrow ones
    gap: float
    # an ordinary wide one has a TTFT target
    urgent: bool
    # the longest step, as a multiple of the time of its rows alone, while others share the engine;
    # infinite: none do
    step_rows: float
    # narrow best-effort ones that must not skip this step
    must_run: tuple[Request, ...] = ()
    # prompt tokens of light tenants, which must not wait for the pace of others
    boosted: int = 0

    @classmethod
    def of(cls, running: Iterable[Request], *, step_rows: float = math.inf) -> RunningView:
        ordinary: list[Request] = []
        best_effort: list[Request] = []
        wide: list[Request] = []
        paced: list[Request] = []
        paces: set[float] = set()
        targets: set[float] = set()
        rows = keys = 0
        gap, urgent = math.inf, False
        lowest, no_slo = Tier.ORDINARY, NO_SLO
        for request in running:
            computed = request.num_computed_tokens
            is_wide = request.num_tokens + request.num_pending_tokens > computed + 1
            if is_wide:
                wide.append(request)
            if request.tier is not lowest:
                best_effort.append(request)
                continue
            ordinary.append(request)
            if not is_wide:
                rows += 1
                keys += computed
            own = request.targets
            if own is no_slo:
                continue
            tpot = own.tpot
            if tpot is not None:
                targets.add(tpot)
                if not is_wide and request.first_token_time is not None:
                    paced.append(request)
                    paces.add(tpot)
            if is_wide:
                urgent = urgent or own.ttft is not None
            elif own.itl is not None and own.itl < gap:
                gap = own.itl
        return cls(
            ordinary=ordinary, best_effort=best_effort, wide=wide,
            narrow_rows=rows, narrow_keys=keys, paced=paced, paces=paces, targets=targets,
            gap=gap, urgent=urgent, step_rows=step_rows,
        )  # fmt: skip

    @property
    def num_running(self) -> int:
        return len(self.ordinary) + len(self.best_effort)

    @property
    def base(self) -> StepShape:
        """Shape of a step with one token for each narrow request that skips no step."""
        keys = sum(request.num_computed_tokens for request in self.must_run)
        return StepShape(0, 0.0, self.narrow_rows + len(self.must_run), self.narrow_keys + keys)


NO_VIEW = RunningView.of(())
