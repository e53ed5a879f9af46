"""When a request that arrives now would see its first token, and what became of what was said.

Asked at the door, between steps, and often: running requests are looked at once a step.

This module does not decide what becomes of the request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from itertools import accumulate, repeat
from operator import mod, mul, sub
from typing import Final, NamedTuple

from paceline.core.pacing.share import GuaranteedShare
from paceline.core.pacing.waiting_targets import WaitingTargets
from paceline.core.policies import overrides
from paceline.core.predict.step_time import StepShape
from paceline.core.queues.running import place
from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request
from paceline.core.slo import MAX_SECONDS
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier

__all__ = ["FirstTokenForecast", "Forecast", "ForecastKind"]

# levels of priority that are told apart, on either side
_LEVELS: Final = 4
# times or part of what was said, at most
_MOST_BIAS: Final = 8.0
# seconds: a longer forecast counts no more than one of so many, when the bias is learned
_MOST_WEIGHT: Final = 1.0
# what holds requests up until a running one ends
_FULL: Final = frozenset((Reason.SLOTS, Reason.MEMORY, Reason.PACE))
# equally likely lengths that a request's output is taken to have: the first of many running
# requests ends long before half of their outputs are over
_PARTS: Final = 3
# arrivals that tell of those to come, not older than so many seconds, and how many tell something
_ARRIVALS: Final = 256
_LATELY: Final = 60.0
_FEW: Final = 8
# part of the engine that is left over, at least, once an overload has ended
_ROOM: Final = 0.25
# waiting requests asked whether they will be late, at most
_MAX_JUDGED: Final = 256
# times the seconds after which a request is late: one that is predicted later than that is taken to
# yield, and one within it may be on time
_DOUBT: Final = 1.1
# times that those who come during the wait are added to it, at most, and by how much it has to grow
_ROUNDS: Final = 32
_GROWS: Final = 1.01
# what is left with each first token of what was measured before
_KEEP: Final = 0.98


class ForecastKind(NamedTuple):
    """Requests whose forecasts are learned from together."""

    tier: Tier
    priority: int
    favoured: bool
    # the first token comes too late, and the request yields
    late: bool


class Forecast(NamedTuple):
    """Seconds from arrival to first token, before what other requests of this kind teach."""

    kind: ForecastKind
    seconds: float
    # the same if no later request went first; seconds that such requests add for each second of
    # the wait; and for how many seconds there are any
    alone: float
    overtaken: float
    overtaken_for: float


class FirstTokenForecast:
    """Predicts the time to first token of a request that would be queued now.

    What it waits for is prompt tokens computed before its own, and a place that a running request
    gives back when it ends; both for those ahead of it in the policy's queue, and for those that
    are likely to come and go first. The ratio of what came to what was said is learned for each
    kind of request, so that what the model leaves out corrects itself. What was said counts those
    who came and went first for as long as the wait really was: or a wait that was told too short
    would teach, with all that it lacked, to tell others too long.

    Where newcomers displace what runs, prompts are computed again, which shows at once, and what
    comes of a long wait is known too late to learn from: the pace of the queue is measured instead.
    """

    def __init__(
        self, state: SchedulerState, share: GuaranteedShare, targets: WaitingTargets
    ) -> None:
        self._state, self._share, self._targets = state, share, targets
        self._displaces = overrides(state.policy, "displaces")
        # by what a foreseen wait is multiplied, and tokens that are computed again for each that
        # goes before others; and sums that tell both, see ``_measure``
        self._pace, self._again = 1.0, 0.0
        self._lately = [0.0] * 5
        # what had been counted at the last newcomer, and when that was, if all places were taken
        self._counted = 0, 0, 0
        self._taken_since: float | None = None
        # of the request that was asked about last: some that wait or run come after it
        self._overtakes = False
        # lately, by kind of request: seconds that came and that were said
        self.outcomes: dict[ForecastKind, tuple[float, float]] = {}
        # (time, tier, what ``_alike`` has of it) of the last to come
        self._arrivals: deque[tuple[float, Tier, tuple[float, int]]] = deque()
        # the same by tier: (key of one like it that comes at time 0, prompt tokens), sorted
        self._alike: tuple[list[tuple[float, int]], ...] = tuple([] for _ in Tier)
        # the plan that was looked at last, and what was seen of it: requests that could run beside
        # the others, prompt tokens that a step takes, its narrow rows and seconds of these, seconds
        # that a prompt token adds, and prompt tokens that ordinary requests lack
        self._seen = -1
        self._free_places = 0
        self._tokens_per_step = 2
        self._base = StepShape()
        self._step_seconds = self._token_seconds = 0.0
        self._num_lacking = 0
        # steps until running requests end, and those that will run then, each in ``_PARTS`` parts
        # as ``steps * base + whole length``: a heap, empty until asked for; the ends taken from it
        # so far, in order; the steps from one to the next later on; and the base
        self._left: list[int] = []
        self._ends: list[int] = []
        self._each = 0.0
        self._whole_below = 1

    def note(self, request: Request, longest: float) -> float | None:
        """Write down with a newcomer what is predicted for it, and return that. One that may wait
        for no more than ``longest`` seconds and is let in may be on time after all, since others
        before it will yield."""
        history, arrival = request.history, request.asked.arrival_time
        rest = self._state.steps.starts(arrival) - arrival
        history.forecast = self._forecast(request, rest)
        seconds = self._seconds(history.forecast)
        if seconds is not None and history.forecast.kind.late and seconds <= longest < math.inf:
            history.forecast = self._forecast(request, rest, others_yield=True)
            seconds = self._seconds(history.forecast)
        history.predicted_ttft = seconds
        return seconds

    def rest(self) -> None:
        """The last request has ended: no place is taken until the next newcomer comes."""
        self._taken_since = None

    def came(self, request: Request) -> None:
        """The newcomer is queued."""
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
        """Seconds to the first token if it were queued between two steps; None while nothing was
        measured."""
        return self._seconds(self._forecast(request))

    def _seconds(self, forecast: Forecast | None) -> float | None:
        if forecast is None:
            return None
        # no caller plans for more than what the longest target may be
        return min(MAX_SECONDS, self.bias(forecast.kind) * forecast.seconds)

    def bias(self, kind: ForecastKind) -> float:
        """What came by what was said, lately, for a kind of request; for a favoured one, until one
        has had its first token, that of others like it."""
        known = self.outcomes.get(kind) or self.outcomes.get(kind._replace(favoured=False))
        came, said = known or (1.0, 1.0)
        return came / said

    def _forecast(
        self, request: Request, rest: float = 0.0, *, others_yield: bool = False
    ) -> Forecast | None:
        """``rest``: seconds that the step under way still takes. ``others_yield``: late requests
        before it are taken to yield."""
        state, last = self._state, self._state.last
        for known, actual, demoted in last.first_tokens:
            # a request that was demoted against its forecast teaches nothing about others
            on_time = known.kind.late and not demoted
            if not self._displaces and not on_time and (known.kind.late or not demoted):
                self._learn(known, actual)
        last.first_tokens.clear()
        if not state.step_time.ready:
            return None
        if self._seen != last.version:
            self._seen = last.version
            self._look()
        predict, step = state.step_time.predict, self._tokens_per_step
        if request.favoured:
            # it is computed whole where a step has room for it, whatever others lack
            room = state.config.max_num_batched_tokens - self._base.narrow_rows
            step = max(2, min(request.num_new_tokens, room))
        num_steps = -(-request.num_new_tokens // step)
        last_tokens = max(2, request.num_new_tokens - (num_steps - 1) * step)
        prompt = rest + (num_steps - 1) * predict(self._base.plus(0, step))
        prompt += predict(self._base.plus(0, last_tokens))
        priority = max(-_LEVELS, min(_LEVELS, request.asked.priority))
        kind = ForecastKind(request.tier, priority, request.favoured, late=False)
        bias = self.bias(kind)
        wait, alone, most = self._wait(request, bias)
        seconds = wait + prompt
        late = seconds > request.late_after
        if request.tier is not Tier.ORDINARY:
            # first what waits before it, and what comes meanwhile leaves it but a part
            seconds = alone = alone + prompt + self._outside(request, prompt)
            return Forecast(kind._replace(late=late), seconds, alone, 0.0, 0.0)
        if late and self._yields(request):
            if others_yield:
                seconds = alone = self._without_late(request) + prompt
            late = seconds > _DOUBT * request.late_after
            if late:
                excess = seconds - request.late_after
                seconds += self._outside(request, excess)
            return Forecast(kind._replace(late=late), seconds, seconds, 0.0, 0.0)
        overtaken = (wait - alone) / max(1e-9, bias * seconds)
        return Forecast(kind._replace(late=late), seconds, alone + prompt, overtaken, most)

    def _yields(self, late: Request) -> bool:
        """Whether a request that will be late yields to others that wait."""
        return bool(self._state.config.relegate_late and self._targets.dues and not late.favoured)

    def seconds_each(self, request: Request) -> float:
        """Seconds in which requests like this one find room that others leave, one after another,
        once these leave some; 0.0 while nothing was measured."""
        if not self._state.step_time.ready:
            return 0.0
        self._steps_until(1.0)
        alone = self._lasting(self._each * _PARTS, request.num_new_tokens)
        return alone / max(_ROOM, self._share.left_over(request, request.asked.arrival_time))

    def _without_late(self, request: Request) -> float:
        """Seconds until the request has a place if all before it yield that will be late."""
        num, tokens = self._num_ahead(request)
        now, dues = request.asked.arrival_time, self._targets.dues[:_MAX_JUDGED]
        served, each = 0, tokens / max(1, num)
        for due in dues:
            served += now + self._until(served, each * served, favoured=False) <= due
        num = max(0, num - (len(dues) - served))
        return self._until(num, each * num, favoured=False)

    def _outside(self, request: Request, wait: float) -> float:
        """Seconds that promised work adds to those of a best-effort or late request: its like that
        wait before it, and ``wait``, are served from what promised work leaves."""
        waiting, tier = self._state.waiting, max(request.tier, Tier.PROMISED)
        num, tokens = waiting.ahead_of(request, tier)
        num, tokens = num - len(waiting.ordinary), tokens - waiting.num_tokens[Tier.ORDINARY]
        own = self._until(num, max(0, tokens), favoured=False) + wait
        return own * (1.0 / self._share.left_over(request, request.asked.arrival_time) - 1.0)

    def _wait(self, request: Request, bias: float) -> tuple[float, float, float]:
        """Seconds until the request has a place, and prompts before its own are computed; the same
        if none came later and went first; and for how long some will."""
        num, tokens = self._num_ahead(request)
        self._overtakes = num < len(self._state.waiting)
        seconds = alone = self._until(num, tokens, favoured=request.favoured)
        span, overtakers = self._overtakers(request)
        if not overtakers:
            return seconds, alone, 0.0
        longest, sizes = zip(*overtakers, strict=True)
        # of the first so many: seconds, tokens times seconds, and tokens
        seconds_of = list(accumulate(longest, initial=0.0))
        work_of = list(accumulate(map(mul, longest, sizes), initial=0.0))
        tokens_of = list(accumulate(sizes, initial=0))
        for _ in range(_ROUNDS):
            # as many as came lately in so long a time: some for as long as they go first
            wait = bias * seconds
            ended = bisect_left(longest, wait)
            more = (work_of[ended] + (tokens_of[-1] - tokens_of[ended]) * wait) / span
            come = (seconds_of[ended] + (len(longest) - ended) * wait) / span
            more += self._again * come
            longer = self._until(num + come, tokens + more, favoured=request.favoured)
            if longer <= _GROWS * seconds:
                break
            seconds = longer
        return seconds, alone, longest[-1]

    def _until(self, num: float, tokens: float, *, favoured: bool) -> float:
        """Seconds until places have come free for so many requests and one more, and so many prompt
        tokens are computed beside those that running requests lack: of these, before a favoured
        one, what fits into the steps until it has a place."""
        step = self._tokens_per_step
        steps = self._steps_until(num + 1 - self._free_places)
        tokens += min(self._num_lacking, steps * step) if favoured else self._num_lacking
        return self._pace * self._lasting(steps, tokens)

    def _lasting(self, steps: float, tokens: float) -> float:
        """Seconds of so many steps, or more for so many prompt tokens."""
        steps = max(steps, tokens / self._tokens_per_step)
        return steps * max(self._step_seconds, 1e-9) + tokens * self._token_seconds

    def _num_ahead(self, request: Request) -> tuple[int, int]:
        """Requests and tokens before it in the queue; places of running requests that make way for
        it are as good as free."""
        num, tokens = self._state.waiting.ahead_of(request, request.tier)
        if self._displaces:
            running, displaces = self._state.running.requests, self._state.policy.displaces
            later = running[bisect_right(running, place(request), key=place) :]
            num -= sum(displaces(request, each) for each in later)
        return num, tokens

    def _measure(self, newcomer: Request) -> None:
        """Take in what came since the last newcomer: tokens computed again, and whether this one
        goes before others; if all places were taken then and are now, first tokens as well, the
        seconds, and those that what was done was to take."""
        totals, now = self._state.totals, newcomer.asked.arrival_time
        computed = self._state.steps.num_prefill_tokens
        counted = totals.num_first_tokens, totals.num_recomputed_tokens, computed
        num_first, again, tokens = map(sub, counted, self._counted)
        more = 0, 0.0, 0.0, again, self._overtakes
        if self._free_places <= 0 and self._taken_since is not None:
            # for what places take
            self._steps_until(1.0)
            foreseen = self._lasting(num_first * self._each * _PARTS, tokens)
            more = num_first, max(0.0, now - self._taken_since), foreseen, again, self._overtakes
        keep = _KEEP**num_first
        self._lately = [keep * old + new for old, new in zip(self._lately, more, strict=True)]
        num, came, said, recomputed, num_overtakers = self._lately
        # a few count as if they had come as foreseen
        pace = (_FEW + num * came / max(1e-9, said)) / (_FEW + num)
        self._pace = min(_MOST_BIAS, pace)
        self._again = recomputed / max(1.0, num_overtakers)
        self._counted = counted
        self._taken_since = now if self._free_places <= 0 else None

    def _overtakers(self, request: Request) -> tuple[float, list[tuple[float, int]]]:
        """Seconds, and the requests of its tier that came in these whose like will go before
        ``request``: for how long they will (least first), and their prompt tokens. Keys grow in
        proportion to the time of arrival; where tenants are kept apart they do not tell which goes
        first."""
        arrivals, grows = self._arrivals, self._state.policy.key_per_second
        if self._state.policy.keeps_tenants_apart or len(arrivals) < _FEW:
            return 1.0, []
        now = max(request.asked.arrival_time, arrivals[-1][0])
        ends, own = request.key - grows * now, self._alike[request.tier]
        found = [((ends - key) / grows, size) for key, size in own[: bisect_left(own, (ends, -1))]]
        found.sort()
        # the rate is told from a second at least: many of one moment are a burst
        return max(1.0, now - arrivals[0][0]), found

    def _steps_until(self, places: float) -> float:
        """Steps until so many places have come free. Requests that are like those that run take
        them at once, and end in their turn."""
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
        """Take in what runs. Good until the next plan, result or end of a request."""
        state, running = self._state, self._state.running.requests
        full = len(state.waiting) > 0 and state.last.held_by in _FULL
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
        self._left, self._ends = [], []

    def _learn(self, forecast: Forecast, actual: float) -> None:
        """Take in what became of a forecast."""
        if forecast.alone > 0.0:
            # a ratio of sums: what is off by much in a short time counts little, and no forecast is
            # more than one of a second, or those of a whole queue would be learned late, at once
            weight = min(_MOST_WEIGHT, forecast.seconds)
            came, said = self.outcomes.get(forecast.kind, (weight, weight))
            # bounded against outliers
            waited = min(actual, forecast.overtaken_for)
            ratio = actual / (forecast.alone + forecast.overtaken * waited)
            ratio = min(_MOST_BIAS, max(1.0 / _MOST_BIAS, ratio))
            self.outcomes[forecast.kind] = (
                came + 0.05 * (weight * ratio - came),
                said + 0.05 * (weight - said),
            )
