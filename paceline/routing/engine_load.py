"""What one engine has to do, as seen by who sends it requests: counted at once when a request is
sent, and corrected by what the engine says of itself now and then.

Between two polls everything that is sent counts already, so that requests which arrive together do
not all choose the same idle engine. What an engine does not say is None and never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.routing.latency import LatencyModel
from paceline.routing.pace import Pace
from paceline.routing.prefixes import PREFIX_BLOCK_BYTES, PrefixIndex

__all__ = ["Demand", "Dispatch", "EngineLoad", "EngineView", "Pressure"]

# what an engine said is worth nothing after so many seconds
STALE_SECONDS: Final = 5.0
# share of the KV cache at which an engine is short of memory while requests wait there, at which it
# no longer is, and at which it is whatever waits
PRESSED: Final = 0.88
RELIEVED: Final = 0.83
FULL: Final = 0.95
# of what is usual for an engine, that one first token moves
_USUAL_STEP: Final = 0.02
# of a Paceline engine's valve: from here on it makes room by force
_PRESSED_LEVEL: Final = 3.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request will take."""

    prompt_tokens: float
    # most, and expected
    max_tokens: float
    output_tokens: float
    # see ``prefixes.prefix_chain``; and prompt tokens that one run of it stands for
    prefix: Sequence[int] = ()
    tokens_per_run: float = PREFIX_BLOCK_BYTES / 4
    # seconds that the caller wants; None: no such target
    ttft: float | None = None
    tpot: float | None = None
    # tokens of the longest of its prompts, as estimated, and those that it certainly has
    longest_prompt: float = 0.0
    least_prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """What an engine said of itself at ``at``; None: it does not say."""

    at: float
    waiting: float | None = None
    running: float | None = None
    # share of the KV cache in use, 0 to 1
    kv: float | None = None
    # tokens that the KV cache holds
    capacity_tokens: float | None = None
    preemptions: float | None = None
    # of a Paceline engine: its valve, 0 to 4
    level: float | None = None


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as a choice sees it."""

    name: str
    # requests that were sent and have not ended
    num_requests: int
    # prompt tokens to compute before this request's first token, its own included
    prefill_tokens: float
    # of its prompt, already there
    cached_tokens: float
    # seconds in which the KV cache that is missing for this request comes free
    wait: float
    # share of the KV cache in use as estimated; None: unknown
    kv: float | None
    # predicted seconds
    ttft: float
    tpot: float
    # seconds since the engine last said how it is; None: it never did
    staleness: float | None
    # short of memory
    pressed: bool = False
    # of the requests that would come to it, those that it is to get: 1, or less for an engine that
    # has become slow or has just come back
    share: float = 1.0


class Dispatch:
    """One request at one engine. ``end`` may be called more than once."""

    __slots__ = ("_load", "_prefill", "_resident", "at", "first_at", "view")

    def __init__(self, load: EngineLoad, demand: Demand, view: EngineView, now: float) -> None:
        self._load = load
        self._prefill = max(0.0, demand.prompt_tokens - view.cached_tokens)
        self._resident = demand.prompt_tokens + demand.output_tokens
        self.view = view
        self.at = now
        self.first_at: float | None = None

    def first_token(self, now: float) -> None:
        """Its prompt is computed."""
        if self.first_at is None:
            self.first_at = now
            load = self._load
            load.prefill_tokens -= self._prefill
            self._prefill = 0.0
            load.saw_first(self.view, now - self.at)

    def end(self, now: float, num_tokens: int = 0) -> None:
        """It is over, however it went; ``num_tokens`` were generated."""
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
    """One engine's."""

    def __init__(self, name: str, *, prefix_memory: int = 100_000) -> None:
        self.name = name
        self.latency = LatencyModel()
        # what is usual, which follows slowly what ``latency`` follows fast
        self._usual = LatencyModel(step=_USUAL_STEP)
        self.pace = Pace()
        self.prefixes = PrefixIndex(prefix_memory)
        self.running: set[Dispatch] = set()
        # when a request was last sent there; 0.0: never
        self.sent_at = 0.0
        # of requests without a first token
        self.prefill_tokens = 0.0
        # prompt and expected output of all that run
        self.resident_tokens = 0.0
        self.pressure: Pressure | None = None
        # short of memory, by what it said
        self.pressed = False
        # first tokens that came, and seconds to them: as predicted when their requests were sent,
        # and as it was
        self.num_first = 0
        self.predicted_first = 0.0
        self.actual_first = 0.0
        # sent and not ended when the engine last spoke
        self._known_resident = 0.0

    def dispatch(self, demand: Demand, view: EngineView, now: float) -> Dispatch:
        """A request is sent there."""
        ticket = Dispatch(self, demand, view, now)
        self.running.add(ticket)
        self.sent_at = now
        self.prefill_tokens += ticket._prefill
        self.resident_tokens += ticket._resident
        return ticket

    def heard(self, pressure: Pressure) -> None:
        """The engine spoke."""
        before, self.pressure = self.pressure, pressure
        self.pressed = _is_pressed(pressure, before, self.pressed)
        self._known_resident = self.resident_tokens

    def saw_first(self, view: EngineView, seconds: float) -> None:
        """A first token came; ``view``: as its request's choice saw this engine."""
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
            # requests that wait there, for others' sake too, wait before this one
            overcommit = max(overcommit, pressure.waiting / max(1.0, pressure.running or 1.0))
        prefill = max(0.0, self.prefill_tokens) + demand.prompt_tokens - cached
        count = len(self.running)
        tpot = self.latency.next_token(count + 1)
        # as much as it is short of comes free in that share of the time that a request holds it
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

    def _memory(
        self, demand: Demand, cached: float, pressure: Pressure | None
    ) -> tuple[float | None, float]:
        """Share of the KV cache in use, and what this request would ask for beyond it."""
        if pressure is None:
            return None, 0.0
        capacity = pressure.capacity_tokens
        kv = pressure.kv
        if capacity is None or capacity <= 0.0:
            return kv, 0.0
        if kv is not None:
            # what it said, and what was sent and ended since
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
