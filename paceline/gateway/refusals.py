"""What an engine's refusal means: how long it wants to be left alone, whether the prompt was too
long for it, and what of its words a caller is told.

The words of a prompt that is too long differ from engine to engine; a gateway that does not know
them takes a request that another engine could serve for one that nobody can.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from paceline.http.upstream import Headers
from paceline.statuses import meaning_of

__all__ = ["is_of_the_request", "is_too_long", "rest_of", "retry_after", "told"]

# nobody is asked to wait longer, whatever an engine says
_MAX_REST: Final = 120.0
# reasons of Paceline's that are of one request or one tenant, not of the engine
_REASONS_OF_THE_REQUEST: Final = frozenset({b"predicted-wait", b"queue-share", b"expired"})
_REASON_HEADER: Final = b"x-llm-d-request-dropped-reason"
_TOO_LONG: Final = re.compile(
    # OpenAI, vLLM, Paceline (code and words)
    rb"context_length_exceeded|maximum context length|maximum model length|max_model_len"
    # llama.cpp
    rb"|exceed_context_size_error|available context size|exceeds? the context"
    # SGLang
    rb"|longer than the model's context length"
    # Anthropic
    rb"|prompt is too long|input length and [`\\\"]*max_tokens[`\\\"]* exceed context limit"
    # TGI; Mistral; Cohere
    rb"|inputs tokens \+ max_new_tokens|too large for model with|too many tokens: total",
    re.IGNORECASE,
)


def retry_after(headers: Headers, now: Callable[[], float] = time.time) -> float | None:
    """Seconds that an answer asks to wait; None: it does not say.

    Args:
        now: of the wall clock, for answers that tell a date.
    """
    found = dict(headers)
    try:
        if b"retry-after-ms" in found:
            seconds = float(found[b"retry-after-ms"]) / 1000.0
        elif (value := found.get(b"retry-after")) is None:
            return None
        elif value[:1].isdigit():
            seconds = float(value)
        else:
            seconds = parsedate_to_datetime(value.decode("latin-1")).timestamp() - now()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, seconds), _MAX_REST) if seconds == seconds else None


def rest_of(status: int, headers: Headers) -> float:
    """Seconds in which the engine that refused a request wants no others of its model; 0.0: that
    was about this one alone, or it does not say."""
    if meaning_of(status) != "passing" or is_of_the_request(headers):
        return 0.0
    return retry_after(headers) or 0.0


def is_of_the_request(headers: Headers) -> bool:
    """Whether a refusal says of itself that it is of one request or tenant."""
    return dict(headers).get(_REASON_HEADER) in _REASONS_OF_THE_REQUEST


def is_too_long(status: int, body: bytes) -> bool:
    """Whether a prompt was refused as too long for the engine's context."""
    return status in (400, 413, 422) and _TOO_LONG.search(body[:8192]) is not None


def told(path: str, status: int, body: bytes, secret: str) -> bytes:
    """A refusal as the caller reads it: without the gateway's key, and with the code that clients
    go by where the prompt was too long."""
    if secret:
        body = body.replace(secret.encode(), b"***")
    if path == "/v1/messages" or not is_too_long(status, body):
        return body
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return body
    error = fields.get("error")
    if not isinstance(error, dict):
        return body
    fields["error"] = {**error, "code": "context_length_exceeded"}
    return msgspec.json.encode(fields)
