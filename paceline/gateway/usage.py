"""What an engine says that an answer took, in the words of each API."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.gateway.money import Used

__all__ = ["Usage", "used_by"]


_MOST_TOKENS: Final = 10**9


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
        cached = (details.cached_tokens if details else None) or 0
        prompt = self.prompt_tokens or self.input_tokens or 0
        if path == "/v1/messages":
            # there what was cached is not in the count of the prompt
            cached = self.cache_read_input_tokens or 0
            prompt += cached + (self.cache_creation_input_tokens or 0)
        output = self.completion_tokens or self.output_tokens or 0
        # no engine's word makes a spend go down, or beyond what can be counted
        return Used(*(min(max(count, 0), _MOST_TOKENS) for count in (prompt, cached, output)))


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
