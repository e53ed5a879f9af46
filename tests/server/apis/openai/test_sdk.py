"""The official SDK against a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.helpers import chat_prompt, expected_text, say
from tests.server.live_process import LiveServer, eventually, live_server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("sdk") / "log"
    with live_server(
        log, backend={"step_time": 0.002}, config={"served_model_names": ["org/tiny", "alias"]}
    ) as live:
        yield live


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    models = sdk.models.list().data
    assert [model.id for model in models] == ["org/tiny", "alias"]
    assert {model.owned_by for model in models} == {"paceline"}
    assert models[0].model_dump()["max_model_len"] == 4096
    assert sdk.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nobody")


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="org/tiny", messages=MESSAGES, max_tokens=8)
    tokens, text = expected_text(chat_prompt("hi"), 8)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.prompt_tokens_details is not None


def test_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="org/tiny",
        messages=MESSAGES,
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    _, text = expected_text(chat_prompt("hi"), 8)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_stream_helper_builds_the_same_answer(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model="org/tiny",
        messages=MESSAGES,
        stop="AAAAAA",
        n=2,
        logprobs=True,
        top_logprobs=1,
        logit_bias=say("A"),
        extra_body={"include_stop_str_in_output": True},
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["AAAAAA"] * 2
    for choice in final.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.token for entry in choice.logprobs.content] == ["A"] * 6


def test_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model="alias", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1, logit_bias=say("A")
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"AAA"}
    assert answer.choices[3].logprobs is not None
    assert answer.choices[3].logprobs.text_offset == [0, 1, 2]
    stream = sdk.completions.create(
        model="alias", prompt=[1, 2], max_tokens=3, stream=True, logit_bias=say("A")
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "AAA"


def test_stop(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="org/tiny", messages=MESSAGES, stop=["AAA"], max_tokens=50, logit_bias=say("A")
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""


def test_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.param == "model"
    assert unknown.value.type == "NotFoundError"
    with pytest.raises(openai.BadRequestError) as hot:
        sdk.chat.completions.create(model="org/tiny", messages=MESSAGES, temperature=1000)
    assert hot.value.param == "temperature"
    assert "1000" in hot.value.message
    with pytest.raises(openai.BadRequestError, match="not served yet"):
        sdk.chat.completions.create(
            model="org/tiny", messages=MESSAGES, extra_body={"use_beam_search": True}
        )


def test_request_id(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="org/tiny", messages=MESSAGES, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert answer._request_id == "mine-1"
    assert answer.id == "chatcmpl-mine-1"


def test_closing_a_stream_frees_the_engine(sdk: openai.OpenAI, server: LiveServer) -> None:
    stream = sdk.chat.completions.create(
        model="org/tiny", messages=MESSAGES, stream=True, max_tokens=3000, logit_bias=say("A")
    )
    next(iter(stream))
    assert server.running() == 1
    stream.close()
    eventually(lambda: server.running() == 0, 5)


def test_async_clients(server: LiveServer) -> None:
    async def ask(client: openai.AsyncOpenAI, letter: str) -> str:
        stream = await client.chat.completions.create(
            model="org/tiny", messages=MESSAGES, stream=True, max_tokens=9, logit_bias=say(letter)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, chr(97 + i)) for i in range(26)))

    assert asyncio.run(everybody()) == [chr(97 + i) * 9 for i in range(26)]
