"""Stop strings with special tokens, which are in no text, end an answer in every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, connect

START = ByteTokenizer.IM_START
SAID = [*b"Four.\n", START, *b"user\nand on"]
MESSAGES = [{"role": "user", "content": "2 + 2?"}]


class Runaway(NullBackend):
    """Goes on with a turn that is not its own."""

    def _sample(self, length: int, state: Any) -> int:
        place = length - state.num_prompt_tokens
        return SAID[place] if place < len(SAID) else ByteTokenizer.IM_END


@pytest.fixture(scope="module")
async def http(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(Runaway(vocab_size=VOCAB, max_model_len=512))
    async with connect(create_app(client, ServerConfig(served_model_names=("tiny",)))) as http:
        yield http
    await client.close()


# of each API: where, the body, and where in an answer or an event the text and the reason are
APIS: dict[str, tuple[str, Any, Any, Any]] = {
    "chat": (
        "/v1/chat/completions",
        lambda stop: {"messages": MESSAGES, "stop": stop},
        lambda answer: (
            answer["choices"][0].get("delta", answer["choices"][0].get("message")).get("content")
        ),
        lambda answer: answer["choices"][0]["stop_reason"],
    ),
    "completions": (
        "/v1/completions",
        lambda stop: {"prompt": "2 + 2?", "stop": stop, "max_tokens": 40},
        lambda answer: answer["choices"][0]["text"],
        lambda answer: answer["choices"][0]["stop_reason"],
    ),
    "messages": (
        "/v1/messages",
        lambda stop: {"messages": MESSAGES, "stop_sequences": stop, "max_tokens": 40},
        lambda answer: (
            answer["content"][0]["text"]
            if "content" in answer
            else answer.get("delta", {}).get("text")
        ),
        lambda answer: answer.get("delta", answer)["stop_sequence"],
    ),
    "ollama chat": (
        "/api/chat",
        lambda stop: {"messages": MESSAGES, "options": {"stop": stop}},
        lambda answer: answer["message"]["content"],
        None,
    ),
    "ollama generate": (
        "/api/generate",
        lambda stop: {"prompt": "2 + 2?", "options": {"stop": stop}},
        lambda answer: answer["response"],
        None,
    ),
    "llama.cpp": (
        "/completion",
        lambda stop: {"prompt": "2 + 2?", "stop": stop},
        lambda answer: answer["content"],
        lambda answer: answer["stopping_word"],
    ),
}


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>user", "\n<|im_start|>us"])
@pytest.mark.parametrize("api", APIS)
async def test_a_stop_string_with_a_special_token(
    http: httpx.AsyncClient, api: str, stop: str
) -> None:
    path, body, text_of, reason_of = APIS[api]
    wanted = "Four." if stop.startswith("\n") else "Four.\n"
    asked = {**body([stop, "never"]), "stream": False}
    whole = (await http.post(path, json=asked)).json()
    assert text_of(whole) == wanted
    assert reason_of is None or reason_of(whole) == stop
    stream = await http.post(path, json={**asked, "stream": True})
    told = [
        json.loads(line.removeprefix("data: "))
        for line in stream.text.splitlines()
        if line.startswith(("data: {", "{"))
    ]
    assert "".join(text_of(each) or "" for each in told if _has_text(each)) == wanted
    if reason_of is not None:
        assert any(reason_of(each) == stop for each in told if _has_reason(each))


def _has_text(event: dict[str, Any]) -> bool:
    return event.get("type", "content_block_delta") == "content_block_delta"


def _has_reason(event: dict[str, Any]) -> bool:
    choice = event.get("choices", [event])[0]
    return bool(choice.keys() & {"stop_reason", "stopping_word"}) or "stop_sequence" in choice.get(
        "delta", {}
    )


async def test_without_one_it_goes_on(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
    assert answer["choices"][0]["message"]["content"] == "Four.\nuser\nand on"


async def test_what_ends_it_may_be_told(http: httpx.AsyncClient) -> None:
    body = {"messages": MESSAGES, "stop": "<|im_start|>us", "include_stop_str_in_output": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Four.\n<|im_start|>us"
