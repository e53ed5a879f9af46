"""Anthropic's Messages API for callers of OpenAI's chat completions; requests of the Messages API
itself pass unchanged.

Sources: https://docs.anthropic.com/en/api/messages, .../messages-streaming, .../errors, and the
vendor's own mapping of chat completions: .../openai-sdk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.gateway.requests.body import Body, decoded
from paceline.gateway.upstreams.dialects.anthropic_answer import AnthropicStream, chat_answer
from paceline.gateway.upstreams.dialects.anthropic_request import (
    cannot_say,
    ignored_fields,
    messages_request,
)
from paceline.gateway.upstreams.dialects.base import Dialect, Translator, checked
from paceline.http.upstream import Headers

__all__ = ["AnthropicDialect"]

_MESSAGES: Final = "/v1/messages"
_CHAT: Final = "/v1/chat/completions"
_VERSION: Final = b"2023-06-01"


class AnthropicDialect(Dialect):
    def cannot(self, path: str, body: Body) -> str:
        if path == _MESSAGES:
            return ""
        return cannot_say(body) if path == _CHAT else f"Anthropic's API has no {path}"

    def target(self, path: str, model: str) -> str:
        return _MESSAGES

    def headers(self, key: str) -> Headers:
        found = [(b"anthropic-version", _VERSION)]
        if key:
            found.append((b"x-api-key", key.encode()))
        return found

    def body(self, path: str, body: Body, changes: Mapping[str, Any]) -> bytes:
        if path == _MESSAGES:
            return body.encode({**changes, "slo": None, "cache_salt": None})
        fields = {name: decoded(name, value) for name, value in body.fields.items()}
        return msgspec.json.encode(messages_request({**fields, **changes}, body.max_tokens))

    def ignored(self, path: str, body: Body) -> str:
        return ",".join(ignored_fields(body)) if path == _CHAT else ""

    def answer(self, path: str, body: bytes) -> bytes:
        return checked(path, body) if path == _MESSAGES else chat_answer(body)

    def translator(self, path: str) -> Translator | None:
        return None if path == _MESSAGES else AnthropicStream()
