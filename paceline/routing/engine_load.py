"""Load of one engine as its client sees it: counted when a request is sent, and corrected by what
the engine reports now and then.

Requests sent between two polls count at once, so that requests which arrive together do not all
choose the same idle engine. What an engine does not report is None, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from paceline.routing.latency import LatencyModel
from paceline.routing.pace import Pace
from paceline.routing.prefixes import PREFIX_BLOCK_BYTES, PrefixIndex

__all__ = ["Demand", "Dispatch", "EngineLoad", "EngineView", "Pressure"]

# age, s, from which an engine's report is ignored
STALE_SECONDS: Final = 5.0
# share of the KV cache from which an engine is short of memory while requests wait there; below
# which it no longer is; and from which it is in any case
PRESSED: Final = 0.88
RELIEVED: Final = 0.83
FULL: Final = 0.95
# weight of one first token in what is usual for an engine
_USUAL_STEP: Final = 0.02
# level of a Paceline engine's pressure valve from which it preempts best-effort work
_PRESSED_LEVEL: Final = 3.0


class Demand(msgspec.Struct, frozen=True):
    """Expected use of a request."""

    prompt_tokens: float
    # at most, and expected
    max_tokens: float
    output_tokens: float
    # see ``prefixes.prefix_chain``; and prompt tokens per run in it
    prefix: Sequence[int] = ()
    tokens_per_run: float = PREFIX_BLOCK_BYTES / 4
    # the caller's targets, s; None: no target
    ttft: float | None = None
    tpot: float | None = None
    # tokens of its longest prompt: the estimate, and a certain lower bound
    longest_prompt: float = 0.0
    least_prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """Report of an engine at ``at``; None: not reported."""

    at: float
    waiting: float | None = None
    running: float | None = None
    # share of the KV cache in use, 0 to 1
    kv: float | None = None
    # tokens that the KV cache holds
    capacity_tokens: float | None = None
    preemptions: float | None = None
    # a Paceline engine's pressure valve, 0 to 4
    level: float | None = None
    # requests that it runs at once, at most
    slots: float | None = None


class EngineView(msgspec.Struct, frozen=True):
    """An engine as a choice sees it."""

    name: str
    # requests that were sent and have not ended
    num_requests: int
    # prompt tokens to compute before this request's first token, its own included
    prefill_tokens: float
    # tokens of its prompt in the engine's cache
    cached_tokens: float
    # seconds until the KV cache or the slot that this request lacks becomes free
    wait: float
    # estimated share of the KV cache in use; None: unknown
    kv: float | None
    # predicted seconds
    ttft: float
    tpot: float
    # seconds since the engine's last report; None: there was none
    staleness: float | None
    # short of memory
    pressed: bool = False
    # share of the requests for it that it gets: 1, or less for an engine that has become slow or
    # just came back
    share: float = 1.0


class Dispatch:
    """One request at one engine. ``end`` may be called more than once."""

    __slots__ = ("_is_fetched", "_load", "_prefill", "_resident", "at", "first_at", "view")

    def __init__(
        self, load: EngineLoad, demand: Demand, view: EngineView, now: float, *, fetched: bool
    ) -> None:
        self._load, self._is_fetched = load, fetched
        self._prefill = 0.0 if fetched else max(0.0, demand.prompt_tokens - view.cached_tokens)
        self._resident = demand.prompt_tokens + demand.output_tokens
        self.view = view
        self.at = now
        self.first_at: float | None = None

    def first_token(self, now: float) -> None:
        """Note the first token: the prompt is computed."""
        if self.first_at is None:
            self.first_at = now
            load = self._load
            load.prefill_tokens -= self._prefill
            self._prefill = 0.0
            if not self._is_fetched:
                load.saw_first(self.view, now - self.at)

    def end(self, now: float, num_tokens: int = 0) -> None:
        """Note the end, however it came; ``num_tokens`` were generated."""
        load = self._load
        if self not in load.running:
            return
        load.running.discard(self)
        load.prefill_tokens -= self._prefill
        load.resident_tokens -= self._resident
        self._prefill = 0.0
        if self.first_at is not None and num_tokens > 2:
            others = 0.5 * (self.view.num_requests + len(load.running))
            load.latency.saw_next(others, (now - self.first_at) / (num_tokens - 1))


class EngineLoad:
    """Load of one engine."""

    def __init__(self, name: str, *, prefix_memory: int = 100_000) -> None:
        self.name = name
        self.latency = LatencyModel()
        # usual first-token times: follows slowly what ``latency`` follows fast
        self._usual = LatencyModel(step=_USUAL_STEP)
        self.pace = Pace()
        self.prefixes = PrefixIndex(prefix_memory)
        self.running: set[Dispatch] = set()
        # when a request was last sent there; 0.0: never
        self.sent_at = 0.0
        # prompt tokens of requests without a first token
        self.prefill_tokens = 0.0
        # prompts and expected outputs of all running requests
        self.resident_tokens = 0.0
        self.pressure: Pressure | None = None
        # short of memory, by its reports
        self.pressed = False
        # first tokens so far, and the sums of their predicted and actual seconds
        self.num_first = 0
        self.predicted_first = 0.0
        self.actual_first = 0.0
        # ``resident_tokens`` and the number of running requests at the engine's last report
        self._known_resident = 0.0
        self._known_running = 0

    def expect_like(self, others: Sequence[EngineLoad]) -> None:
        """Predict at first what ``others`` of its kind have learned: a new engine whose guess is
        faster than they are would get all requests."""
        self.latency.average([each.latency for each in others])
        self._usual.average([each._usual for each in others])

    def dispatch(
        self, demand: Demand, view: EngineView, now: float, *, fetched: bool = False
    ) -> Dispatch:
        """Count a request that is sent there; ``fetched``: its prompt is computed elsewhere, so its
        first token says nothing of the time that this engine needs."""
        ticket = Dispatch(self, demand, view, now, fetched=fetched)
        self.running.add(ticket)
        self.sent_at = now
        self.prefill_tokens += ticket._prefill
        self.resident_tokens += ticket._resident
        return ticket

    def heard(self, pressure: Pressure) -> None:
        """Take in the engine's report."""
        before, self.pressure = self.pressure, pressure
        self.pressed = _is_pressed(pressure, before, self.pressed)
        self._known_resident = self.resident_tokens
        self._known_running = len(self.running)

    def saw_first(self, view: EngineView, seconds: float) -> None:
        """Learn from a first token; ``view``: the engine as the request's choice saw it."""
        self.num_first += 1
        self.predicted_first += view.ttft
        self.actual_first += seconds
        ahead = (view.prefill_tokens, view.num_requests, view.wait)
        self.pace.saw(seconds, self._usual.first_token(*ahead))
        if self.pace.slow_since is None:
            self._usual.saw_first(*ahead, seconds)
        self.latency.saw_first(*ahead, seconds)

    def view(self, demand: Demand, now: float, share: float = 1.0) -> EngineView:
        pressure = self.pressure
        age = None if pressure is None else now - pressure.at
        cached = min(
            self.prefixes.matched(demand.prefix) * demand.tokens_per_run, demand.prompt_tokens
        )
        kv, overcommit = self._memory(demand, cached, pressure)
        if pressure is not None and pressure.waiting and age is not None and age < STALE_SECONDS:
            # requests already waiting there, for whatever reason, go before this one
            overcommit = max(overcommit, pressure.waiting / max(1.0, pressure.running or 1.0))
        if pressure is not None and pressure.slots:
            overcommit = max(overcommit, self._missing_slots(pressure, pressure.slots))
        prefill = max(0.0, self.prefill_tokens) + demand.prompt_tokens - cached
        count = len(self.running)
        tpot = self.latency.next_token(count + 1)
        # the missing share of memory comes free in that share of a request's time
        wait = overcommit * demand.output_tokens * tpot
        return EngineView(
            name=self.name,
            num_requests=count,
            prefill_tokens=prefill,
            cached_tokens=cached,
            wait=wait,
            kv=kv,
            ttft=self.latency.first_token(prefill, count, wait),
            tpot=tpot,
            staleness=age,
            pressed=self.pressed and age is not None and age < STALE_SECONDS,
            share=share,
        )

    def _missing_slots(self, pressure: Pressure, slots: float) -> float:
        """Return the ends of requests that come before this one's turn, as a share of the slots."""
        # what was sent from here, and what other clients had there at the last report
        reported = (pressure.running or 0.0) + (pressure.waiting or 0.0)
        there = len(self.running) + max(0.0, reported - self._known_running)
        return max(0.0, there + 1.0 - slots) / slots

    def wait(self, demand: Demand, now: float) -> float:
        """Return the predicted seconds by which the engine's load delays a first token."""
        idle = self.latency.first_token(demand.prompt_tokens, 0.0, 0.0)
        return max(0.0, self.view(demand, now).ttft - idle)

    def _memory(
        self, demand: Demand, cached: float, pressure: Pressure | None
    ) -> tuple[float | None, float]:
        """Return the share of the KV cache in use, and the share this request would lack."""
        if pressure is None:
            return None, 0.0
        capacity = pressure.capacity_tokens
        kv = pressure.kv
        if capacity is None or capacity <= 0.0:
            return kv, 0.0
        if kv is not None:
            # its report, plus what was sent and minus what ended since
            since = (self.resident_tokens - self._known_resident) / capacity
            kv = min(1.0, max(0.0, kv + since))
        need = demand.prompt_tokens - cached + demand.output_tokens
        asked = (self.resident_tokens + need) / capacity
        return kv, max(0.0, asked - 1.0)


def _is_pressed(now: Pressure, before: Pressure | None, pressed: bool) -> bool:
    """Whether an engine is short of memory, with hysteresis."""
    if now.level is not None:
        return now.level >= _PRESSED_LEVEL
    if now.kv is None:
        return False
    if pressed:
        return now.kv >= RELIEVED
    preempts = (
        before is not None
        and now.preemptions is not None
        and before.preemptions is not None
        and now.preemptions > before.preemptions
    )
    return now.kv >= FULL or (now.kv >= PRESSED and (bool(now.waiting) or preempts))
