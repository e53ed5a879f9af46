"""What a timeline tells, as values.

::

    START       an engine begins: all that was known before is over
    ANNOUNCE    a request was queued; told once, numbered from 1
    PLAN        a step was planned: its numbers, and what changed for whom
    DONE        its result came in
    END         a request ended, with what became of it
    KEYFRAME    who runs and who was preempted, every two seconds, for whoever begins there
    DOOR        who waits for a grammar, before the queue, and who was refused since the last one

A running request has a lane: the lowest that is free when it is admitted, kept until it ends or is
preempted. Of a running request only changes are told: one whose steps go on with a token each takes
no bytes at all. HELLO, GAUGES, GAP and NOTICE are written by the process that serves viewers.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

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

# of the frames; a reader refuses another one
VERSION: Final = 2
# of a request that does not run
NO_LANE: Final = 0xFFFF
# how requests end, by number: the reasons of ``FinishReason``, and a time to wait that was over
ENDS: Final = ("stop", "length", "abort", "error", "expired")


class FrameType(enum.IntEnum):
    """The first byte of a frame. A reader passes over those that it does not know."""

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
    """What an event says of a lane; ``value`` is in brackets."""

    # a request runs from this step on [its number]
    ADMIT = 1
    # [tokens that were there: cached, of its parent, or back from host memory]
    FOUND = 2
    # it did not wait for a place before: its parent's prompt was not computed [microseconds]
    HELD = 3
    # several of its tokens are computed in this step [tokens]
    CHUNK = 4
    # one token and guesses of the next ones [tokens]
    DRAFT = 5
    # a token a step from this one on
    NARROW = 6
    # it runs, but gets nothing from this step on
    SKIP = 7
    # it gave its place up [tokens that are lost], or was moved to host memory [tokens kept there]
    PREEMPT = 8
    SWAP = 9
    # its targets were given up, or taken up again
    RELEGATE = 10
    PROMOTE = 11
    # what the next event of its lane says happened before this plan: one without rows preempted
    # it, and such a plan is not told [microseconds]
    EARLIER = 12
    # guesses of the step that were wrong: what was computed of them counts no more [tokens]
    WRONG = 13


class State(enum.IntEnum):
    """Where a request is."""

    WAIT = 0
    # it waits for its parent's prompt
    HELD = 1
    CHUNK = 2
    DECODE = 3
    SKIPPED = 4
    PREEMPTED = 5
    SWAPPED = 6
    ENDED = 7


class Event(NamedTuple):
    lane: int
    kind: int
    value: int = 0


class Plan(NamedTuple):
    """A step was planned. ``planned`` and other times are seconds of the engine's clock."""

    step: int
    planned: float
    predicted: float
    # best effort stays out of the step beyond so many predicted seconds; infinite: nothing is kept
    limit: float
    budget: int
    tokens: int
    free_blocks: int
    waiting: int
    # steps of which this stands for the last; their tokens are summed
    merged: int
    narrow: int
    wide: int
    # index into REASONS; 255: none waits
    held_by: int
    pressure: int
    # events of kinds CHUNK to SKIP were left out
    thin: bool
    events: tuple[Event, ...]


class Done(NamedTuple):
    step: int
    done: float
    # seconds that the backend says it took
    backend: float
    # RELEGATE, PROMOTE and WRONG alone
    events: tuple[Event, ...]


class Announce(NamedTuple):
    number: int
    # of the request that it is a further choice of; 0: none
    parent: int
    arrival: float
    added: float
    prompt_tokens: int
    max_tokens: int
    priority: int
    best_effort: bool
    # it goes on behind what another engine made of it
    resumed: bool
    # seconds; nan where there is none
    ttft: float
    tpot: float
    deadline: float
    predicted_ttft: float
    # from callers: clipped, and text to whoever shows them
    request_id: str
    slo_class: str
    tenant: str


class End(NamedTuple):
    number: int
    when: float
    # index into ENDS
    reason: int
    relegated: bool
    # seconds by reason, in the order of REASONS
    waits: tuple[float, ...]
    chunks: int
    preemptions: int
    recomputed: int
    swapped: int
    cached: int
    output_tokens: int
    # nan where it never came so far
    first_scheduled: float
    first_token: float
    predicted_ttft: float


class LaneState(NamedTuple):
    """A request that runs or was preempted, in a keyframe."""

    number: int
    lane: int
    state: int
    relegated: bool
    # tokens whose keys and values are there
    computed: int
    preemptions: int
    # seconds waited so far, not counting the wait under way
    waited: float
    # when it was admitted last, or preempted
    since: float


class Keyframe(NamedTuple):
    # the step that is told next
    step: int
    now: float
    # a reader that thinks otherwise is wrong: something was left out before
    reset: bool
    lanes: tuple[LaneState, ...]


class Told(NamedTuple):
    """A frame whose content is JSON: START, HELLO, GAUGES, GAP, NOTICE, DOOR."""

    type: FrameType
    told: Mapping[str, Any]


Frame: TypeAlias = Announce | Plan | Done | End | Keyframe | Told


def vocabulary() -> dict[str, Any]:
    """What numbers stand for, for a reader in another language."""
    return {
        "version": VERSION,
        "reasons": list(REASONS),
        "ends": list(ENDS),
        "states": [state.name.lower() for state in State],
        "kinds": {kind.name.lower(): int(kind) for kind in Kind},
        "frames": {frame.name.lower(): int(frame) for frame in FrameType},
    }
