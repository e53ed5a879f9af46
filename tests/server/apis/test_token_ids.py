"""Token ids in and out, and log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.engine.testing import null_client
from paceline.server.app import create_app
from paceline.server.settings.config import ServerConfig
from tests.server.helpers import VOCAB, chat_body, connect, events

GENERATE = "/inference/v1/generate"
PROMPT = [3, 5, 8]


async def test_ids_go_in_and_come_out(http: httpx.AsyncClient) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 1}}
    answer = (await http.post(GENERATE, json=body)).json()
    (choice,) = answer["choices"]
    expected = expected_tokens(PROMPT, 4, VOCAB)
    assert choice["token_ids"] == expected
    assert [e["token"] for e in choice["logprobs"]["content"]] == [
        f"token_id:{i}" for i in expected
    ]
    assert choice["finish_reason"] == "length" and "text" not in choice
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 4


async def test_streamed_ids_add_up(http: httpx.AsyncClient) -> None:
    body = {"token_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 30, "n": 2}}
    ids: list[list[int]] = [[], []]
    chunks = events((await http.post(GENERATE, json=body)).text)
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    assert ids == [expected_tokens(PROMPT, 30, VOCAB)] * 2
    assert chunks[-1]["usage"]["completion_tokens"] == 60


@pytest.fixture
async def unhurried(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """A step takes 10 ms: tokens do not come all at once, or nearly."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.01))
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


async def test_streamed_counts_are_told_as_asked(unhurried: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "token_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_tokens": 50, "explain": True, "ignore_eos": True},
    }
    *before, last = events((await unhurried.post(GENERATE, json=body)).text)
    assert before and all(chunk["usage"] is None for chunk in before)
    assert last["usage"]["completion_tokens"] == 50
    (told,) = last["usage"]["timeline"]
    assert told["chunks"] == 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await unhurried.post(GENERATE, json={**body, "stream_options": options})).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 50 and len(counts) >= 2


async def test_a_prompt_of_ids_is_truncated(http: httpx.AsyncClient) -> None:
    sampling: dict[str, Any] = {"max_tokens": 4, "truncate_prompt_tokens": 2}
    body: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": sampling}
    answer = (await http.post(GENERATE, json=body)).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT[-2:], 4, VOCAB)
    assert answer["usage"]["prompt_tokens"] == 2
    sampling |= {"truncation_side": "right", "prompt_logprobs": 0}
    answer = (await http.post(GENERATE, json=body)).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT[:2], 4, VOCAB)
    assert len(answer["prompt_logprobs"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": [999]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": PROMPT, "sampling_params": {"stop": "x"}}, "sampling_params"),
        ({"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": PROMPT, "temperature": 1}, "temperature"),
        ({"token_ids": [], "sampling_params": {}}, "prompt"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    answer = await http.post(GENERATE, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


async def test_log_probabilities_of_the_prompt(http: httpx.AsyncClient) -> None:
    """The null backend is sure of everything: 0, rank 1."""
    body = {"prompt": ["abc", "xy"], "max_tokens": 1, "prompt_logprobs": 0}
    first, second = (await http.post("/v1/completions", json=body)).json()["choices"]
    sure = {"logprob": 0.0, "rank": 1}
    assert first["prompt_logprobs"] == [
        None,
        *({str(ord(c)): {**sure, "decoded_token": c}} for c in "abc"),
    ]
    assert len(second["prompt_logprobs"]) == 3
    # twice: what was cached the first time is computed again
    again = (await http.post("/v1/completions", json=body)).json()
    assert again["choices"][0]["prompt_logprobs"] == first["prompt_logprobs"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chat = chat_body(max_tokens=1, n=2, prompt_logprobs=1, return_token_ids=True)
    answer = (await http.post("/v1/chat/completions", json=chat)).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat_body())):
        refused = await http.post(path, json={**body, "prompt_logprobs": 0, "stream": True})
        assert refused.status_code == 400


async def test_echo_with_logprobs(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    columns = choice["logprobs"]
    assert columns["tokens"][1:4] == ["a", "b", "c"] and len(columns["tokens"]) == 6
    assert columns["token_logprobs"] == [None, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert columns["top_logprobs"][0] is None
    assert columns["text_offset"][:3] == [0, 7, 8]
    assert choice["prompt_logprobs"] is None and choice["text"].startswith("abc")
