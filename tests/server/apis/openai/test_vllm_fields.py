"""Fields that vLLM's clients send beyond OpenAI's, and what OpenAI's newest client checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fastapi import FastAPI

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.errors import ConfigError
from paceline.server import ServerConfig, create_app
from tests.server.helpers import VOCAB, chat_body, connect, events, expected_text

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
async def app(anyio_backend: str) -> AsyncIterator[FastAPI]:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.001))
    config = ServerConfig(
        served_model_names=("tiny", "claude-*", "odd[1]*"), enable_per_request_metrics=True
    )
    yield create_app(client, config)
    await client.close()


@pytest.fixture(scope="module")
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as http:
        yield http


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json=chat_body(max_tokens=8, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_echo_begins_with_the_last_message_of_the_same_role(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "So it is"}]
    going_on: dict[str, Any] = {
        "messages": messages, "continue_final_message": True, "max_tokens": 8,
    }  # fmt: skip
    plain = (await http.post(CHAT, json=going_on)).json()["choices"][0]["message"]
    echoed = (await http.post(CHAT, json=going_on | {"echo": True})).json()["choices"][0]["message"]
    assert echoed["content"] == "So it is" + plain["content"]
    stream = await http.post(CHAT, json=going_on | {"echo": True, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(stream.text)]
    assert deltas[0] == {"role": "assistant", "content": "So it is"}
    assert "".join(delta["content"] for delta in deltas) == echoed["content"]
    # the last message is the user's, the answer is not
    assert await said(http, echo=True) == await said(http)


async def said(http: httpx.AsyncClient, **fields: Any) -> str:
    content: str = (await chat(http, **fields))["choices"][0]["message"]["content"]
    return content


class Loose(ByteTokenizer):
    """Writes down some roles and passes over the others, as templates of models do."""

    def render_chat(self, messages: Any, **_: Any) -> str:
        known = ("user", "critic")
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages if m["role"] in known)


async def test_roles_beyond_the_usual_ones() -> None:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512)
    client = null_client(backend, tokenizer=Loose())
    async with connect(create_app(client, ServerConfig())) as http:

        async def ask(role: str) -> httpx.Response:
            messages = [{"role": role, "content": " so-so "}, {"role": "user", "content": "a"}]
            return await http.post(CHAT, json={"messages": messages, "max_tokens": 8})

        taken, left_out, no_name = [await ask(role) for role in ("critic", "poet", "a b")]
    await client.close()
    ids = list(b"critic:  so-so \nuser: a\n")
    assert taken.json()["choices"][0]["message"]["content"] == expected_text(ids, 8)[1]
    assert left_out.status_code == no_name.status_code == 400
    assert "messages[0].role is 'poet'" in left_out.json()["error"]["message"]
    assert "up to 64 letters" in no_name.json()["error"]["message"]


async def test_times_of_a_request(http: httpx.AsyncClient) -> None:
    told = (await chat(http, ignore_eos=True))["metrics"]
    assert set(told) == {
        "queue_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms",
        "tokens_per_second",
    }  # fmt: skip
    assert told["mean_itl_ms"] * 7 == pytest.approx(told["generation_time_ms"])
    running = told["time_to_first_token_ms"] + told["generation_time_ms"]
    assert told["tokens_per_second"] == pytest.approx(8e3 / running)
    assert (await chat(http, n=2))["metrics"] is None
    body = chat_body(max_tokens=1, stream=True, stream_options={"include_usage": True})
    *others, last = events((await http.post(CHAT, json=body)).text)
    assert last["metrics"]["mean_itl_ms"] is None
    assert not any("metrics" in chunk for chunk in others)
    text = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert text.json()["metrics"]["generation_time_ms"] > 0.0
    two = await http.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 3})
    assert two.json()["metrics"] is None


async def test_no_times_without_the_flag(anyio_backend: str) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    async with connect(create_app(client, ServerConfig())) as http:
        assert (await chat(http))["metrics"] is None
    await client.close()


async def test_tokens_written_to_the_cache(http: httpx.AsyncClient) -> None:
    async def details() -> dict[str, int]:
        answer = await http.post("/v1/completions", json={"prompt": "w" * 70, "max_tokens": 1})
        found: dict[str, int] = answer.json()["usage"]["prompt_tokens_details"]
        return found

    assert await details() == {"cached_tokens": 0, "cache_write_tokens": 64}
    assert await details() == {"cached_tokens": 64, "cache_write_tokens": 0}
    body = {"prompt": "v" * 70, "max_tokens": 1, "prompt_logprobs": 1}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cache_write_tokens"] == 0


async def test_the_fingerprint_is_the_models(http: httpx.AsyncClient) -> None:
    whole = (await chat(http))["system_fingerprint"]
    assert whole.startswith("fp_") and len(whole) == 13
    body = chat_body(max_tokens=4, stream=True, stream_options={"include_usage": True})
    told = [c.get("system_fingerprint") for c in events((await http.post(CHAT, json=body)).text)]
    assert told[-2:] == [whole, whole] and set(told[:-2]) == {None}
    other = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512), model="another")
    async with connect(create_app(other, ServerConfig())) as another:
        assert (await chat(another))["system_fingerprint"] != whole
    await other.close()


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("tiny", 200),
        ("claude-sonnet-9", 200),
        ("claude-", 200),
        ("Claude-x", 404),
        ("odd[1]x", 200),
        ("odd1x", 404),
        ("claude-*", 200),
        ("gpt-5", 404),
    ],
)
async def test_names_with_a_star(http: httpx.AsyncClient, name: str, status: int) -> None:
    answer = await http.post(CHAT, json=chat_body(model=name, max_tokens=1))
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["model"] == "tiny"
    body = {"model": name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert (await http.post("/v1/messages", json=body)).status_code == status
    listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert listed == ["tiny"]


def test_the_first_name_is_no_pattern() -> None:
    with pytest.raises(ConfigError, match="answers carry"):
        ServerConfig(served_model_names=("gpt-*",))


async def test_forced_calls_beside_a_response_format(http: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    body = chat_body(max_tokens=200, response_format=form, **fields)
    (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 32_000}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 32_000}),
        ("/v1/responses", {"input": "a" * 2000, "max_output_tokens": 32_000, "truncation": "auto"}),
    ],
)
async def test_a_limit_beyond_the_context_is_cut(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] <= 512
    assert usage["output_tokens"] > 1
    if path == "/v1/messages":
        # a prompt that leaves no place at all is refused as ever
        body = {"messages": [{"role": "user", "content": "a" * 600}], "max_tokens": 32_000}
        assert (await http.post(path, json=body)).status_code == 400


async def test_openais_client_checks_every_answer(app: FastAPI) -> None:
    """Its types say that a chunk of a completion has a finish reason and that echoed tokens have
    log-probabilities, which OpenAI's own answers contradict: those two are not checked."""
    client = openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="k",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpx2Client(transport=httpx2.ASGITransport(app=app)),
        _strict_response_validation=True,
    )
    messages: Any = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6}
    assert (await client.models.list()).data[0].id == "tiny"
    create = client.chat.completions.create
    await create(messages=messages, logprobs=True, top_logprobs=2, **asked)
    options: Any = {"include_usage": True}
    async for _ in await create(messages=messages, stream=True, stream_options=options, **asked):
        pass
    await client.completions.create(prompt="a", logprobs=1, **asked)
    response = await client.responses.create(model="tiny", input="a", max_output_tokens=9)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cache_write_tokens >= 0
    async for _ in await client.responses.create(
        model="tiny", input="a", max_output_tokens=9, stream=True
    ):
        pass
    follow = await client.responses.create(
        model="tiny", input="b", max_output_tokens=9, previous_response_id=response.id
    )
    items = (await client.responses.input_items.list(follow.id, order="asc")).data
    assert [(item.type, getattr(item, "role", "")) for item in items] == [
        ("message", "user"), ("message", "assistant"), ("message", "user"),
    ]  # fmt: skip
    pages = [item.id async for item in client.responses.input_items.list(follow.id, limit=1)]
    assert pages == [item.id for item in reversed(items)]
    counted = await client.responses.input_tokens.count(model="tiny", input="a")
    assert counted.input_tokens == response.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="text models only"):
        await client.moderations.create(input="a")


async def test_invocations_go_by_their_body(http: httpx.AsyncClient) -> None:
    asked = chat_body(max_tokens=6)
    chatted = (await http.post("/invocations", json=asked)).json()
    assert chatted["object"] == "chat.completion"
    assert chatted["choices"] == (await http.post(CHAT, json=asked)).json()["choices"]
    stream = await http.post("/invocations", json=asked | {"stream": True})
    assert events(stream.text)[0]["object"] == "chat.completion.chunk"
    text = (await http.post("/invocations", json={"prompt": "x", "max_tokens": 2})).json()
    assert text["object"] == "text_completion"
    neither = await http.post("/invocations", json={"inputs": "x"})
    assert neither.status_code == 400 and "holds messages" in neither.text


@pytest.mark.parametrize("enabled", [False, True])
async def test_tokenizer_info(anyio_backend: str, enabled: bool) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512))
    config = ServerConfig(enable_tokenizer_info=enabled)
    async with connect(create_app(client, config)) as http:
        answer = await http.get("/tokenizer_info")
    await client.close()
    assert answer.status_code == (200 if enabled else 404)
    if enabled:
        assert answer.json()["eos_tokens"] == ["<|im_end|>"]
        assert answer.json()["model_max_length"] == 512


async def wide(http: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"prompt": "x"} if path != CHAT else chat_body()
    return await http.post(path, json=body | {"max_tokens": 2} | fields)


async def test_how_many_logprobs_are_told_is_a_setting(anyio_backend: str) -> None:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512)
    client = null_client(backend)
    async with connect(create_app(client, ServerConfig())) as http:
        for count in (21, -1):
            refused = await wide(http, logprobs=True, top_logprobs=count)
            assert refused.status_code == 400 and "20 at most" in refused.text
            assert (await wide(http, "/v1/completions", logprobs=count)).status_code == 400
        named = await wide(http, logprob_token_ids=[1])
        assert named.status_code == 400 and "needs logprobs" in named.text
        many = await wide(http, logprobs=True, logprob_token_ids=[1] * 129)
        assert many.status_code == 400 and "may hold 128" in many.text
    async with connect(create_app(client, ServerConfig(max_logprobs=-1))) as http:
        assert (await wide(http, logprobs=True, top_logprobs=-1)).status_code == 200
        echoed = await wide(http, "/v1/completions", logprobs=-1, echo=True)
        assert echoed.status_code == 400 and "with echo" in echoed.text
    await client.close()


async def test_an_answer_of_many_logprobs_is_bounded_in_bytes(anyio_backend: str) -> None:
    client = null_client(NullBackend(vocab_size=50_000, max_model_len=512))
    async with connect(create_app(client, ServerConfig(max_logprobs=-1))) as http:
        refused = await wide(http, logprobs=True, top_logprobs=-1, max_tokens=30)
        assert refused.status_code == 400 and "91 MiB; 64 are served" in refused.text
        assert (await wide(http, logprobs=True, top_logprobs=-1, max_tokens=2)).status_code == 200
    await client.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty must be in [-2, 2], got -3.0"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0"),
        ({"temperature": -1}, "temperature must be non-negative, got -1.0"),
        ({"temperature": 101}, "temperature must be in [0, 100], got 101.0"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens must be less than or equal to max_tokens=8, got 9",
        ),
        (
            {"logprobs": True, "top_logprobs": -2},
            "top_logprobs must be non-negative or -1, got -2",
        ),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be in [0, 20], got -2"),
    ],
)
async def test_numbers_out_of_range_are_refused_in_the_words_of_vllm(
    http: httpx.AsyncClient, fields: dict[str, Any], said: str
) -> None:
    answer = await http.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] == said.split()[0]


async def test_beam_search_is_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    answer = await http.post(CHAT, json=chat_body(use_beam_search=True, n=4))
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "beam search" in message and "n choices with logprobs" in message
