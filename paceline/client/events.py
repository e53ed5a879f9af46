"""Events of a stream, in order: Started, deltas, Finished; in between, reports of failures.

Only deltas and Finished hold content. The text of all TextDelta since the start, or since the last
Restarted, is the text of Finished.
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
    """Tokens of an answer, counted once over all its attempts."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete tool call."""

    id: str
    name: str
    # JSON, as the model wrote it
    arguments: str


@dataclass(frozen=True, slots=True)
class Started:
    """An answer begins. Once for every stream."""

    # index into the client's targets
    target: int
    # as the server gives them
    id: str
    model: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning before its answer, if the server marks it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of one call: ``id`` and ``name`` come once, ``arguments`` in pieces."""

    # index of the call in this answer, from 0
    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Retrying:
    """An attempt failed and another follows."""

    # number of the next attempt, from 2
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
    """A new attempt continues where the last one broke: nothing is lost or comes twice."""

    target: int
    # output tokens before it
    position: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The output so far is void, and the answer begins again; only if the caller allowed it."""

    target: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The complete answer, last."""

    # OpenAI's finish_reason
    reason: str
    # None: the server sent no counts
    usage: Usage | None
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    # index of the target that completed it
    target: int = 0
    # result of ``parse``'s type, else None
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
