"""A supervisor's records of engines and requests: its output for requests without engine, and the
statistics of several engines in succession, summed as if they were one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import msgspec

from paceline.engine.fanout import open_choices
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.supervision.quarantine import Place, Suspect
from paceline.engine.types import (
    AdapterStats,
    AdapterStatus,
    BlockStats,
    ChoiceDelta,
    EngineFaults,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    SchedulerStats,
)

__all__ = [
    "COUNTERS",
    "Aborted",
    "Call",
    "Counts",
    "Engine",
    "KnownAdapter",
    "aborted_output",
    "added",
    "fail_wait",
    "for_the_next",
]


class Aborted(Exception):
    """The request was aborted while it waited for an engine."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process in the succession."""

    client: ProcessEngineClient
    # the request that ended it
    guilty: Suspect | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One running ``generate``."""

    # includes the output that ended engines have delivered
    request: GenerationRequest
    # the future it waits for while there is no engine, and for its turn
    waiter: asyncio.Future[None] | None = None
    place: Place | None = None
    # the engine that runs it
    engine: Engine | None = None
    # times that an engine ended under it, through other requests as far as is known
    losses: int = 0
    suspect: Suspect = field(default_factory=Suspect)
    aborted: bool = False


@dataclass(slots=True)
class Counts:
    losses: Counter[str] = field(default_factory=Counter)
    resent: int = 0
    lost: int = 0
    poisoned: int = 0
    recovery_seconds: float = 0.0

    def faults(self, *, up: bool) -> EngineFaults:
        """Return them for metrics; ``up``: there is an engine."""
        return EngineFaults(
            up=up,
            losses=tuple(sorted(self.losses.items())),
            recovery_seconds=self.recovery_seconds,
            num_resent=self.resent,
            num_lost=self.lost,
            num_poisoned=self.poisoned,
        )


def fail_wait(call: Call, error: Exception) -> None:
    """Fail the future that a call waits for, if it waits."""
    waits_for = call.waiter
    if waits_for is None and call.place is not None:
        waits_for = call.place.turn
    if waits_for is not None and not waits_for.done():
        waits_for.set_exception(error)


def aborted_output(request: GenerationRequest) -> GenerationOutput:
    """Return the last output of a request that no engine has."""
    resume = request.resume
    return GenerationOutput(
        request_id=request.request_id,
        choices=tuple(
            ChoiceDelta(index=index, text="", token_ids=(), finish_reason="abort")
            for index in open_choices(request)
        ),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0 if resume is None else resume.num_cached_tokens,
        num_output_tokens=0 if resume is None else resume.num_output_tokens,
        finished=True,
        times=None if resume is None else resume.times,
    )


class KnownAdapter(NamedTuple):
    """An adapter as it was loaded."""

    path: str
    # empty: it was not loaded yet
    digest: str
    pinned: bool = False


def for_the_next(
    adapters: Mapping[str, KnownAdapter], news: Mapping[str, AdapterStatus]
) -> dict[str, KnownAdapter]:
    """Return adapters as the next engine is told of them: with the digests that ``news`` of the one
    before tell, and first those that it loads whatever requests name."""
    told = {
        key: known if (now := news.get(key)) is None or known.digest
        else known._replace(digest=now.digest)
        for key, known in adapters.items()
    }  # fmt: skip
    return dict(sorted(told.items(), key=lambda each: not each[1].pinned))


# the fields of SchedulerStats that add up; the others are present values
COUNTERS: Final = tuple(f.name for f in fields(SchedulerStats) if f.metadata.get("counts"))
# the same of the parts that an engine may lack, and what stands for one that is lacking
_PARTS: Final[Mapping[str, tuple[Any, tuple[str, ...]]]] = {
    "adapters": (AdapterStats(), ("loads", "load_seconds", "gone", "wait_seconds")),
    "blocks": (
        BlockStats(), ("fetched", "sent_tokens", "read_bytes", "written_bytes", "errors"),
    ),
}  # fmt: skip


def added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return ``now`` with its counters continuing those of ``before``, so that none ever falls."""
    old, new = before.scheduler, now.scheduler
    totals = {name: _sum(getattr(old, name), getattr(new, name)) for name in COUNTERS}
    parts: dict[str, Any] = {}
    for part, (empty, counters) in _PARTS.items():
        if (earlier := getattr(before, part)) is not None:
            present = getattr(now, part) or empty
            sums = {name: _sum(getattr(earlier, name), getattr(present, name)) for name in counters}
            parts[part] = msgspec.structs.replace(present, **sums)
    return msgspec.structs.replace(
        now, num_steps=before.num_steps + now.num_steps, scheduler=replace(new, **totals), **parts
    )


def _sum(before: Any, now: Any) -> Any:
    """Add two numbers, or numbers by name or names."""
    if not isinstance(now, tuple):
        return before + now
    total = Counter[Any]()
    for *names, count in (*before, *now):
        total[tuple(names)] += count
    return tuple((*names, count) for names, count in total.items())
