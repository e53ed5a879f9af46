"""``/v1/chat/completions``: shapes, streams and what the fields do."""

from __future__ import annotations

import httpx
import pytest

from tests.server.helpers import chat_body, chat_prompt, events, expected_text, metric, say, scrape

URL = "/v1/chat/completions"


async def test_whole_answer(http: httpx.AsyncClient) -> None:
    prompt = chat_prompt("hi")
    tokens, text = expected_text(prompt, 12)
    answer = (await http.post(URL, json=chat_body(max_tokens=12))).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["created"] > 1_700_000_000
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": text,
                "refusal": None,
                "reasoning": None,
                "tool_calls": [],
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "total_tokens": len(prompt) + len(tokens),
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": len(prompt) // 16 * 16,
        },
    }


async def test_stream(http: httpx.AsyncClient) -> None:
    body = chat_body("streamed", max_tokens=12, stream=True)
    response = await http.post(URL, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:])
    _, text = expected_text(chat_prompt("streamed"), 12)
    assert "".join(choice["delta"]["content"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert choices[-1]["stop_reason"] is None
    assert all("stop_reason" not in choice for choice in choices[:-1])


async def test_stream_usage(http: httpx.AsyncClient) -> None:
    body = chat_body("usage", max_tokens=5, stream=True, stream_options={"include_usage": True})
    chunks = events((await http.post(URL, json=body)).text)
    prompt = len(chat_prompt("usage"))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == prompt
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["total_tokens"] == prompt + 5
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_continuous_usage(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat_body("on and on", max_tokens=6, stream=True, stream_options=options)
    chunks = events((await http.post(URL, json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len(chunks) >= 3


async def test_continuous_usage_needs_include_usage(http: httpx.AsyncClient) -> None:
    options = {"continuous_usage_stats": True}
    body = chat_body(max_tokens=3, stream=True, stream_options=options)
    chunks = events((await http.post(URL, json=body)).text)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(http: httpx.AsyncClient, stream: bool) -> None:
    body = chat_body("several", max_tokens=7, n=3, stream=stream)
    response = await http.post(URL, json=body)
    _, text = expected_text(chat_prompt("several"), 7)
    if stream:
        texts = ["", "", ""]
        ends = []
        for chunk in events(response.text):
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                ends.append((choice["index"], choice["finish_reason"]))
        assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [choice["message"]["content"] for choice in choices]
        assert response.json()["usage"]["completion_tokens"] == 21
    # the null backend ignores seeds, so that all choices are known
    assert texts == [text] * 3


async def test_logprobs(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=2, logprobs=True, top_logprobs=1, logit_bias=say("A"))
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    entry = {"token": "A", "logprob": 0.0, "bytes": [65]}
    assert choice["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}] * 2}


async def test_logprobs_without_top(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=1, logprobs=True, logit_bias=say("A"))
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_streamed_logprobs_cover_every_token(http: httpx.AsyncClient) -> None:
    # 0xc3 starts a character of two bytes: three of them never make one
    body = chat_body(max_tokens=3, logprobs=True, stream=True, logit_bias={"195": 100})
    chunks = events((await http.post(URL, json=body)).text)
    entries = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["bytes"] for entry in entries] == [[195]] * 3
    assert {entry["token"] for entry in entries} == {"\ufffd"}


async def test_no_top_logprobs_need_no_logprobs(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=1, logprobs=False, top_logprobs=0)
    answer = await http.post(URL, json=body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is None


async def test_tokens_as_ids(http: httpx.AsyncClient) -> None:
    body = chat_body(
        max_tokens=1, logprobs=True, return_tokens_as_token_ids=True, logit_bias=say("A")
    )
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["logprobs"]["content"][0]["token"] == "token_id:65"


async def test_token_ids(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=2, return_token_ids=True, logit_bias=say("B"))
    answer = (await http.post(URL, json=body)).json()
    assert answer["prompt_token_ids"] == chat_prompt("hi")
    assert answer["choices"][0]["token_ids"] == [66, 66]
    chunks = events((await http.post(URL, json={**body, "stream": True})).text)
    assert chunks[0]["prompt_token_ids"] == chat_prompt("hi")
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    told = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert told == [66, 66]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string(http: httpx.AsyncClient, stream: bool) -> None:
    body = chat_body(max_tokens=50, stop=["zz", "aaa"], logit_bias=say("a"), stream=stream)
    response = await http.post(URL, json=body)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response.text)]
        text = "".join(choice["delta"]["content"] for choice in choices)
    else:
        choices = response.json()["choices"]
        text = choices[0]["message"]["content"]
        assert response.json()["usage"]["completion_tokens"] == 3
    assert text == ""
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "aaa"


async def test_stop_string_included(http: httpx.AsyncClient) -> None:
    body = chat_body(
        max_tokens=50, stop="aaa", include_stop_str_in_output=True, logit_bias=say("a")
    )
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["message"]["content"] == "aaa"


async def test_stop_token(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=50, stop_token_ids=[97], logit_bias=say("a"))
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 97)


async def test_end_of_sequence_and_ignore_eos(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=4, logit_bias={"258": 100})
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["message"]["content"] == ""
    answer = (await http.post(URL, json={**body, "ignore_eos": True})).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4


async def test_min_tokens(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=9, min_tokens=5, stop_token_ids=[97], logit_bias=say("a"))
    answer = (await http.post(URL, json=body)).json()
    assert answer["usage"]["completion_tokens"] >= 5


async def test_special_tokens_can_be_shown(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=2, logit_bias={"256": 100}, skip_special_tokens=False)
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["message"]["content"] == "<|bos|><|bos|>"


async def test_max_tokens_defaults_to_what_is_left(http: httpx.AsyncClient) -> None:
    body = chat_body("left", logit_bias=say("x"))
    usage = (await http.post(URL, json=body)).json()["usage"]
    assert usage["total_tokens"] == 512


async def test_max_completion_tokens_wins(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=9, max_completion_tokens=4, logit_bias=say("x"))
    assert (await http.post(URL, json=body)).json()["usage"]["completion_tokens"] == 4


async def test_text_parts_are_joined(http: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts}], "return_token_ids": True}
    answer = (await http.post(URL, json={**body, "max_tokens": 1})).json()
    assert answer["prompt_token_ids"] == chat_prompt("one\ntwo")


async def test_continue_final_message(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "say A"}, {"role": "assistant", "content": "AA"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "return_token_ids": True,
        "max_tokens": 1,
    }
    answer = (await http.post(URL, json=body)).json()
    assert answer["prompt_token_ids"][-2:] == [65, 65]
    assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_no_generation_prompt_goes_on_as_the_last_speaker(http: httpx.AsyncClient) -> None:
    body = chat_body(add_generation_prompt=False, max_tokens=1)
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["message"]["role"] == "user"


async def test_truncation_keeps_the_end(http: httpx.AsyncClient) -> None:
    body = chat_body(truncate_prompt_tokens=4, return_token_ids=True, max_tokens=1)
    left = (await http.post(URL, json=body)).json()["prompt_token_ids"]
    assert left == chat_prompt("hi")[-4:]
    body["truncation_side"] = "right"
    right = (await http.post(URL, json=body)).json()["prompt_token_ids"]
    assert right == chat_prompt("hi")[:4]


async def test_truncation_to_what_fits(http: httpx.AsyncClient) -> None:
    body = chat_body("x" * 2000, truncate_prompt_tokens=-1, max_tokens=12)
    assert (await http.post(URL, json=body)).json()["usage"]["prompt_tokens"] == 500


async def test_cached_tokens_and_salt(http: httpx.AsyncClient) -> None:
    async def cached(salt: str) -> int:
        body = chat_body("cache me, " * 10, max_tokens=1, cache_salt=salt)
        usage = (await http.post(URL, json=body)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert await cached("first") == 0
    assert await cached("first") >= 96
    assert await cached("second") == 0


async def test_tools_that_may_not_be_called_are_in_the_prompt(http: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    body = chat_body(tools=[tool], tool_choice="none", max_tokens=1, return_token_ids=True)
    answer = (await http.post(URL, json=body)).json()
    assert b"look_up" in bytes(i for i in answer["prompt_token_ids"] if i < 256)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": None},
        {"model": "alias"},
        {"user": "u-1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none"},
        {"guided_json": None, "best_of": None, "prompt_logprobs": None},
        {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -5},
        {"top_k": 5, "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.1},
        {"priority": -3, "request_id": "mine", "some_future_field": {"x": 1}},
        {"stop": [], "stop_token_ids": [], "logit_bias": {}, "min_tokens": 0},
        {"stop": [str(i) * 1024 for i in range(10)]},
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
        {"stream_options": None, "logprobs": None, "n": None, "max_completion_tokens": 2},
        {"modalities": ["text"], "stream_interval": 1, "length_penalty": 1.0},
    ],
)
async def test_accepted_fields(http: httpx.AsyncClient, fields: dict[str, object]) -> None:
    response = await http.post(URL, json=chat_body(max_tokens=1) | fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("asked", "told", "slo_class"),
    [
        ("auto", "default", "standard"),
        ("default", "default", "standard"),
        ("scale", "default", "standard"),
        ("flex", "flex", "batch"),
        ("priority", "priority", "interactive"),
        (None, None, "standard"),
    ],
)
async def test_a_service_tier_is_a_class(
    http: httpx.AsyncClient, asked: str | None, told: str | None, slo_class: str
) -> None:
    body = chat_body(max_tokens=1, service_tier=asked)
    # or there may be no series of that class yet
    await http.post(URL, json=body)
    before = await scrape(http)
    assert (await http.post(URL, json=body)).json()["service_tier"] == told
    chunks = events((await http.post(URL, json=body | {"stream": True})).text)
    assert {chunk.get("service_tier") for chunk in chunks} == {told}
    after = await scrape(http)
    name = "paceline:slo_requests_total"
    assert metric(after, name, slo_class=slo_class) - metric(before, name, slo_class=slo_class) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"service_tier": "gold"}, "one of auto, default, scale, flex, priority, got 'gold'"),
        ({"service_tier": 1}, "service_tier must be a string"),
        ({"service_tier": "flex", "slo": "interactive"}, "give one of the two"),
        ({"user": 7}, "user must be a string"),
        ({"safety_identifier": ["a"]}, "safety_identifier must be a string"),
    ],
)
async def test_who_asks_and_its_tier_are_checked(
    http: httpx.AsyncClient, fields: dict[str, object], words: str
) -> None:
    response = await http.post(URL, json=chat_body(max_tokens=1) | fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_targets_go_with_a_tier(http: httpx.AsyncClient) -> None:
    body = chat_body(max_tokens=1, service_tier="flex", slo={"deadline_ms": 60_000})
    assert (await http.post(URL, json=body)).json()["service_tier"] == "flex"


async def test_earlier_tool_calls_are_accepted(http: httpx.AsyncClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "someone"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant", "content": "4", "reasoning_content": "it said 4"},
        {"role": "user", "content": "thanks"},
    ]
    response = await http.post(URL, json={"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text


async def test_poisoned_request_fails_alone(poisoned: httpx.AsyncClient) -> None:
    bad = await poisoned.post(URL, json=chat_body("\x07", max_tokens=3))
    assert bad.status_code == 500
    error = bad.json()["error"]
    assert error == {
        "message": "token 7 is poison",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert (await poisoned.post(URL, json=chat_body(max_tokens=3))).status_code == 200


async def test_error_within_a_stream(poisoned: httpx.AsyncClient) -> None:
    # the first tokens are fine; then token 7 is sampled, which is poison as input
    body = chat_body(max_tokens=5, stream=True, n=1)
    prompt = chat_prompt("late")
    tokens, _ = expected_text(prompt, 5)
    assert 7 not in tokens
    forced = {**body, "logit_bias": {"7": 100}, "min_tokens": 2}
    chunks = events((await poisoned.post(URL, json=forced)).text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1] == {
        "error": {
            "message": "token 7 is poison",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
