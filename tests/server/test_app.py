"""What surrounds generation: health, ids, errors that say nothing private, configuration."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

import paceline
from paceline.backends.reference.null import NullBackend
from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.engine.local import LocalEngineClient
from paceline.engine.protocol import Sink
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.types import GenerationOutput, GenerationRequest
from paceline.errors import ConfigError, EngineDeadError, QueueFullError
from paceline.server import ServerConfig, create_app, sampling_defaults, serve
from tests.server.helpers import VOCAB, chat_body, connect, say


async def test_health(http: httpx.AsyncClient) -> None:
    for response in (
        await http.get("/health"),
        await http.get("/ping"),
        await http.post("/ping"),
    ):
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": paceline.__version__}


async def test_models(http: httpx.AsyncClient) -> None:
    answer = (await http.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["tiny", "alias"]
    card = answer["data"][0]
    assert card["max_model_len"] == 512
    assert card["owned_by"] == "paceline"
    assert card["root"] == "null-model"
    assert card["parent"] is None
    assert re.fullmatch("[0-9a-f]{32}", card["digest"])
    assert card["permission"][0]["object"] == "model_permission"
    one = (await http.get("/v1/models/alias")).json()
    assert one["id"] == "alias"


async def test_tokenizer_endpoints(http: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "return_token_strs": True}
    assert (await http.post("/tokenize", json=body)).json() == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [ByteTokenizer.BOS, 97, 98],
        "token_strs": ["<|bos|>", "a", "b"],
    }
    bare = {"prompt": "ab", "add_special_tokens": False}
    assert (await http.post("/tokenize", json=bare)).json()["tokens"] == [97, 98]
    chat = (await http.post("/tokenize", json=chat_body("hi"))).json()
    text = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_documentation_lists_every_endpoint(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"} <= set(paths)
    assert (await http.get("/docs")).status_code == 200


async def test_request_ids(http: httpx.AsyncClient) -> None:
    first, second = [await http.get("/health") for _ in range(2)]
    assert uuid.UUID(first.headers["X-Request-Id"]) != uuid.UUID(second.headers["X-Request-Id"])
    given = await http.get("/health", headers={"X-Request-Id": "abc-1"})
    assert given.headers["X-Request-Id"] == "abc-1"
    refused = await http.post("/v1/completions", json={}, headers={"X-Request-Id": "abc-2"})
    assert refused.headers["X-Request-Id"] == "abc-2"
    body = {"prompt": "x", "stream": True, "max_tokens": 1}
    streamed = await http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-3"})
    assert streamed.headers["X-Request-Id"] == "abc-3"


@pytest.mark.parametrize("odd", ["x" * 129, "a b", "", "a\tb", b"\xff\xfe"])
async def test_odd_request_ids_are_replaced(http: httpx.AsyncClient, odd: str | bytes) -> None:
    value = odd if isinstance(odd, bytes) else odd.encode()
    response = await http.get("/health", headers=[(b"X-Request-Id", value)])
    assert uuid.UUID(response.headers["X-Request-Id"])


async def test_callers_may_share_a_request_id(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x", "max_tokens": 50, "request_id": "same", "logit_bias": say("q")}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(5)))
    assert [answer.json()["id"] for answer in answers] == ["cmpl-same"] * 5
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["q" * 50] * 5


async def test_unseeded_requests_differ_and_seeds_are_kept(engine: LocalEngineClient) -> None:
    seeds: list[int] = []

    class Spy(Fake):
        async def generate(
            self, request: GenerationRequest, sink: Sink | None = None
        ) -> AsyncIterator[GenerationOutput]:
            seeds.append(request.sampling.seed)
            raise QueueFullError("full", 1.0)
            yield

    async with connect(create_app(Spy(engine), ServerConfig())) as http:
        for seed in (None, None, 5):
            await http.post("/v1/completions", json={"prompt": "x", "seed": seed})
    assert seeds[0] != seeds[1]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[2] == 5


class Fake:
    """A client whose ``generate`` a test replaces; the rest is the real one's."""

    def __init__(self, engine: LocalEngineClient) -> None:
        self._engine = engine
        self.on_dead = None
        self.on_stats = None
        self.on_timeline = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def failing(engine: LocalEngineClient, error: Exception) -> Any:
    class Failing(Fake):
        async def generate(
            self, request: GenerationRequest, sink: Sink | None = None
        ) -> AsyncIterator[GenerationOutput]:
            raise error
            yield

        def check_health(self) -> None:
            raise error

    return Failing(engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue(engine: LocalEngineClient, stream: bool) -> None:
    app = create_app(failing(engine, QueueFullError("too many", 2.3)), ServerConfig())
    async with connect(app) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "3"
    assert response.json()["error"]["type"] == "RateLimitError"


@pytest.mark.parametrize("stream", [False, True])
async def test_dead_engine(engine: LocalEngineClient, stream: bool) -> None:
    app = create_app(failing(engine, EngineDeadError("it was killed")), ServerConfig())
    async with connect(app) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
        health = await http.get("/health")
    for answer in (response, health):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "it was killed"
        assert "Retry-After" in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_bugs_say_nothing_private(
    engine: LocalEngineClient, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "secret prompt at 0x7f0012345678 in /etc/secrets/key"
    app = create_app(failing(engine, ZeroDivisionError(secret)), ServerConfig())
    async with connect(app) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "InternalServerError"
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    # the log says where, and not what was said
    assert "ZeroDivisionError" in caplog.text
    assert "test_app.py" in caplog.text
    assert "secret" not in caplog.text


async def test_logs_hold_no_prompts(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="paceline")
    prompt = "my diary, page one"
    await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "odd": prompt})
    await http.post("/v1/chat/completions", json=chat_body(prompt, max_tokens=1))
    assert "request id=cmpl-" in caplog.text
    assert "unknown_fields names='odd'" in caplog.text
    assert "diary" not in caplog.text


async def test_body_limit(engine: LocalEngineClient) -> None:
    app = create_app(engine, ServerConfig(max_body_bytes=100))
    async with connect(app) as http:
        small = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        large = await http.post("/v1/completions", json={"prompt": "x" * 100})
    assert small.status_code == 200
    assert large.status_code == 413
    assert "100 bytes" in large.json()["error"]["message"]


async def test_choice_limits(engine: LocalEngineClient) -> None:
    config = ServerConfig(max_choices=2, max_prompts=3)
    async with connect(create_app(engine, config)) as http:
        for fields, status in (
            ({"prompt": "x", "n": 2}, 200),
            ({"prompt": "x", "n": 3}, 400),
            ({"prompt": ["x"] * 3}, 200),
            ({"prompt": ["x"] * 4}, 400),
        ):
            response = await http.post("/v1/completions", json={"max_tokens": 1, **fields})
            assert response.status_code == status, response.text


async def test_n_is_bounded_by_what_can_run() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB), max_num_seqs=4)
    async with connect(create_app(client, ServerConfig())) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "n": 5})
    await client.close()
    assert "in [1, 4], got 5" in response.json()["error"]["message"]


async def test_what_no_queue_can_hold_is_not_told_to_try_again() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB), max_num_seqs=8, max_num_waiting=4)
    async with connect(create_app(client, ServerConfig())) as http:
        few = await http.post("/v1/completions", json={"prompt": "x", "n": 4, "max_tokens": 2})
        choices = await http.post("/v1/completions", json={"prompt": "x", "n": 5})
        prompts = await http.post("/v1/completions", json={"prompt": ["x"] * 7, "n": 2})
    await client.close()
    assert few.status_code == 200 and len(few.json()["choices"]) == 4
    assert choices.status_code == 400 and "in [1, 4], got 5" in choices.text
    assert prompts.status_code == 400 and "14 sequences, and 12 can" in prompts.text


class Refusing(Fake):
    """Refuses what it is asked, which is in ``seen``."""

    def __init__(self, engine: LocalEngineClient) -> None:
        super().__init__(engine)
        self.seen: list[GenerationRequest] = []

    async def generate(
        self, request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncIterator[GenerationOutput]:
        self.seen.append(request)
        raise QueueFullError("full", 1.0)
        yield


async def test_default_sampling(engine: LocalEngineClient) -> None:
    defaults = sampling_defaults(
        {
            "temperature": 0.2,
            "top_p": 0.9,
            "top_k": 50,
            "min_p": None,
            "repetition_penalty": 1.1,
            "max_new_tokens": 33,
            "do_sample": True,
            "bos_token_id": 1,
        }
    )
    client = Refusing(engine)
    async with connect(create_app(client, ServerConfig(default_sampling=defaults))) as http:
        await http.post("/v1/chat/completions", json=chat_body())
        await http.post(
            "/v1/chat/completions", json=chat_body(temperature=0, top_k=-1, max_tokens=4)
        )
    given, overridden = (request.sampling for request in client.seen)
    assert (given.temperature, given.top_p, given.top_k) == (0.2, 0.9, 50)
    assert (given.min_p, given.repetition_penalty, given.max_tokens) == (0.0, 1.1, 33)
    assert (overridden.temperature, overridden.top_k, overridden.max_tokens) == (0.0, 0, 4)


async def test_request_templates_need_trust(engine: LocalEngineClient) -> None:
    body = chat_body(chat_template="{{ 1 }}", max_tokens=1)
    async with connect(create_app(engine, ServerConfig())) as http:
        refused = await http.post("/v1/chat/completions", json=body)
    assert "not accepted" in refused.json()["error"]["message"]
    trusting = ServerConfig(trust_request_chat_template=True)
    async with connect(create_app(engine, trusting)) as http:
        passed_on = await http.post("/v1/chat/completions", json=body)
    # it reached the tokenizer, which has only one
    assert "one template" in passed_on.json()["error"]["message"]


async def test_fields_reach_the_engine(engine: LocalEngineClient) -> None:
    body = chat_body(
        max_tokens=9,
        n=2,
        temperature=0.5,
        top_p=0.6,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias={"5": -1.5, "6": 100},
        seed=-77,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        min_tokens=2,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=True,
        top_logprobs=3,
        priority=-2,
        cache_salt="salt",
        speculation={"max_tokens": 0},
        store=False,
    )
    client = Refusing(engine)
    async with connect(create_app(client, ServerConfig())) as http:
        await http.post("/v1/chat/completions", json=body)
        other = {**body, "ignore_eos": True, "speculation": None, "store": None}
        await http.post("/v1/chat/completions", json=other)
        for store in (False, True):
            await http.post("/v1/responses", json={"input": "a", "store": store})
    request, ignoring, *responses = client.seen
    assert [each.store for each in (request, ignoring, *responses)] == [False, True, False, True]
    assert (request.max_draft_tokens, ignoring.max_draft_tokens) == (0, MOST_DRAFT_TOKENS)
    sampling = request.sampling
    assert (request.n, request.stop, request.priority) == (2, ("a", "b"), -2)
    assert (request.cache_salt, request.include_stop_str_in_output) == ("salt", True)
    assert request.skip_special_tokens is False
    assert sampling.max_tokens == 9
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.6, 7)
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 0.2)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (0.3, 1.4)
    assert sampling.logit_bias == ((5, -1.5), (6, 100.0))
    assert (sampling.seed, sampling.logprobs, sampling.min_tokens) == (-77, 3, 2)
    assert sampling.stop_token_ids == {3, 4}
    assert sampling.eos_token_ids == {ByteTokenizer.IM_END}
    assert ignoring.sampling.eos_token_ids == frozenset()


async def test_long_prompts_do_not_hold_up_the_event_loop() -> None:
    class SlowTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            import time

            time.sleep(0.3)
            return super().encode(text, add_special_tokens=add_special_tokens)[:50]

    client = null_client(NullBackend(vocab_size=VOCAB), tokenizer=SlowTokenizer())
    async with connect(create_app(client, ServerConfig())) as http:
        body = {"prompt": "x" * 5000, "max_tokens": 1}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        turns = 0
        while not call.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert (await call).status_code == 200
    await client.close()
    assert turns >= 5


async def test_infinite_logprobs_are_clamped(engine: LocalEngineClient) -> None:
    from paceline.engine.types import ChoiceDelta, TokenLogprobs

    low = float("-inf")

    class Certain(Fake):
        async def generate(
            self, request: GenerationRequest, sink: Sink | None = None
        ) -> AsyncIterator[GenerationOutput]:
            entry = TokenLogprobs(65, low, 2, ((66, 0.0), (67, low)))
            yield GenerationOutput(
                request_id=request.request_id,
                choices=(
                    ChoiceDelta(
                        index=0,
                        text="A",
                        token_ids=(65,),
                        logprobs=(entry,),
                        finish_reason="length",
                    ),
                ),
                num_prompt_tokens=1,
                num_cached_tokens=0,
                num_output_tokens=1,
                finished=True,
            )

    async with connect(create_app(Certain(engine), ServerConfig())) as http:
        chat = await http.post(
            "/v1/chat/completions", json=chat_body(logprobs=True, top_logprobs=2)
        )
        text = await http.post("/v1/completions", json={"prompt": "x", "logprobs": 2})
    content = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert content["logprob"] == -9999.0
    assert [top["logprob"] for top in content["top_logprobs"]] == [0.0, -9999.0]
    columns = text.json()["choices"][0]["logprobs"]
    assert columns["token_logprobs"] == [-9999.0]
    # the chosen token is there although it is not among the likeliest
    assert columns["top_logprobs"] == [{"B": 0.0, "C": -9999.0, "A": -9999.0}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"served_model_names": ("",)}, "1 to 256 characters, got 0"),
        ({"served_model_names": ("x" * 257,)}, "got 257"),
        ({"drain_timeout": -1.0}, "-1.0"),
        ({"drain_timeout": float("inf")}, "inf"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_choices": 0}, "max_choices"),
        ({"max_prompts": -1}, "-1"),
        ({"default_sampling": {"temperature": -1}}, "default_sampling: temperature"),
        ({"default_sampling": {"max_new_tokens": 0}}, "got 0"),
        ({"default_sampling": {"colour": 1}}, "colour"),
    ],
)
def test_bad_configuration(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        ServerConfig(**fields)


@pytest.mark.parametrize("value", ["hot", True, float("nan"), [1]])
def test_bad_generation_config(value: Sequence[int] | str | float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        sampling_defaults({"temperature": value})


async def test_an_engine_that_is_dead_already() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    await client.close()
    ready: list[int] = []
    code = await serve(client, ServerConfig(), port=0, on_ready=lambda _, port: ready.append(port))
    assert (code, ready) == (1, [])
