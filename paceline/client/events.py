"""What a stream yields, in order: Started, deltas, Finished; between them what went wrong.

Only deltas and Finished hold content. The text of all TextDelta since the start, or since the last
Restarted, is that of Finished.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Event",
    "FellBack",
    "Finished",
    "ReasoningDelta",
    "Restarted",
    "Resumed",
    "Retrying",
    "Started",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer, over all its attempts counted once."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One whole call."""

    id: str
    name: str
    # JSON, as the model wrote it
    arguments: str


@dataclass(frozen=True, slots=True)
class Started:
    """An answer begins. Once for every stream."""

    # index into the client's targets
    target: int
    # as the server names them
    id: str
    model: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what a model thinks before it answers, where the server tells that apart."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one call: ``id`` and ``name`` come once, ``arguments`` in pieces."""

    # of the call in this answer, from 0
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """An attempt failed and another follows."""

    # number of the one that follows, from 2
    attempt: int
    reason: str
    # seconds until it begins
    wait: float


@dataclass(frozen=True, slots=True)
class FellBack:
    """The next attempt goes to another target."""

    target: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A new attempt goes on where the last one was cut: nothing is lost or comes twice."""

    target: int
    # output tokens before the seam
    position: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """What came so far is void, and the answer begins again; only where the caller allowed it."""

    target: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer, last."""

    # OpenAI's finish_reason
    reason: str
    # None: the server told no counts
    usage: Usage | None
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    # index of the target that ended it
    target: int = 0
    # of the type that ``parse`` named, else None
    parsed: object = None


Event = (
    Started
    | TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | Retrying
    | FellBack
    | Resumed
    | Restarted
    | Finished
)
