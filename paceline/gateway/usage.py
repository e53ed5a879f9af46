"""What an engine says that an answer took, in the words of each API."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.gateway.money import Used

__all__ = ["Usage", "believed", "used_by"]

_MOST_TOKENS: Final = 10**9


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
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def used(self, path: str) -> Used:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = believed(details.cached_tokens if details else None)
        prompt = believed(self.prompt_tokens or self.input_tokens)
        if path == "/v1/messages":
            # there what was cached is not in the count of the prompt
            cached = believed(self.cache_read_input_tokens)
            prompt += cached + believed(self.cache_creation_input_tokens)
        return Used(
            believed(prompt), cached, believed(self.completion_tokens or self.output_tokens)
        )


class _Answer(msgspec.Struct):
    usage: Usage | None = None


_decode: Final = msgspec.json.Decoder(_Answer).decode


def used_by(path: str, body: bytes) -> Used:
    """Of a whole answer; nothing where it does not say."""
    try:
        usage = _decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Used()
    return Used() if usage is None else usage.used(path)
