"""The frames and events of a timeline, as values.

::

    START       an engine begins: all earlier state is void
    ANNOUNCE    a request was queued; written once, numbered from 1
    PLAN        a step was planned: its numbers, and the changes of requests
    DONE        its result came in
    END         a request ended, with its history
    KEYFRAME    running and preempted requests, every two seconds, for readers that begin there
    DOOR        requests that wait for a grammar before the queue, and new refusals

A running request has a lane: the lowest that is free when it is admitted, kept until it ends or is
preempted. Only changes of a running request are written: one that decodes a token per step takes no
bytes at all. The process that serves viewers writes HELLO, GAUGES, GAP and NOTICE.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from paceline.core.queues.wait_clocks import REASONS

__all__ = [
    "ENDS",
    "NO_LANE",
    "VERSION",
    "Announce",
    "Done",
    "End",
    "Event",
    "Frame",
    "FrameType",
    "Keyframe",
    "Kind",
    "LaneState",
    "Plan",
    "State",
    "Told",
    "vocabulary",
]

# version of the frames; a reader refuses another one
VERSION: Final = 3
# lane of a request that does not run
NO_LANE: Final = 0xFFFF
# ends of requests, by number: the reasons of ``FinishReason``, and an expired time to wait
ENDS: Final = ("stop", "length", "abort", "error", "expired")


class FrameType(enum.IntEnum):
    """The first byte of a frame. A reader skips types that it does not know."""

    HELLO = 1
    START = 2
    KEYFRAME = 3
    PLAN = 4
    DONE = 5
    ANNOUNCE = 6
    END = 7
    GAUGES = 8
    GAP = 9
    NOTICE = 10
    DOOR = 11


class Kind(enum.IntEnum):
    """Kind of an event of a lane; its ``value`` is in brackets."""

    # a request runs from this step on [its number]
    ADMIT = 1
    # [tokens already computed: cached, of its parent, or restored from host memory]
    FOUND = 2
    # its wait was at first for its parent's prompt and not for capacity [microseconds]
    HELD = 3
    # several of its tokens are computed in this step [tokens]
    CHUNK = 4
    # one token and draft tokens [tokens]
    DRAFT = 5
    # a token per step from this one on
    NARROW = 6
    # it runs, but gets no tokens from this step on
    SKIP = 7
    # it was preempted [tokens that are lost], or was moved to host memory [tokens kept there]
    PREEMPT = 8
    SWAP = 9
    # its targets were given up, or are aimed at again
    DEMOTE = 10
    PROMOTE = 11
    # the next event of its lane happened before this plan: a plan without rows preempted it, and
    # such a plan is not written [microseconds]
    EARLIER = 12
    # draft tokens of the step that were wrong, and count as not computed [tokens]
    WRONG = 13


class State(enum.IntEnum):
    """State of a request."""

    WAIT = 0
    # waiting for its parent's prompt
    HELD = 1
    CHUNK = 2
    DECODE = 3
    SKIPPED = 4
    PREEMPTED = 5
    SWAPPED = 6
    ENDED = 7


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Lane = Annotated[int, msgspec.Meta(ge=0, le=NO_LANE)]


class Event(msgspec.Struct, frozen=True, array_like=True):
    lane: _Lane
    kind: int
    value: _Count = 0


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A step was planned. ``planned`` and other times are seconds of the engine's clock."""

    step: int
    planned: float
    predicted: float
    # predicted seconds of the step above which best effort stays out of it; infinite: no limit
    limit: float
    budget: int
    tokens: int
    free_blocks: int
    waiting: int
    # number of steps that this frame covers, the last one included; their tokens are summed
    merged: int
    # tokens of rows that write: one of each, and the draft tokens behind it
    narrow: int
    # chunks: rows of several tokens of a prompt
    wide: int
    # index into REASONS; 255: no request waits
    blocked_by: int
    pressure: int
    # events of kinds CHUNK to SKIP were left out
    thin: bool
    events: tuple[Event, ...]


class Done(msgspec.Struct, frozen=True, array_like=True):
    step: int
    done: float
    # seconds as the backend measured them
    backend: float
    # DEMOTE, PROMOTE and WRONG only
    events: tuple[Event, ...]


class Announce(msgspec.Struct, frozen=True, array_like=True):
    number: int
    # number of the request of which it is a further choice; 0: none
    parent: int
    arrival: float
    added: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    best_effort: bool
    # it continues the output of another engine
    resumed: bool
    # seconds
    ttft: float | None
    tpot: float | None
    deadline: float | None
    predicted_ttft: float | None
    # from callers: clipped, and to be shown as text only
    request_id: str
    slo_class: str
    tenant: str


class End(msgspec.Struct, frozen=True, array_like=True):
    number: int
    when: float
    # index into ENDS
    reason: _Count
    demoted: bool
    # seconds by reason, in the order of REASONS
    waits: tuple[float, ...]
    chunks: int
    preemptions: int
    recomputed: int
    swapped: int
    cached: int
    output_tokens: int
    # None if it has not happened
    first_scheduled: float | None
    first_token: float | None
    predicted_ttft: float | None


class LaneState(msgspec.Struct, frozen=True, array_like=True):
    """A running or preempted request, in a keyframe."""

    number: int
    lane: _Lane
    state: _Count
    demoted: bool
    # tokens whose keys and values are cached
    computed: int
    preemptions: int
    # seconds waited so far, without the present wait
    waited: float
    # time of the last admission or preemption
    since: float


class Keyframe(msgspec.Struct, frozen=True, array_like=True):
    # the step that is written next
    step: int
    now: float
    # a reader with other lanes must take these: something was left out before
    reset: bool
    lanes: tuple[LaneState, ...]


class Told(msgspec.Struct, frozen=True):
    """A frame whose content is JSON: START, HELLO, GAUGES, GAP, NOTICE, DOOR."""

    type: FrameType
    told: Mapping[str, Any]


Frame: TypeAlias = Announce | Plan | Done | End | Keyframe | Told


def vocabulary() -> dict[str, Any]:
    """Return the meaning of numbers, for a reader in another language."""
    return {
        "version": VERSION,
        "reasons": list(REASONS),
        "ends": list(ENDS),
        "states": [state.name.lower() for state in State],
        "kinds": {kind.name.lower(): int(kind) for kind in Kind},
        "frames": {frame.name.lower(): int(frame) for frame in FrameType},
    }
