"""Usage of an answer, in each API's format."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.gateway.settings.prices import Used

__all__ = ["Usage", "believed", "text_bytes", "used_by"]

_MOST_TOKENS: Final = 10**9
# keys of an answer, in any API, whose strings are output
_SAID: Final = frozenset(
    {"content", "text", "arguments", "reasoning", "reasoning_content", "thinking", "refusal"}
)


def believed(count: int | None) -> int:
    """Clamp an engine's token count to possible values, so that a wrong one cannot lower a spend or
    overflow it."""
    return 0 if count is None or count < 0 else min(count, _MOST_TOKENS)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Usage in OpenAI's chat, completions, embeddings, responses and Anthropic's messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    # some engines report nothing else for ranks
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def used(self, path: str) -> Used:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = 0 if details is None else believed(details.cached_tokens)
        output = believed(self.completion_tokens or self.output_tokens)
        prompt = believed(self.prompt_tokens or self.input_tokens)
        if self.prompt_tokens is None and self.input_tokens is None:
            prompt = max(0, believed(self.total_tokens) - output)
        if path == "/v1/messages":
            # this API does not count cached tokens as part of the prompt
            cached = believed(self.cache_read_input_tokens)
            prompt = believed(prompt + cached + believed(self.cache_creation_input_tokens))
        return Used(prompt, cached, output)


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode


def used_by(path: str, body: bytes) -> Used | None:
    """Return the usage of a complete answer; None if it has none."""
    try:
        usage = _decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return None if usage is None else usage.used(path)


def text_bytes(body: bytes) -> int:
    """Return the bytes of output in a complete answer."""
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
