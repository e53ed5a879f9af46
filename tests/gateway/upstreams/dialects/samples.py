"""Bodies as vendors document them, each with its source. Ids and words are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ANTHROPIC_ERRORS",
    "ANTHROPIC_TOOL_STREAM",
    "ANTHROPIC_WHOLE",
    "AZURE_ERRORS",
    "anthropic_events",
    "azure_chunks",
    "joined",
]


def joined(events: Sequence[bytes]) -> bytes:
    return b"".join(events)


def _event(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()


def _start(input_tokens: int = 25, **usage: int) -> bytes:
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "claude-x",
        "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": input_tokens, "output_tokens": 1, **usage},
    }  # fmt: skip
    return _event({"type": "message_start", "message": message})


def _delta(index: int, **delta: str) -> bytes:
    return _event({"type": "content_block_delta", "index": index, "delta": delta})


def _block(index: int, **block: Any) -> bytes:
    return _event({"type": "content_block_start", "index": index, "content_block": block})


def _stop(index: int) -> bytes:
    return _event({"type": "content_block_stop", "index": index})


def _end(reason: str, tokens: int) -> tuple[bytes, ...]:
    return (
        _event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": None},
                "usage": {"output_tokens": tokens},
            }
        ),
        _event({"type": "message_stop"}),
    )


# https://docs.anthropic.com/en/docs/build-with-claude/streaming, "Basic streaming request"
def anthropic_events(words: Sequence[str], reason: str = "end_turn") -> tuple[bytes, ...]:
    return (
        _start(),
        _block(0, type="text", text=""),
        _event({"type": "ping"}),
        *(_delta(0, type="text_delta", text=word) for word in words),
        _stop(0),
        *_end(reason, len(words)),
    )


# the same page, "Streaming request with tool use" and "with extended thinking"
ANTHROPIC_TOOL_STREAM = (
    _start(472, cache_read_input_tokens=100, cache_creation_input_tokens=8),
    _block(0, type="thinking", thinking="", signature=""),
    _delta(0, type="thinking_delta", thinking="They ask for the weather."),
    _delta(0, type="signature_delta", signature="EqQBCgIYAhIM"),
    _stop(0),
    _block(1, type="text", text=""),
    _delta(1, type="text_delta", text="Let me look."),
    _stop(1),
    _block(2, type="tool_use", id="toolu_1", name="get_weather", input={}),
    _delta(2, type="input_json_delta", partial_json=""),
    _delta(2, type="input_json_delta", partial_json='{"location": "San'),
    _delta(2, type="input_json_delta", partial_json=' Francisco, CA"}'),
    _stop(2),
    _block(3, type="tool_use", id="toolu_2", name="get_time", input={}),
    _delta(3, type="input_json_delta", partial_json="{}"),
    _stop(3),
    *_end("tool_use", 89),
)

# https://docs.anthropic.com/en/api/messages, "Response", and .../tool-use/overview
ANTHROPIC_WHOLE: dict[str, Any] = {
    "id": "msg_2",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [
        {"type": "thinking", "thinking": "Weather.", "signature": "EqQBCgIYAhIM"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"location": "SF"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 472, "output_tokens": 89, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 100,
    },
}  # fmt: skip

# https://docs.anthropic.com/en/api/errors: status, type
ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error",
    529: "overloaded_error",
}  # fmt: skip


# https://learn.microsoft.com/azure/ai-services/openai/concepts/content-streaming and /reference
def azure_chunks(words: Sequence[str]) -> tuple[bytes, ...]:
    safe = {"hate": {"filtered": False, "severity": "safe"}}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "gpt-x"}

    def chunk(choices: list[Any], **fields: Any) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choices, **fields}).encode() + b"\n\n"

    def choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {
            "index": 0, "delta": delta, "finish_reason": reason, "logprobs": None,
            "content_filter_results": safe,
        }  # fmt: skip

    prompt = [{"prompt_index": 0, "content_filter_results": safe}]
    counts = {
        "prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9 + len(words),
    }  # fmt: skip
    return (
        chunk([], id="", model="", created=0, object="", prompt_filter_results=prompt),
        chunk([choice({"role": "assistant", "content": "", "refusal": None})]),
        *(chunk([choice({"content": word})]) for word in words),
        chunk([choice({}, "stop")]),
        chunk([], usage=counts),
        b"data: [DONE]\n\n",
    )


# https://learn.microsoft.com/azure/ai-services/openai/concepts/content-filter, and what the
# reference has of deployments and quotas
AZURE_ERRORS: dict[int, dict[str, Any]] = {
    400: {
        "error": {
            "message": "The response was filtered due to the prompt triggering Azure OpenAI's "
            "content management policy.",
            "type": None, "param": "prompt", "code": "content_filter", "status": 400,
            "innererror": {
                "code": "ResponsibleAIPolicyViolation",
                "content_filter_result": {"hate": {"filtered": True, "severity": "high"}},
            },
        }
    },
    401: {"statusCode": 401, "message": "Unauthorized. Access token is missing or invalid."},
    404: {
        "error": {
            "code": "DeploymentNotFound",
            "message": "The API deployment for this resource does not exist.",
        }
    },
    429: {"error": {"code": "429", "message": "Please retry after 6 seconds."}},
}  # fmt: skip
