"""Anthropic's answers, whole and streamed, as chat completions.

::

    message_start             a chunk with the role
    content_block_start       id and name, of a tool
    content_block_delta       text, thinking, or a part of a tool's arguments
    message_delta             the finish reason, and usage if it holds any
    message_stop              usage, [DONE]
    ping                      a comment
    error                     an event with ``error``

Events of other names are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from paceline.gateway.streams.pauses import is_between_parts
from paceline.gateway.streams.usage import believed
from paceline.wire.sse import MAX_EVENT_BYTES, PINGS, SseEvents, name_of, names_error, payload_of

__all__ = ["AnthropicStream", "chat_answer"]

_DONE: Final = b"data: [DONE]\n\n"
# known event names; clients ignore others, as the vendor's documentation asks
_NAMES: Final = frozenset(
    {
        b"message_start", b"content_block_start", b"content_block_delta", b"content_block_stop",
        b"message_delta", b"message_stop", b"message",
    }
)  # fmt: skip
_REASONS: Final = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None

    def add(self, later: _Usage) -> None:
        """Counts are cumulative, so later ones replace earlier ones."""
        for name in self.__struct_fields__:
            value = getattr(later, name)
            if value is not None:
                setattr(self, name, value)

    def as_openai(self) -> dict[str, Any]:
        cached = believed(self.cache_read_input_tokens)
        created = believed(self.cache_creation_input_tokens)
        prompt = believed(believed(self.input_tokens) + cached + created)
        made = believed(self.output_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Message(msgspec.Struct):
    id: str
    model: str
    content: list[_Block]
    usage: _Usage
    stop_reason: str | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: Any = None


class _Reported(msgspec.Struct):
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Event).decode
_decode_error: Final = msgspec.json.Decoder(_Reported).decode
_decode_message: Final = msgspec.json.Decoder(_Message).decode


def chat_answer(body: bytes) -> bytes:
    """Translate a message into a chat completion. Raises ValueError if it is not a message."""
    message = _decode_message(body)
    said: dict[str, Any] = {"role": "assistant", "content": None}
    texts = [block.text for block in message.content if block.type == "text"]
    if texts:
        said["content"] = "".join(texts)
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    if thoughts:
        said["reasoning"] = thoughts
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": bytes(block.input).decode()},
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    if calls:
        said["tool_calls"] = calls
    choice = {
        "index": 0,
        "message": said,
        "logprobs": None,
        "finish_reason": _REASONS.get(message.stop_reason or "", "stop"),
    }
    return msgspec.json.encode(
        {
            "id": message.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": message.model,
            "choices": [choice],
            "usage": message.usage.as_openai(),
        }
    )


class AnthropicStream:
    """Translator of a stream; see ``Translator``. Unreadable data becomes an event that is not a
    chunk, which readers of chunks refuse."""

    def __init__(self) -> None:
        self._events = SseEvents()
        self._head: Mapping[str, Any] = {}
        self._usage = _Usage()
        self._has_counted = False
        # index of a content block -> index of its tool call
        self._calls: dict[int, int] = {}
        self._between_parts = True

    @property
    def between_parts(self) -> bool:
        return self._between_parts

    @property
    def is_in_long(self) -> bool:
        return self._events.is_in_long

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield from map(self._event, self._events.feed(data))
        if self._events.too_long:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _event(self, event: bytes) -> bytes:
        payload, name = payload_of(event), name_of(event)
        if names_error(name):
            return self._error(payload or b"")
        if payload is None:
            return event.partition(b"\n")[0] + b"\n\n" if event.startswith(b":") else b""
        if name in PINGS:
            return b": ping\n\n"
        if name and name not in _NAMES:
            return b""
        found = _decode(payload)
        delta, block = found.delta, found.content_block
        name = found.type.encode()
        if found.error or names_error(name):
            return self._error(payload)
        if name in PINGS:
            return b": ping\n\n"
        self._between_parts = is_between_parts(name, "" if block is None else block.type)
        match found.type:
            case "message_start" if found.message is not None:
                self._usage.add(found.message.usage)
                self._head = {
                    "id": found.message.id,
                    "object": "chat.completion.chunk",
                    "created": int(time.time()),
                    "model": found.message.model,
                }
                return self._chunk({"role": "assistant", "content": ""})
            case "content_block_start" if block is not None:
                return self._begin(found.index, block)
            case "content_block_delta" if delta is not None:
                return self._delta(found.index, delta)
            case "message_delta":
                if found.usage is not None:
                    self._usage.add(found.usage)
                if delta is None or delta.stop_reason is None:
                    return b""
                end = self._chunk({}, _REASONS.get(delta.stop_reason, "stop"))
                return end if found.usage is None else end + self._counts()
            case "message_stop":
                return self._counts() + _DONE
        return b""

    def _counts(self) -> bytes:
        """Return the usage chunk once, without waiting for events that may be lost."""
        if self._has_counted:
            return b""
        self._has_counted = True
        return self._line({"choices": [], "usage": self._usage.as_openai()})

    def _error(self, payload: bytes) -> bytes:
        """Return an error event, whatever the engine's error holds."""
        try:
            error = _decode_error(payload).error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            error = None
        told = {"error": error or {"message": "the engine reported an error"}}
        return b"data: " + msgspec.json.encode(told) + b"\n\n"

    def _begin(self, index: int, block: _Block) -> bytes:
        if block.type == "text" and block.text:
            return self._chunk({"content": block.text})
        if block.type != "tool_use":
            return b""
        number = self._calls[index] = len(self._calls)
        function = {"name": block.name, "arguments": ""}
        call = {"index": number, "id": block.id, "type": "function", "function": function}
        return self._chunk({"tool_calls": [call]})

    def _delta(self, index: int, delta: _Delta) -> bytes:
        if delta.text:
            return self._chunk({"content": delta.text})
        if delta.thinking:
            return self._chunk({"reasoning": delta.thinking})
        if delta.partial_json and index in self._calls:
            part = {"index": self._calls[index], "function": {"arguments": delta.partial_json}}
            return self._chunk({"tool_calls": [part]})
        # a chat has no field for signatures and citations
        return b""

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._line({"choices": [choice]})

    def _line(self, fields: Mapping[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, **fields}) + b"\n\n"
