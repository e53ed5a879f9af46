"""``/v1/completions``: prompts of four kinds, echo, and its own log-probabilities."""

from __future__ import annotations

import httpx
import pytest

from paceline.engine.testing import ByteTokenizer
from tests.server.helpers import events, expected_text, say

URL = "/v1/completions"


def ids(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


async def test_whole_answer(http: httpx.AsyncClient) -> None:
    _, text = expected_text(ids("hello"), 9)
    answer = (await http.post(URL, json={"prompt": "hello", "max_tokens": 9})).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 9


async def test_sixteen_tokens_by_default(http: httpx.AsyncClient) -> None:
    answer = (await http.post(URL, json={"prompt": "hello", "logit_bias": say("y")})).json()
    assert answer["choices"][0]["text"] == "y" * 16


async def test_default_shrinks_to_what_is_left(http: httpx.AsyncClient) -> None:
    body = {"prompt": [1] * 509, "logit_bias": say("y")}
    assert (await http.post(URL, json=body)).json()["choices"][0]["text"] == "y" * 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "cd", ""], [ids("ab"), ids("cd"), ids("")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [8]], [[5, 6], [8]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_kinds_of_prompts(
    http: httpx.AsyncClient, prompt: object, expected: list[list[int]], stream: bool
) -> None:
    body = {"prompt": prompt, "max_tokens": 6, "n": 2, "stream": stream}
    body["stream_options"] = {"include_usage": True} if stream else None
    response = await http.post(URL, json=body)
    texts = [""] * (2 * len(expected))
    if stream:
        *chunks, last = events(response.text)
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        usage = last["usage"]
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["text"]
        usage = response.json()["usage"]
    wanted = [expected_text(tokens, 6) for tokens in expected]
    assert texts == [text for _, text in wanted for _ in range(2)]
    assert usage["prompt_tokens"] == sum(map(len, expected))
    assert usage["completion_tokens"] == 2 * sum(len(tokens) for tokens, _ in wanted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["one", "two"], [[111, 110, 101], [116, 119, 111]]])
async def test_echo(http: httpx.AsyncClient, prompt: object, stream: bool) -> None:
    body = {
        "prompt": prompt,
        "echo": True,
        "max_tokens": 2,
        "stream": stream,
        "logit_bias": say("!"),
    }
    response = await http.post(URL, json=body)
    texts = ["", ""]
    for answer in events(response.text) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one!!", "two!!"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["one", "x"], [[111, 110, 101], [120]]])
async def test_an_echo_of_no_tokens_is_the_prompt_with_its_logprobs(
    http: httpx.AsyncClient, prompts: list[object], stream: bool
) -> None:
    """Evaluation harnesses ask so; the token that the engine draws is nowhere to be seen."""
    body = {
        "prompt": prompts,
        "echo": True,
        "max_tokens": 0,
        "n": 2,
        "logprobs": 1,
        "add_special_tokens": False,
        "return_token_ids": True,
        "stop": "!",
        "logit_bias": say("!"),
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    response = await http.post(URL, json=body)
    assert response.status_code == 200
    answers = events(response.text) if stream else [response.json()]
    choices = {c["index"]: c for answer in answers for c in answer["choices"]}
    assert len(choices) == 4 == sum(len(answer["choices"]) for answer in answers)
    for index, text in enumerate(["one", "one", "x", "x"]):
        choice = choices[index]
        assert choice["text"] == text and choice["finish_reason"] == "length"
        assert choice["stop_reason"] is None and choice["token_ids"] == []
        assert choice["prompt_token_ids"] == list(text.encode())
        assert choice["logprobs"] == {
            "text_offset": list(range(len(text))),
            "token_logprobs": [None, 0.0, 0.0][: len(text)],
            "tokens": list(text),
            "top_logprobs": [None, {"n": 0.0}, {"e": 0.0}][: len(text)],
        }
    usage = answers[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_of_no_tokens_without_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "stream": stream}
    response = await http.post(URL, json=body)
    (answer,) = events(response.text) if stream else [response.json()]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert not choice["logprobs"]


async def test_no_tokens_without_echo_are_refused(http: httpx.AsyncClient) -> None:
    refused = await http.post(URL, json={"prompt": "abc", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    assert "at least 1, got 0" in refused.json()["error"]["message"]


async def test_echo_shows_what_truncation_left(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abcdef", "echo": True, "max_tokens": 1, "truncate_prompt_tokens": 2}
    answer = (await http.post(URL, json={**body, "logit_bias": say("!")})).json()
    assert answer["choices"][0]["text"] == "ef!"


async def test_special_tokens_on_request(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "return_token_ids": True}
    with_bos = (await http.post(URL, json=body)).json()["choices"][0]
    assert with_bos["prompt_token_ids"] == [ByteTokenizer.BOS, 97, 98]
    without = (await http.post(URL, json={**body, "add_special_tokens": False})).json()
    assert without["choices"][0]["prompt_token_ids"] == [97, 98]


async def test_logprobs(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 3, "logprobs": 1, "logit_bias": say("A")}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [0.0, 0.0, 0.0],
        "tokens": ["A", "A", "A"],
        "top_logprobs": [{"A": 0.0}] * 3,
    }


async def test_streamed_logprobs_go_on_counting(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 5, "logprobs": 0, "logit_bias": say("A")}
    chunks = events((await http.post(URL, json={**body, "stream": True})).text)
    offsets = [
        offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2, 3, 4]


async def test_stream_of_ids(http: httpx.AsyncClient) -> None:
    body = {"prompt": [[5], [6]], "max_tokens": 2, "return_token_ids": True, "stream": True}
    chunks = events((await http.post(URL, json={**body, "logit_bias": say("A")})).text)
    prompts: dict[int, list[int]] = {}
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        told[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert choice["index"] not in prompts
            prompts[choice["index"]] = choice["prompt_token_ids"]
    assert told == {0: [65, 65], 1: [65, 65]}
    assert prompts == {0: [5], 1: [6]}


async def test_one_bad_prompt_fails_the_request(poisoned: httpx.AsyncClient) -> None:
    answer = await poisoned.post(URL, json={"prompt": [[5], [7], [6]], "max_tokens": 2})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "token 7 is poison"


async def test_long_prompt_is_tokenised_off_the_loop(http: httpx.AsyncClient) -> None:
    answer = await http.post(URL, json={"prompt": "x" * 100_000})
    assert answer.status_code == 400
    assert "100001 tokens" in answer.json()["error"]["message"]
    assert "512 tokens" in answer.json()["error"]["message"]
