"""One answer, put together from the chunks of all attempts. Pure; knows no HTTP."""

from __future__ import annotations

from typing import Any

from paceline.client.chunks import ChunkError, integer_of, list_of, object_of, objects_of, text_of
from paceline.client.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)

__all__ = ["Answer", "usage_of"]


class _Call:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = self.name = ""
        # joined once, at the end
        self.arguments: list[str] = []


class Answer:
    """Content of the chunks so far. ``ids`` are the output's tokens while ``ids_whole`` holds."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.ids: list[int] = []
        self.prompt_ids: list[int] | None = None
        # whether every piece of text came with its token ids
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
        """Process one chunk and append its events to ``events``.

        Raises ChunkError; events made before it stay, as text without ids.
        """
        try:
            self._read(chunk, events)
        finally:
            self.told = self.told or bool(events)

    def finished(self, target: int) -> Finished:
        """Return the present answer, once ``reason`` is known."""
        calls = tuple(
            ToolCall(call.id, call.name, "".join(call.arguments))
            for _, call in sorted(self._calls.items())
        )
        usage = self._usage
        if usage is None and self.prompt_ids is not None and self.resumable:
            # the stream broke after the last token
            usage = Usage(len(self.prompt_ids), len(self.ids))
        reasoning = "".join(self._reasoning)
        return Finished(self.reason or "", usage, self.text, calls, reasoning, target)

    def _read(self, chunk: dict[str, Any], events: list[Event]) -> None:
        self._usage = usage_of(chunk.get("usage")) or self._usage
        for choice in objects_of(chunk.get("choices")):
            if integer_of(choice.get("index"), 0) != 0:
                raise ChunkError("a choice that was not asked for")
            prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if prompt_ids and self.prompt_ids is None:
                self.prompt_ids = [integer_of(i) for i in list_of(prompt_ids)]
            ids = [integer_of(i) for i in list_of(choice.get("token_ids"))]
            whole, self.ids_whole = self.ids_whole, False
            self._content(choice, events)
            self.ids_whole = whole and bool(ids or not events)
            self.ids.extend(ids)
            self.reason = text_of(choice.get("finish_reason")) or self.reason

    def _content(self, choice: dict[str, Any], events: list[Event]) -> None:
        delta = object_of(choice.get("delta"))
        text = text_of(choice.get("text")) or text_of(delta.get("content"))
        reasoning = text_of(delta.get("reasoning_content")) or text_of(delta.get("reasoning"))
        if reasoning:
            self._reasoning.append(reasoning)
            events.append(ReasoningDelta(reasoning))
        if text:
            self._text.append(text)
            events.append(TextDelta(text))
        for place, part in enumerate(objects_of(delta.get("tool_calls"))):
            events.extend(self._call_part(integer_of(part.get("index"), place), part))

    def _call_part(self, index: int, part: dict[str, Any]) -> list[ToolCallDelta]:
        function = object_of(part.get("function"))
        told = (part.get("id"), function.get("name"), function.get("arguments"))
        new_id, new_name, arguments = map(text_of, told)
        call = self._calls.setdefault(index, _Call())
        # a resumed attempt may repeat a call's id and name
        new_id, new_name = "" if call.id else new_id, "" if call.name else new_name
        call.id = call.id or new_id
        call.name = call.name or new_name
        call.arguments.append(arguments)
        if not (new_id or new_name or arguments):
            return []
        return [ToolCallDelta(index, new_id, new_name, arguments)]


def usage_of(told: object) -> Usage | None:
    """Return the counts; None if missing or unreadable, which must not cost the answer."""
    try:
        found = object_of(told)
        return Usage(
            integer_of(found.get("prompt_tokens")), integer_of(found.get("completion_tokens"))
        )
    except ChunkError:
        return None
