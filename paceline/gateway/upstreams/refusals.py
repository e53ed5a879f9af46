"""Meaning of an engine's refusal: its cooldown, whether the prompt was too long, and the words that
the caller gets.

Each engine has its own words for a prompt that is too long; a gateway that does not know them gives
up on a request that another engine could serve.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

from paceline.gateway.upstreams.dialects import map_error, read_words
from paceline.http.upstream import Headers
from paceline.statuses import meaning_of
from paceline.wire.sse import payload_of

__all__ = [
    "cooldown_of",
    "is_of_the_request",
    "is_too_long",
    "redacted",
    "redacted_error",
    "refusal_in",
    "retry_after",
]

# longest cooldown, s, whatever an engine asks for
_MAX_COOLDOWN: Final = 120.0
# Paceline's reasons that concern one request or one tenant, not the engine
_REASONS_OF_THE_REQUEST: Final = frozenset({b"predicted-ttft", b"queue-share", b"expired"})
_REASON_HEADER: Final = b"x-llm-d-request-dropped-reason"
# words for a prompt that is too long; never for a limit on the output alone, which a longer context
# would not help
_TOO_LONG: Final = re.compile(
    # codes of OpenAI, Paceline, llama.cpp, Anthropic, GitHub
    r"context_(?:length|window)_exceeded|exceed_context_size_error|model_max_prompt_tokens_exceeded"
    # OpenAI, vLLM, SGLang, Mistral, xAI, Ollama
    r"|max(?:imum)? (?:context|model|prompt|sequence) length|max_model_len|context length is only"
    r"|parameter=input_(?:tokens|text)|too long to fit"
    # llama.cpp, OpenAI, Anthropic, Ollama, MiniMax
    r"|exceeds? (?:the |this |its )?(?:model's |available |max(?:imum)? )?context\b"
    r"|context window exceeds"
    # SGLang, LM Studio, MLC
    r"|(?:longer|larger|greater) than the (?:model's |max |model )?(?:context|input)\b"
    r"|when context the overflows"
    # Anthropic, Bedrock, Fireworks, Ollama; vLLM's and others' count
    r"|\b(?:prompt|input)(?: prompt)?(?: \([^)]*\))?[ _](?:is |was )?too[ _]long"
    r"|too many (?:input tokens|tokens: (?:total|size))"
    # TGI, with and without the marks around its names
    r"|inputs`? tokens \+ `?max_new_tokens|inputs`? must have less than \d+ tokens"
    # Gemini, OpenAI, GitHub
    r"|input token count\b.{0,60}(?:exceeds the maximum|only supports)|input tokens exceed\b"
    r"|prompt token count of \d+ exceeds"
    # SGLang, TensorRT-LLM, DeepInfra
    r"|(?:input|prompt) length\b.{0,40}\bexceeds? (?:the )?(?:model's )?max"
    # Mistral; Groq, Cerebras; Moonshot; Zhipu; Qwen
    r"|too large for model with|reduce the length of the (?:messages|prompt|input)"
    r"|exceeded model token limit|prompt exceeds max|range of input length should be",
    re.IGNORECASE | re.DOTALL,
)
# statuses of refusals that are the caller's fault, or are about a prompt that is too long
_OF_THE_CALLER: Final = (400, 413, 422)
# error type -> status, for an error in a stream that has none
_STATUS_OF_KIND: Final = {"invalid_request_error": 400, "request_too_large": 413}
# vLLM's names for the parameter at fault
_PROMPT_PARAMS: Final = frozenset({"input_tokens", "input_text"})
# an account's token limit per time, which some engines report with 413
_OF_THE_ACCOUNT: Final = re.compile(r"rate.?limit|\bper.?min|\bTPM\b", re.IGNORECASE)


def retry_after(headers: Headers, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds that an answer asks to wait; None: it does not say.

    Args:
        now: wall clock, Unix seconds, for answers with a date.
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
    return min(max(0.0, seconds), _MAX_COOLDOWN) if seconds == seconds else None


def cooldown_of(status: int, headers: Headers) -> float:
    """Return the cooldown, in seconds, that a refusal sets for the model; 0.0: none is given, or
    the refusal concerns only this request."""
    if meaning_of(status) != "passing" or is_of_the_request(headers):
        return 0.0
    return retry_after(headers) or 0.0


def is_of_the_request(headers: Headers) -> bool:
    """Whether a refusal declares that it concerns one request or tenant."""
    return dict(headers).get(_REASON_HEADER) in _REASONS_OF_THE_REQUEST


def is_too_long(status: int, body: bytes) -> bool:
    """Whether a prompt was refused as too long for the context. Only the engine's words count: some
    engines quote the request next to them."""
    if status not in _OF_THE_CALLER:
        return False
    words = read_words(status, body)
    text = f"{words.message} {words.kind} {words.code}"
    if _OF_THE_ACCOUNT.search(text):
        return False
    return words.param in _PROMPT_PARAMS or _TOO_LONG.search(text) is not None


def refusal_in(event: bytes) -> tuple[int, bytes] | None:
    """Return status and body of a refusal that came as an event of a stream; None: the event
    reports a failure of the engine."""
    body = payload_of(event) or b""
    words = read_words(400, body)
    status = int(words.code) if str(words.code) in map(str, _OF_THE_CALLER) else 0
    if not status:
        status = 400 if is_too_long(400, body) else _STATUS_OF_KIND.get(words.kind, 0)
    return (status, body) if status else None


def redacted(body: bytes, secret: str) -> bytes:
    """Remove the gateway's key."""
    return body.replace(secret.encode(), b"***") if secret else body


def redacted_error(path: str, status: int, body: bytes, secret: str) -> bytes:
    """Return a refusal as the caller gets it; a prompt that was too long has the code that clients
    check."""
    body = redacted(body, secret)
    code = "context_length_exceeded" if is_too_long(status, body) else ""
    return map_error(path, status, body, code)
