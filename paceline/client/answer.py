"""One answer, put together from the chunks of all attempts. Pure; knows no HTTP."""

from __future__ import annotations

from typing import Any

from paceline.client.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)

__all__ = ["Answer", "ChunkError"]


class ChunkError(ValueError):
    """A chunk does not have the form that OpenAI's API describes."""


class _Call:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = self.name = ""
        # joined once, at the end
        self.arguments: list[str] = []


class Answer:
    """What the chunks so far say. ``ids`` are the output's tokens while ``ids_whole`` holds."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ids: list[int] = []
        self.prompt_ids: list[int] | None = None
        # whether every piece of text came with the ids that it is made of
        self.ids_whole = True
        # whether the caller has a part of it
        self.told = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._usage: Usage | None = None

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def resumable(self) -> bool:
        return bool(self.ids) and self.ids_whole

    def read(self, chunk: dict[str, Any], events: list[Event]) -> None:
        """Takes in one chunk and appends what it makes to ``events``.

        Raises ChunkError; what it made before stands, as text without ids.
        """
        try:
            self._read(chunk, events)
        except ChunkError:
            raise
        except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
            raise ChunkError(f"a chunk is malformed: {type(error).__name__}") from None
        finally:
            self.told = self.told or bool(events)

    def finished(self, target: int) -> Finished:
        """The answer as it is, once ``reason`` is known."""
        calls = tuple(
            ToolCall(call.id, call.name, "".join(call.arguments))
            for _, call in sorted(self._calls.items())
        )
        usage = self._usage
        if usage is None and self.prompt_ids is not None and self.resumable:
            # the stream broke behind the last token
            usage = Usage(len(self.prompt_ids), len(self.ids))
        reasoning = "".join(self._reasoning)
        return Finished(self.reason or "", usage, self.text, calls, reasoning, target)

    def _read(self, chunk: dict[str, Any], events: list[Event]) -> None:
        if usage := chunk.get("usage"):
            self._usage = Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) != 0:
                raise ChunkError("a choice that was not asked for")
            prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt_ids is not None and self.prompt_ids is None:
                self.prompt_ids = [int(i) for i in prompt_ids]
            ids = [int(i) for i in choice.get("token_ids") or ()]
            whole, self.ids_whole = self.ids_whole, False
            self._content(choice, events)
            self.ids_whole = whole and bool(ids or not events)
            self.ids.extend(ids)
            self.reason = choice.get("finish_reason") or self.reason

    def _content(self, choice: dict[str, Any], events: list[Event]) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if reasoning:
            self._reasoning.append(_string(reasoning))
            events.append(ReasoningDelta(reasoning))
        if text:
            self._text.append(_string(text))
            events.append(TextDelta(text))
        for place, part in enumerate(delta.get("tool_calls") or ()):
            events.extend(self._call_part(int(part.get("index", place)), part))

    def _call_part(self, index: int, part: dict[str, Any]) -> list[ToolCallDelta]:
        call = self._calls.setdefault(index, _Call())
        function = part.get("function") or {}
        # a resumed attempt may say again what a call is
        new_id = "" if call.id else _string(part.get("id") or "")
        new_name = "" if call.name else _string(function.get("name") or "")
        arguments = _string(function.get("arguments") or "")
        call.id = call.id or new_id
        call.name = call.name or new_name
        call.arguments.append(arguments)
        if not (new_id or new_name or arguments):
            return []
        return [ToolCallDelta(index, new_id, new_name, arguments)]


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
