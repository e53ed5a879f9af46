"""The caller of a request, its permissions, and the error event of a stream that breaks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.gateway.observability.tracing import NO_TRACE, Trace
from paceline.gateway.streams.openai_stream import DONE
from paceline.http.upstream import Headers

__all__ = ["Allowed", "Caller", "broken_event"]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Measures that the caller permits; header ``x-paceline-allow``."""

    retry: bool = True
    fallback: bool = True
    resume: bool = True
    hedge: bool = True

    @classmethod
    def parse(cls, value: bytes | None) -> Allowed:
        """Parse a list such as ``retry, resume``: the rest is forbidden. None allows all."""
        if value is None:
            return _ALL
        words = {word.strip().lower() for word in value.decode("latin-1").split(",")}
        return cls(*(name in words for name in ("retry", "fallback", "resume", "hedge")))


_ALL: Final = Allowed()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, and what comes with its request."""

    request_id: str
    # the key's name; "" without keys
    tenant: str
    allowed: Allowed
    headers: Headers
    # cache salt of its prompts, where tenants share a cache; "": none
    salt: str = ""
    # its client library is retrying, so this is not new work
    tries_again: bool = False
    trace: Trace = NO_TRACE

    @classmethod
    def salt_of(cls, secret: str, tenant: str) -> str:
        """Derive a tenant's salt: the same on every gateway with ``secret``, irreversible."""
        if not secret or not tenant:
            return ""
        return hmac.digest(secret.encode(), tenant.encode(), hashlib.sha256).hex()[:32]


def broken_event(path: str, why: str, num_tokens: int, resume: str) -> bytes:
    """Build the last events of a stream that breaks, in the API of the path."""
    if path == "/v1/messages":
        error: Mapping[str, Any] = {
            "type": "error",
            "error": {"type": "api_error", "message": why},
        }
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    if path == "/v1/responses":
        error = {"type": "error", "code": "engine_lost", "message": why, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    error = {
        "error": {
            "message": why,
            "type": "EngineLost",
            "param": None,
            "code": "engine_lost",
            "retryable": True,
            "emitted_tokens": num_tokens,
            "resume": {"possible": False, "why": resume},
        }
    }
    return b"data: " + msgspec.json.encode(error) + b"\n\n" + DONE
