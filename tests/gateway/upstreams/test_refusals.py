"""What engines say of a request that they refused, and what of that a caller is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.gateway import ModelConfig
from paceline.gateway.upstreams.refusals import is_too_long, redacted_error
from tests.gateway.fault_server import Step, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    chat,
    configured,
    gateway_over,
)

MESSAGES = "/v1/messages"
PATHS = (CHAT, "/v1/completions", "/v1/responses", MESSAGES, "/v1/embeddings")

# words, and the body that says them
WORDED: dict[str, tuple[str, Any]] = {
    "FastAPI": (
        "top_p: Input should be at most 1; n: Input should be an integer",
        {"detail": [
            {"loc": ["body", "top_p"], "msg": "Input should be at most 1", "input": 3, "type": "x"},
            {"loc": ["body", "n"], "msg": "Input should be an integer", "ctx": {"a": "b"}},
        ]},
    ),
    "FastAPI, one": ("no such voice", {"detail": "no such voice"}),
    "FastAPI, nested": ("no such voice", {"detail": {"error": {"message": "no such voice"}}}),
    "Google": (
        "Invalid value at 'top_k'",
        [{"error": {"code": 400, "message": "Invalid value at 'top_k'", "status": "INVALID"}}],
    ),
    "list of texts": ("bad seed; bad stop", {"errors": ["bad seed", "bad stop"]}),
    "list of objects": ("bad seed", {"errors": [{"code": 7, "message": "bad seed"}]}),
    "by field": ("seed: below 0", {"title": "wrong", "errors": {"seed": ["below 0"]}}),
    "message": ("bad seed", {"message": "bad seed", "error": "Bad Request", "status": 400}),
    "list of messages": ("bad seed; bad stop", {"message": ["bad seed", "bad stop"]}),
    "validation in a message": (
        "seed: too large",
        {"object": "error", "message": {"detail": [{"loc": ["body", "seed"], "msg": "too large"}]}},
    ),
    "error": ("bad seed", {"error": "bad seed", "error_type": "validation"}),
    "errors in a list": ("bad seed", {"error": ["bad seed"]}),
    "detail of an error": ("bad seed", {"error": {"detail": "bad seed", "code": "x"}}),
    "OpenAI": ("bad seed", {"error": {"message": "bad seed", "type": "t", "param": "seed"}}),
    "Anthropic": ("bad seed", {"type": "error", "error": {"type": "t", "message": "bad seed"}}),
    "text in JSON": ("bad seed", "bad seed"),
    "text": ("bad seed: <0", b"bad seed: <0\n"),
}  # fmt: skip
HIDDEN = (
    b"<html><title>nginx</title></html>", b"\n <!DOCTYPE html>", b"\xef\xbb\xbf<?xml?>", b"",
    b"null", b'{"error": {"message": ', b"\xff\xfe", b"a\x00b", b"ok <HTML>",
    {"error": "<html>x</html>"}, {}, {"error": {}}, [], 7, {"errors": []},
)  # fmt: skip


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize("name", WORDED)
def test_an_engines_words_are_told(name: str) -> None:
    words, body = WORDED[name]
    for path in PATHS:
        found = json.loads(redacted_error(path, 422, encoded(body), ""))
        assert found["error"]["message"] == words, path
        assert (found.get("type") == "error") == (path == MESSAGES)
        assert isinstance(found["error"]["type"], str)


def test_what_is_no_words_is_hidden() -> None:
    for body in HIDDEN:
        for path in PATHS:
            error = json.loads(redacted_error(path, 400, encoded(body), ""))["error"]
            assert error["message"] == "the engine answered with status 400", body
    # what went wrong within the engine, in whatever words, is not the caller's
    assert b"Traceback" not in redacted_error(CHAT, 501, b"Traceback: ...", "")


def test_the_field_at_fault_is_told() -> None:
    error = json.loads(redacted_error(CHAT, 422, encoded(WORDED["FastAPI"][1]), ""))["error"]
    assert (error["param"], error["code"]) == ("top_p", 422)
    same = encoded(WORDED["OpenAI"][1])
    assert redacted_error(CHAT, 400, same, "") == same
    assert b"sk-1" not in redacted_error(CHAT, 400, b"bad key sk-1", "sk-1")


def openai(message: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": message, **more}}


TOO_LONG: tuple[tuple[int, Any], ...] = (
    # vLLM
    (400, openai("You passed 5001 input tokens and requested 9 output tokens. However, the model's "
        "context length is only 4096 tokens, resulting in a maximum input length of 4087 tokens.")),
    (400, openai("This model's maximum context length is 4096 tokens. However, you requested 0 "
        "output tokens and your prompt contains at least 4097 input tokens.", code=400)),
    (400, {"object": "error", "message": "The decoder prompt (length 5001) is longer than the "
        "maximum model length of 4096. Make sure that `max_model_len` is no smaller"}),
    (400, openai("The prompt (total length 5001) is too long to fit into the model")),
    (400, openai("Please send less", param="input_tokens")),
    # TGI
    (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. "
        "Given: 1527 `inputs` tokens and 1024 `max_new_tokens`", "error_type": "validation"}),
    (422, {"error": "Input validation error: inputs tokens + max_new_tokens must be <= 2048"}),
    (422, {"error": "`inputs` must have less than 1024 tokens. Given: 1527"}),
    # Gemini, xAI
    (400, [openai("The input token count (1076112) exceeds the maximum number of tokens allowed "
        "(1048576).", code=400, status="INVALID_ARGUMENT")]),
    (400, openai("the input token count is 32769 but model only supports up to 32768")),
    (400, {"code": "Client specified an invalid argument", "error": "This model's maximum prompt "
        "length is 131072 but the request contains 150000 tokens."}),
    # SGLang, llama.cpp, Ollama
    (400, openai("The input (5001 tokens) is longer than the model's context length (4096).")),
    (400, {"message": "Input length (5001 tokens) exceeds the maximum allowed length (4090)."}),
    (400, openai("request (5001 tokens) exceeds the available context size (4096 tokens)")),
    (400, openai("no", type="exceed_context_size_error")),
    (400, {"error": "prompt too long; exceeded max context length by 905 tokens"}),
    (400, {"error": "the input length exceeds the context length"}),
    # Bedrock, Cohere, Mistral, Groq, OpenAI, Anthropic, Moonshot, GitHub, LM Studio and others
    (400, {"message": "Input is too long for requested model."}),
    (400, {"message": "Too many input tokens. Max input tokens: 8192, request: 9000"}),
    (400, {"message": "too many tokens: size limit exceeded by 905 tokens."}),
    (400, {"message": "Prompt contains 40000 tokens, too large for model with 32768 maximum"}),
    (400, openai("Please reduce the length of the messages or completion.")),
    (400, openai("Your input exceeds the context window of this model.")),
    (400, openai("no", code="context_length_exceeded")),
    (400, {"type": "error", **openai("prompt is too long: 208310 tokens > 200000 maximum")}),
    (400, openai("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000")),
    (400, openai("Invalid request: Your request exceeded model token limit: 8192")),
    (400, openai("prompt token count of 135000 exceeds the limit of 128000")),
    (400, {"error": "Trying to keep the first 5001 tokens when context the overflows."}),
    (422, {"detail": "Requested input length 5001 exceeds maximum input length 4096"}),
    (413, b"Requested tokens (5001) exceed context window of 4096"),
)  # fmt: skip
OTHER: tuple[tuple[int, Any], ...] = (
    # of the output alone
    (400, openai("max_tokens is too large: 100000. This model supports at most 16384 completion "
        "tokens, whereas you provided 100000.", param="max_tokens")),
    (400, openai("max_tokens: 100000 > 8192, which is the maximum number of output tokens")),
    (400, openai("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]")),
    (400, openai("`max_tokens` must be less than or equal to `8192`, the maximum value for "
        "`max_tokens` is less than the `context_window` for this model")),
    (422, {"error": "Input validation error: `max_new_tokens` must be <= 512. Given: 1024"}),
    # of an account's tokens in a minute, and of bytes
    (413, openai("Request too large on tokens per minute (TPM): Limit 6000, Requested 7000, please "
        "reduce the length of the messages", code="rate_limit_exceeded")),
    (413, b"<html>413 Request Entity Too Large</html>"),
    (413, openai("Request exceeds the maximum size", type="request_too_large")),
    # of a request that is repeated beside the words
    (422, {"detail": [{"loc": ["body", "top_p"], "msg": "at most 1",
        "input": "the prompt is too long, says the maximum context length"}]}),
    # of something else, or an engine's own failure
    (400, openai("stop: the list is too long")),
    (500, openai("prompt is too long")),
)  # fmt: skip


@pytest.mark.parametrize(("status", "body"), TOO_LONG)
def test_words_of_a_prompt_that_is_too_long(status: int, body: Any) -> None:
    assert is_too_long(status, encoded(body))
    for path in PATHS:
        error = json.loads(redacted_error(path, status, encoded(body), ""))["error"]
        assert (error.get("code") == "context_length_exceeded") == (path != MESSAGES)


@pytest.mark.parametrize(("status", "body"), OTHER)
def test_words_of_other_things(status: int, body: Any) -> None:
    assert not is_too_long(status, encoded(body))
    assert b"context_length_exceeded" not in redacted_error(CHAT, status, encoded(body), "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_longer_context_is_asked_in_whatever_words(stream: bool) -> None:
    model = ModelConfig(name="chat", tiers=(("e1:m",), ("e2:m",)))
    for status, body in (TOO_LONG[0], TOO_LONG[5], TOO_LONG[8]):
        step = Step(status=status, parts=(encoded(body),), stream=False)
        async with (
            scripted(step, max_model_len=4096) as short,
            scripted(GOOD if stream else WHOLE, max_model_len=200_000) as long,
            gateway_over(configured(short, long, models=(model,))) as (_, client),
        ):
            answer = await client.post(CHAT, json=chat(model="chat", stream=stream))
            assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
