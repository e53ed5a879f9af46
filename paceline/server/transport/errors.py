"""Errors in the format of the API that was called, where that is not vLLM's (``http.errors``)."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from paceline.http.errors import HttpError, Reply, error_response, reply_to

__all__ = [
    "LLAMA_PATHS",
    "OLLAMA_PREFIX",
    "anthropic_error_body",
    "llama_error_body",
    "ollama_error_body",
    "refusal",
]

OLLAMA_PREFIX: Final = "/api/"
# paths that only llama-server has
LLAMA_PATHS: Final = (
    "/completion", "/completions", "/infill", "/apply-template", "/props", "/slots",
    "/lora-adapters",
)  # fmt: skip

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_LLAMA_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


def anthropic_error_body(reply: Reply, request_id: str) -> bytes:
    """Return an error in Anthropic's format."""
    error = {"type": _ANTHROPIC_TYPES.get(reply.status, "api_error"), "message": reply.message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def ollama_error_body(reply: Reply) -> bytes:
    """Return an error in Ollama's format."""
    return msgspec.json.encode({"error": reply.message})


def llama_error_body(reply: Reply) -> bytes:
    """Return an error in llama-server's format."""
    kind = _LLAMA_TYPES.get(reply.status, "server_error")
    error = {"code": reply.status, "message": reply.message, "type": kind}
    return msgspec.json.encode({"error": error})


def refusal(error: HttpError, path: str, request_id: str) -> Response:
    """Return the answer to a request refused before routing, in the format of its path's API."""
    reply = reply_to(error, drain_timeout=0.0)
    body = None
    if path.startswith("/v1/messages"):
        body = anthropic_error_body(reply, request_id)
    elif path.startswith(OLLAMA_PREFIX):
        body = ollama_error_body(reply)
    elif path in LLAMA_PATHS or path.startswith("/slots/"):
        body = llama_error_body(reply)
    return error_response(reply, body)
