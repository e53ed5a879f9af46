"""What runs, added up once for everybody who asks at the start of a step.

This module does not decide anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request
from paceline.core.slo import NO_SLO

__all__ = ["Survey"]


class Survey:
    """Running requests by kind. *Narrow* is one token behind or none, *wide* is more."""

    __slots__ = (
        "awaited",
        "best_effort",
        "favoured",
        "favoured_waiting",
        "hurried",
        "hurried_keys",
        "narrow_keys",
        "narrow_rows",
        "num_running",
        "ordinary",
        "paced",
        "shared",
        "targets",
        "tightest",
        "urgent",
        "wide",
    )

    def __init__(self) -> None:
        self.num_running = 0
        # an ordinary one runs that was not best effort until it had waited too long (``patience``)
        self.awaited = False
        # in order
        self.ordinary: list[Request] = []
        self.best_effort: list[Request] = []
        # narrow ones of best effort that are not to sit this step out (``hurry``), and the tokens
        # before them
        self.hurried: list[Request] = []
        self.hurried_keys = 0
        # of all
        self.wide: list[Request] = []
        # of ordinary narrow ones
        self.narrow_rows = 0
        self.narrow_keys = 0
        # ordinary narrow ones with a TPOT target and a first token, and the least such target
        self.paced: list[Request] = []
        self.tightest = math.inf
        # TPOT targets of ordinary ones
        self.targets: list[float] = []
        # prompt tokens that must not wait for the pace of others, and those of them that wait
        self.favoured = 0
        self.favoured_waiting = 0
        # tenants that are kept apart share the engine lately
        self.shared = False
        # an ordinary wide one has a TTFT target
        self.urgent = False

    @classmethod
    def of(cls, running: Iterable[Request]) -> Survey:
        survey = cls()
        ordinary, best_effort, wide = survey.ordinary, survey.best_effort, survey.wide
        targets, paced = survey.targets, survey.paced
        rows = keys = 0
        for request in running:
            aims = request.targets
            computed = request.num_computed_tokens
            is_wide = request.num_tokens + request.num_pending_tokens > computed + 1
            if is_wide:
                wide.append(request)
            if aims is NO_SLO:
                # as below, without asking for what it does not have
                ordinary.append(request)
                if not is_wide:
                    rows += 1
                    keys += computed
                continue
            if request.best_effort:
                best_effort.append(request)
                continue
            ordinary.append(request)
            tpot = aims.tpot
            if tpot is not None:
                targets.append(tpot)
            if is_wide:
                survey.urgent = survey.urgent or aims.ttft is not None
                continue
            rows += 1
            keys += computed
            if tpot is not None and request.first_token_time is not None:
                paced.append(request)
                if tpot < survey.tightest:
                    survey.tightest = tpot
        survey.narrow_rows, survey.narrow_keys = rows, keys
        survey.num_running = len(ordinary) + len(best_effort)
        survey.awaited = any(not request.aged for request in ordinary)
        return survey

    def hurry(self, requests: list[Request]) -> None:
        """Count these, narrow and of best effort, apart from the others of best effort."""
        if requests:
            names = {request.request_id for request in requests}
            self.best_effort = [r for r in self.best_effort if r.request_id not in names]
            self.hurried = requests
            self.hurried_keys = sum(request.num_computed_tokens for request in requests)

    def leave(self, request: Request) -> None:
        """This one of best effort runs no more."""
        self.best_effort = [r for r in self.best_effort if r is not request]
        self.hurried = [r for r in self.hurried if r is not request]
        self.hurried_keys = sum(r.num_computed_tokens for r in self.hurried)

    def favour(self, num_waiting: int) -> None:
        """Count what light tenants lack: of those running, and so many tokens of one that waits and
        will be let in."""
        self.favoured = sum(r.num_uncomputed_tokens for r in self.wide if r.favoured)
        self.favoured_waiting = num_waiting
        self.favoured += num_waiting

    @property
    def base(self) -> StepShape:
        """A step of one token for each narrow request that sits no step out."""
        return StepShape(
            0, 0.0, self.narrow_rows + len(self.hurried), self.narrow_keys + self.hurried_keys
        )
