"""What an engine says that an answer took, in the words of each API."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.gateway.money import Used

__all__ = ["Usage", "believed", "text_bytes", "used_by"]

_MOST_TOKENS: Final = 10**9
# keys under which an answer of any API has what was said
_SAID: Final = frozenset(
    {"content", "text", "arguments", "reasoning", "reasoning_content", "thinking", "refusal"}
)


def believed(count: int | None) -> int:
    """A count of tokens as an engine told it, within what can be: no engine's word makes a spend go
    down, or beyond what can be counted."""
    return min(max(count or 0, 0), _MOST_TOKENS)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Of OpenAI's chat, completions and embeddings; of its responses; of Anthropic's messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    # of ranks, some engines tell nothing else
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def used(self, path: str) -> Used:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = believed(details.cached_tokens if details else None)
        output = believed(self.completion_tokens or self.output_tokens)
        prompt = believed(self.prompt_tokens or self.input_tokens)
        if self.prompt_tokens is None and self.input_tokens is None:
            prompt = max(0, believed(self.total_tokens) - output)
        if path == "/v1/messages":
            # there what was cached is not in the count of the prompt
            cached = believed(self.cache_read_input_tokens)
            prompt += cached + believed(self.cache_creation_input_tokens)
        return Used(believed(prompt), cached, output)


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode


def used_by(path: str, body: bytes) -> Used | None:
    """Of a whole answer; None where it does not say."""
    try:
        usage = _decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if usage is None else usage.used(path)


def text_bytes(body: bytes) -> int:
    """Bytes of what a whole answer says."""
    try:
        return _text_bytes("", msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


def _text_bytes(key: str, value: object) -> int:
    if isinstance(value, str):
        return len(value.encode()) if key in _SAID else 0
    if isinstance(value, list):
        return sum(_text_bytes(key, item) for item in value)
    if isinstance(value, dict):
        return sum(_text_bytes(name, item) for name, item in value.items())
    return 0
