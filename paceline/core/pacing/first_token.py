"""Forecasts of the time to first token of arriving requests, corrected by the outcomes.

Called by ``RequestAdmission`` between steps, often: running requests are looked at once a step.

This module does not decide what becomes of the request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import accumulate, islice, repeat
from operator import mod, mul, sub
from typing import Final

from paceline.core.pacing.share import GuaranteedShare
from paceline.core.pacing.waiting_targets import MAX_TRIAGED, WaitingTargets, first_token_due
from paceline.core.policies import overrides
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.running import place
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import ORDER, Forecast, ForecastKind, Request
from paceline.core.slo import MAX_SECONDS
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["FirstTokenForecast"]

# priority levels with a bias of their own, on either side of 0
_LEVELS: Final = 4
# binary exponent of the seconds until a request is late, if it never is, and bound on the others
_PATIENT: Final = 6
# largest correction factor, and 1/x the smallest
_MOST_BIAS: Final = 8.0
# seconds of a forecast above which its weight in the bias does not grow
_MOST_WEIGHT: Final = 1.0
# reasons that hold requests up until a running one ends
_FULL: Final = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))
# number of equally likely lengths that are assumed for each output: the first of many ends early
_PARTS: Final = 3
# last arrivals that predict those to come, their greatest age in seconds, and their least number
_ARRIVALS: Final = 256
_LATELY: Final = 60.0
_FEW: Final = 8
# least part of the engine that is assumed to be left over once an overload has ended
_ROOM: Final = 0.25
# factor on the time after which a request is late: one below may still be on time, not demoted
_DOUBT: Final = 1.1
# most rounds of adding requests that arrive during the wait, and a round's least factor of growth
_ROUNDS: Final = 32
_GROWS: Final = 1.01
# factor by which older measurements decay with each first token
_KEEP: Final = 0.98


class FirstTokenForecast:
    """Predicts the time to first token of a request that would be queued now.

    It waits until prompt tokens are computed before its own, and for a slot, which a running
    request frees when it ends: both for the requests ahead of it in the policy's queue, and for
    those that are likely to arrive later and overtake it. The ratio of actual to predicted time is
    learned for each kind of request, with as many overtakers as the real wait had: or one wait
    that was predicted too short would make the next predictions too long.

    Where newcomers displace running requests, the outcome of a long wait is known too late to learn
    from. Instead the pace of the queue is measured, and prompts computed again, both seen at once.
    """

    def __init__(
        self, state: SchedulerState, share: GuaranteedShare, targets: WaitingTargets
    ) -> None:
        self._state, self._share, self._targets = state, share, targets
        self._displaces = overrides(state.policy, "displaces")
        # factor on waits, tokens computed again per overtaker, and sums from which both follow
        self._pace, self._again = 1.0, 0.0
        self._lately = [0.0] * 5
        # counters at the last newcomer, and its time of arrival if all slots were taken
        self._counted = 0, 0, 0
        self._taken_since: float | None = None
        # the last request that was predicted overtakes some that wait or run
        self._overtakes = False
        # by kind of request: recent logarithms of actual over predicted time, and their weights
        self.outcomes: dict[ForecastKind, tuple[float, float]] = {}
        # (time, tier, entry in ``_alike``) of the last arrivals
        self._arrivals: deque[tuple[float, Tier, tuple[float, int]]] = deque()
        # by tier: (key of an equal request that arrives at time 0, prompt tokens), sorted
        self._alike: tuple[list[tuple[float, int]], ...] = tuple([] for _ in Tier)
        # version of the plan at the last look, and findings: free slots, prompt tokens per step,
        # narrow rows and their seconds, those of a prompt token, and tokens that ordinary ones lack
        self._seen, self._free_places, self._tokens_per_step = -1, 0, 2
        self._base = StepShape()
        self._step_seconds = self._token_seconds = 0.0
        self._num_lacking = 0
        # a heap, empty until needed, of the steps until running requests, and those that take their
        # slots, end, each in ``_PARTS`` parts as ``steps * base + whole length``; the ends taken
        # from it so far, in order; the steps from one later end to the next; and the base
        self._left: list[int] = []
        self._ends: list[int] = []
        self._each = 0.0
        self._whole_below = 1

    def note(self, request: Request, longest: float) -> float | None:
        """Store a newcomer's forecast in it, and return the predicted seconds. If not all can be on
        time, and it is predicted within ``longest`` seconds though none made way, triage tells
        whether it is demoted or others are."""
        history, arrival = request.history, request.asked.arrival_time
        rest = self._state.steps.starts(arrival + request.asked.adapter_wait) - arrival
        history.forecast = self._forecast(request, rest, longest)
        history.predicted_ttft = seconds = self._seconds(history.forecast)
        return seconds

    def rest(self) -> None:
        """Forget when slots were taken: the last request has ended."""
        self._taken_since = None

    def on_arrival(self, request: Request) -> None:
        """Count a newcomer that was queued."""
        now, key, arrivals = request.asked.arrival_time, request.key, self._arrivals
        if self._displaces and self._state.step_time.ready:
            self._measure(request)
        while arrivals and (len(arrivals) == _ARRIVALS or arrivals[0][0] < now - _LATELY):
            _, tier, oldest = arrivals.popleft()
            del self._alike[tier][bisect_left(self._alike[tier], oldest)]
        newest = (key - self._state.policy.key_per_second * now, request.num_new_tokens)
        arrivals.append((now, request.tier, newest))
        insort(self._alike[request.tier], newest)

    def predict(self, request: Request) -> float | None:
        """Return the seconds to the first token if it were queued now; None: it is unknown."""
        return self._seconds(self._forecast(request))

    def _seconds(self, forecast: Forecast | None) -> float | None:
        if forecast is None:
            return None
        # no forecast is longer than the longest target that a caller may set
        return min(MAX_SECONDS, self.bias(forecast.kind) * forecast.seconds)

    def bias(self, kind: ForecastKind) -> float:
        """Return the recent ratio of actual to predicted time for a kind of request; for a boosted
        kind the ratio of the same kind without boost, until one has had its first token."""
        known = self.outcomes.get(kind) or self.outcomes.get(kind._replace(boosted=False))
        logs, weights = known or (0.0, 1.0)
        return math.exp(logs / weights)

    def _forecast(
        self, request: Request, rest: float = 0.0, longest: float = -math.inf
    ) -> Forecast | None:
        """Return the forecast, with ``rest`` seconds left of the running step; None before anything
        was measured. Triage is asked about a forecast within ``longest`` seconds alone."""
        state = self._state
        self._learn_outcomes()
        if not state.step_time.ready:
            return None
        self._look()
        prompt, kind = self._prompt_seconds(request, rest), _kind_of(request)
        bias, ahead = self.bias(kind), self._num_ahead(request)
        wait, alone, most = self._wait(request, bias, *ahead)
        seconds = wait + prompt
        late = seconds > request.late_after
        if request.tier is not Tier.ORDINARY:
            return self._best_effort(request, kind._replace(late=late), alone + prompt, prompt)
        demotes = state.config.demote_late and self._targets.dues and not request.boosted
        if demotes and late:
            found = self._demoted(request, kind, seconds)
        else:
            overtaken = (wait - alone) / max(1e-9, bias * seconds)
            known = kind._replace(late=late)
            found = Forecast(known, seconds, alone + prompt, overtaken, most)
        if not demotes or self.bias(found.kind) * found.seconds > longest:
            return found
        if found.kind.late or self._crowds(request, rest):
            # it will be demoted for other waiting requests, or some of these for it
            wait, kept = self._without_late(request, rest, *ahead)
            # where newcomers displace others, the time of those left out is not learned
            kept = kept or self._displaces
            seconds = wait + prompt if kept else max(seconds, wait + prompt)
            judged = self._demoted(request, kind, seconds, kept=kept)
            return judged if found.kind.late or judged.kind.late else found
        return found

    def _best_effort(
        self, request: Request, kind: ForecastKind, seconds: float, prompt: float
    ) -> Forecast:
        """Return the forecast of a best-effort request: those before it come first, and then
        ordinary work to come leaves only a part. Of those that cannot all meet their deadlines, the
        largest is demoted, and the others are served when these come near."""
        seconds += self._outside(request, prompt)
        work, group, bias = self._state.work, self._targets.group, self.bias(kind)
        if (deadline := request.targets.deadline) is not None and self._state.config.demote_late:
            latest = deadline - work.output_tokens(request) * self._step_seconds
            if bias * seconds > latest:
                own, name = work.seconds(request), group(request)
                rivals = (r for _, _, r in self._targets.deadline_batch if group(r) == name)
                larger = (work.seconds(each) > own for each in islice(rivals, MAX_TRIAGED))
                if latest > prompt and any(larger):
                    # no outcome tells more about it
                    return Forecast(kind, latest / bias, 0.0, 0.0, 0.0)
                kind = kind._replace(late=True)
        return Forecast(kind, seconds, seconds, 0.0, 0.0)

    def _demoted(
        self, request: Request, kind: ForecastKind, seconds: float, *, kept: bool = True
    ) -> Forecast:
        """Return the forecast of a request that takes ``seconds`` unless it is demoted, which it is
        if these are clearly too many, or triage has not ``kept`` it."""
        late = not kept or seconds > _DOUBT * request.late_after
        if late:
            seconds += self._outside(request, max(0.0, seconds - request.late_after))
        return Forecast(kind._replace(late=late), seconds, seconds, 0.0, 0.0)

    def _learn_outcomes(self) -> None:
        first_tokens = self._state.last.first_tokens
        for known, actual, demoted in first_tokens:
            # the outcome of a request demoted, or kept, against its forecast says nothing of others
            if known.kind.late == demoted and not self._displaces:
                self._learn(known, actual)
        first_tokens.clear()

    def _prompt_seconds(self, request: Request, rest: float) -> float:
        """Return the seconds for a prompt whose first step begins in ``rest`` seconds."""
        state, step = self._state, self._tokens_per_step
        predict = state.step_time.predict
        if request.boosted:
            # its prompt is computed whole if a step has room for it, whatever the others lack
            room = state.config.max_num_batched_tokens - self._base.narrow_rows
            step = max(2, min(request.num_new_tokens, room))
        num_steps = -(-request.num_new_tokens // step)
        last_tokens = max(2, request.num_new_tokens - (num_steps - 1) * step)
        seconds = rest + (num_steps - 1) * predict(self._base.plus(0, step))
        return seconds + predict(self._base.plus(0, last_tokens)) + num_steps * state.chunk.away_s

    def seconds_each(self, request: Request) -> float:
        """Return the seconds between requests like this one if they are served one after another
        from what is left over once an overload has ended; 0.0 before anything was measured."""
        if not self._state.step_time.ready:
            return 0.0
        self._steps_until(1.0)
        alone = self._lasting(self._each * _PARTS, request.num_new_tokens)
        return alone / max(_ROOM, self._share.left_over(request, request.asked.arrival_time))

    def _crowds(self, request: Request, rest: float) -> bool:
        """Return whether this newcomer and the waiting requests may not all be on time."""
        starts, tokens = request.asked.arrival_time + rest, self._num_lacking
        each = self._pace * self._lasting(0.0, 1.0)
        crowded = not self._targets.in_time(starts, tokens + request.num_new_tokens, each)
        return crowded and request.late_after < math.inf and not self._displaces

    def _without_late(
        self, request: Request, rest: float, num: int, tokens: float
    ) -> tuple[float, bool]:
        """Return the seconds until it has a slot, and the prompts before its own are computed, if
        requests that will be late are demoted; and whether triage keeps it: otherwise all that are
        kept go before it."""
        targets, now = self._targets, request.asked.arrival_time
        first = list(islice(self._state.policy.service_order(targets.targeted), MAX_TRIAGED))
        before, outside, num_outside = self._targeted_ahead(request, num, tokens)
        before = min(before, len(first))
        first.insert(before, request)
        lacking, each = (self._pace * self._lasting(0.0, n) for n in (self._num_lacking, 1.0))
        left_out = set(targets.left_out(first, now + rest + lacking, each))
        num, tokens, kept = 0, 0, request not in left_out
        for other in (r for r in first[: before if kept else None] if r not in left_out):
            if now + self._until(num, tokens, boosted=False) <= first_token_due(other):
                num, tokens = num + 1, tokens + other.num_lacking_tokens
        return self._until(num + num_outside, tokens + outside, boosted=False), kept

    def _targeted_ahead(self, request: Request, num: int, tokens: float) -> tuple[int, float, int]:
        """Return how many waiting requests that triage judges are before it; and of the others
        before it, which all keep their places, the prompt tokens and the number."""
        targets = self._targets
        if num <= 0:
            return 0, 0.0, 0
        if self._state.policy.keeps_tenants_apart:
            # keys do not tell then which request goes first
            judged = round(num * len(targets.dues) / len(self._state.waiting.ordinary))
        else:
            before = [bisect_left(r, request.order, key=ORDER) for r in targets.targeted.values()]
            judged = min(num, sum(before))
        return judged, tokens * (num - judged) / num, num - judged

    def _outside(self, request: Request, wait: float) -> float:
        """Return the seconds that ordinary work adds for a best-effort or late request: its like
        ahead of it in the queue, and then ``wait``, are served from what ordinary work leaves."""
        waiting, tier = self._state.waiting, max(request.tier, Tier.DEADLINE_BATCH)
        num, tokens = waiting.ahead_of(request, tier)
        num, tokens = num - len(waiting.ordinary), tokens - waiting.num_tokens[Tier.ORDINARY]
        own = self._until(num, max(0, tokens), boosted=False) + wait
        return own * (1.0 / self._share.left_over(request, request.asked.arrival_time) - 1.0)

    def _wait(
        self, request: Request, bias: float, num: int, tokens: float
    ) -> tuple[float, float, float]:
        """Return, with so many requests and prompt tokens before it, the seconds until the request
        has a slot and these prompts are computed; the same if no later request overtakes it;
        and for how many seconds some will."""
        self._overtakes = num < len(self._state.waiting)
        seconds = alone = self._until(num, tokens, boosted=request.boosted)
        span, overtakers = self._overtakers(request)
        if not overtakers:
            return seconds, alone, 0.0
        longest, sizes = zip(*overtakers, strict=True)
        # sums over the first 0, 1, 2, ...: seconds, tokens times seconds, and tokens
        seconds_of = list(accumulate(longest, initial=0.0))
        work_of = list(accumulate(map(mul, longest, sizes), initial=0.0))
        tokens_of = list(accumulate(sizes, initial=0))
        for _ in range(_ROUNDS):
            # as many arrive as did lately in such a time, each only while it would overtake
            wait = bias * seconds
            ended = bisect_left(longest, wait)
            more = (work_of[ended] + (tokens_of[-1] - tokens_of[ended]) * wait) / span
            come = (seconds_of[ended] + (len(longest) - ended) * wait) / span
            more += self._again * come
            longer = self._until(num + come, tokens + more, boosted=request.boosted)
            if longer <= _GROWS * seconds:
                break
            seconds = longer
        return seconds, alone, longest[-1]

    def _until(self, num: float, tokens: float, *, boosted: bool) -> float:
        """Return the seconds until ``num`` requests and one more have slots, and ``tokens`` prompt
        tokens are computed, as well as those that running requests lack: of these, before a
        boosted request, only what fits into the steps until it has a slot."""
        step = self._tokens_per_step
        steps = self._steps_until(num + 1 - self._free_places)
        tokens += min(self._num_lacking, steps * step) if boosted else self._num_lacking
        return self._pace * self._lasting(steps, tokens)

    def _lasting(self, steps: float, tokens: float) -> float:
        """Return the seconds of ``steps`` steps, or more if ``tokens`` prompt tokens need more."""
        steps = max(steps, tokens / self._tokens_per_step)
        return steps * max(self._step_seconds, 1e-9) + tokens * self._token_seconds

    def _num_ahead(self, request: Request) -> tuple[int, int]:
        """Return the requests, less those that it displaces, and the prompt tokens before it."""
        num, tokens = self._state.waiting.ahead_of(request, request.tier)
        if self._displaces:
            running, displaces = self._state.running.requests, self._state.policy.displaces
            later = running[bisect_right(running, place(request), key=place) :]
            num -= sum(displaces(request, each) for each in later)
        return num, tokens

    def _measure(self, newcomer: Request) -> None:
        """Take in what was measured since the last newcomer: tokens computed again, and whether
        this one overtakes others; if all slots were taken at both times, also the first tokens, the
        seconds, and the seconds predicted for that work."""
        totals, now = self._state.totals, newcomer.asked.arrival_time
        computed = self._state.steps.num_prefill_tokens
        counted = totals.num_first_tokens, totals.num_recomputed_tokens, computed
        num_first, again, tokens = map(sub, counted, self._counted)
        more = 0, 0.0, 0.0, again, self._overtakes
        if self._free_places <= 0 and self._taken_since is not None:
            # sets ``_each``
            self._steps_until(1.0)
            foreseen = self._lasting(num_first * self._each * _PARTS, tokens)
            more = num_first, max(0.0, now - self._taken_since), foreseen, again, self._overtakes
        keep = _KEEP**num_first
        self._lately = [keep * old + new for old, new in zip(self._lately, more, strict=True)]
        num, came, said, recomputed, num_overtakers = self._lately
        # ``_FEW`` more first tokens count as if they had come as predicted
        pace = (_FEW + num * came / max(1e-9, said)) / (_FEW + num)
        self._pace = min(_MOST_BIAS, pace)
        self._again = recomputed / max(1.0, num_overtakers)
        self._counted = counted
        self._taken_since = now if self._free_places <= 0 else None

    def _overtakers(self, request: Request) -> tuple[float, list[tuple[float, int]]]:
        """Return the seconds of recent arrivals, and of those the requests of its tier whose like
        will overtake ``request``: for how long they will (least first), and their prompt tokens.
        Keys grow in proportion to the time of arrival; no overtakers where tenants are kept apart,
        as keys do not tell then which request goes first."""
        arrivals, grows = self._arrivals, self._state.policy.key_per_second
        if self._state.policy.keeps_tenants_apart or len(arrivals) < _FEW:
            return 1.0, []
        now = max(request.asked.arrival_time, arrivals[-1][0])
        ends, own = request.key - grows * now, self._alike[request.tier]
        found = [((ends - key) / grows, size) for key, size in own[: bisect_left(own, (ends, -1))]]
        found.sort()
        # a rate is taken over a second at least: many arrivals at one moment are a burst
        return max(1.0, now - arrivals[0][0]), found

    def _steps_until(self, places: float) -> float:
        """Return the steps until ``places`` slots have come free. Requests like the running ones
        are assumed to take them at once, and to end in their turn."""
        running = self._state.running.requests
        if places <= 0.0 or not running:
            return 0.0
        if not self._left:
            self._whole_below = base = 1 + max(r.asked.sampling.max_tokens for r in running)
            self._left = sorted(self._state.work.spread(running, _PARTS, base))
            self._each = sum(map(mod, self._left, repeat(base))) / len(self._left) ** 2
        number = max(0, int((places - 0.5) * _PARTS))
        known = min(number, len(self._left) - 1)
        left, ends, base = self._left, self._ends, self._whole_below
        for _ in range(len(ends), known + 1):
            both = left[0]
            heapq.heapreplace(left, both + both % base * base)
            ends.append(both // base)
        return ends[known] + (number - known) * self._each

    def _look(self) -> None:
        """Measure what runs, once after each plan, result or end of a request."""
        if self._seen == self._state.last.version:
            return
        self._seen = self._state.last.version
        state, running = self._state, self._state.running.requests
        full = len(state.waiting) > 0 and state.last.blocked_by in _FULL
        self._free_places = 0 if full else state.config.max_num_seqs - len(running)
        self._tokens_per_step = max(2, state.last.chunk_tokens)
        narrow: list[int] = []
        self._num_lacking = 0
        for request in running:
            lacking = request.num_uncomputed_tokens
            if lacking <= 1:
                narrow.append(request.num_computed_tokens)
            elif request.tier is Tier.ORDINARY:
                self._num_lacking += lacking - 1
        self._base = StepShape(0, 0.0, len(narrow), sum(narrow))
        predict, step = state.step_time.predict, self._tokens_per_step
        self._step_seconds = predict(self._base)
        self._token_seconds = (predict(self._base.plus(0, step)) - self._step_seconds) / step
        self._step_seconds += state.chunk.away_s
        self._left, self._ends = [], []

    def _learn(self, forecast: Forecast, actual: float) -> None:
        """Update the bias of a kind by the outcome of a forecast."""
        if forecast.alone > 0.0:
            # weighted, so that large errors of short forecasts count little; weights are limited,
            # or the long waits of a whole queue would be learned late and all at once. The mean is
            # of logarithms: of the waits of late requests a few are many times longer than most
            weight = min(_MOST_WEIGHT, forecast.seconds)
            logs, weights = self.outcomes.get(forecast.kind, (0.0, weight))
            # bounded because of outliers
            waited = min(actual, forecast.overtaken_for)
            ratio = actual / (forecast.alone + forecast.overtaken * waited)
            ratio = min(_MOST_BIAS, max(1.0 / _MOST_BIAS, ratio))
            logs += 0.05 * (weight * math.log(ratio) - logs)
            self.outcomes[forecast.kind] = logs, weights + 0.05 * (weight - weights)


def _kind_of(request: Request) -> ForecastKind:
    """Return the kind of a request that is predicted to be in time."""
    priority = max(-_LEVELS, min(_LEVELS, request.asked.priority))
    patience = _PATIENT
    if request.late_after < math.inf:
        patience = max(-_PATIENT, min(_PATIENT - 1, math.frexp(request.late_after)[1]))
    return ForecastKind(request.tier, priority, request.boosted, False, patience)
