"""A server of several null models: every API finds its model; lists, loads, refusals, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.models.front import FrontClient
from paceline.engine.models.model import State
from paceline.engine.models.pool import ModelPool
from paceline.engine.protocol import EngineClient, Tokenizer
from paceline.errors import CheckpointError, InvalidRequestError, ModelFailedError
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import SeveralModels
from paceline.server.models.finding import seconds_of
from tests.engine.models.null_pool import null_pool
from tests.server.helpers import VOCAB, chat_body, connect, events, metric, scrape

# a context length of its own tells a model apart
LENGTHS = {"small": 256, "large": 512, "huge": 512, "broken": 128}


def _backend(name: str) -> NullBackend:
    if name == "broken":
        raise CheckpointError("/models/broken.gguf is truncated: 10 of 20 bytes")
    return NullBackend(vocab_size=VOCAB, max_model_len=LENGTHS[name], step_time=0.001)


@asynccontextmanager
async def _server(
    memory: int = 30,
    *,
    autoload: bool = True,
    max_waits: Mapping[str, float] = MappingProxyType({}),
    adapters: Mapping[str, str] = MappingProxyType({}),
    **config: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, ModelPool]]:
    mib = 2**20
    sizes = {"small": 10 * mib, "large": 20 * mib, "huge": 99 * mib, "broken": 10 * mib}
    aliases = {"small": {"aliases": ("tiny",)}}
    pool = await null_pool(sizes, memory * mib, _backend, specs=aliases)

    def config_of(name: str) -> ServerConfig:
        names = (name, *aliases.get(name, {}).get("aliases", ()))
        return ServerConfig(served_model_names=names, **config)

    several = SeveralModels(
        pool=pool,
        configs={name: (lambda name=name: config_of(name)) for name in sizes},  # type: ignore[misc]
        first="small",
        autoload=autoload,
        max_waits=max_waits,
        adapters=adapters,
    )
    app = create_app(FrontClient(pool, "small"), config_of("small"), models=several)
    async with connect(app) as http:
        yield http, pool
    assert not any(model.leases for model in pool.states.models.values()), "a lease was kept"
    pool.states.check_integrity()
    await pool.close()


async def _unloaded(pool: ModelPool, name: str) -> None:
    while pool.states.models[name].state is not State.UNLOADED:
        await pool.changed()


async def test_a_request_is_answered_by_the_model_that_it_names() -> None:
    async with _server() as (http, pool):
        for name, shown in (("small", "small"), ("tiny", "small"), ("large", "large")):
            body = chat_body(model=name, max_tokens=4)
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.json()["model"] == shown, answer.text
        streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
        assert events(streamed.text)[0]["model"] == "large"
        # none named: the first
        answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert answer.json()["model"] == "small"
        # limits are the model's own
        prompt = "x" * 300
        long = {"model": "large", "prompt": prompt, "max_tokens": 2}
        assert (await http.post("/v1/completions", json=long)).status_code == 200
        answer = await http.post("/v1/completions", json=long | {"model": "small"})
        assert answer.status_code == 400 and "256" in answer.text
        assert pool.states.models["large"].state is State.READY


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        ("/v1/messages", {"max_tokens": 2, **chat_body()}, "model"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "model"),
        ("/api/chat", chat_body(stream=False, options={"num_predict": 2}), "model"),
        ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 2}}, "model"),
        ("/completion", {"prompt": "x", "n_predict": 2}, "model"),
        ("/tokenize", {"prompt": "hi"}, "max_model_len"),
    ],
)
async def test_every_api_finds_its_model(path: str, body: dict[str, Any], at: str) -> None:
    async with _server() as (http, _):
        answer = await http.post(path, json=body | {"model": "large"})
        assert answer.status_code == 200, answer.text
        assert answer.json()[at] == {"model": "large", "max_model_len": 512}[at]
        unknown = await http.post(path, json=body | {"model": "unknown"})
        assert unknown.status_code == 404, unknown.text
        for bad in ([], {}, 5):
            answer = await http.post(path, json=body | {"model": bad})
            assert answer.status_code in (200, 400), answer.text


async def test_get_routes_take_the_model_from_the_query() -> None:
    async with _server() as (http, pool):
        await pool.load("large")
        answer = await http.get("/props", params={"model": "large"})
        assert answer.json()["default_generation_settings"]["n_ctx"] == 512
        assert (await http.get("/props")).json()["default_generation_settings"]["n_ctx"] == 256


async def test_lists_show_states_reasons_and_memory() -> None:
    async with _server() as (http, _):
        await http.post("/v1/completions", json={"model": "broken", "prompt": "hi"})
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert cards["small"]["status"]["value"] == "ready"
        assert cards["small"]["aliases"] == ["tiny"]
        assert cards["large"]["status"]["value"] == "known"
        failed = cards["broken"]["status"]
        assert failed["value"] == "failed" and "truncated: 10 of 20 bytes" in failed["reason"]
        assert "/models/" not in failed["reason"], "a path of this machine"
        assert (await http.get("/v1/models/tiny")).json()["id"] == "small"
        assert (await http.get("/v1/models/unknown")).status_code == 404
        llama = {card["id"]: card for card in (await http.get("/models")).json()["data"]}
        assert llama["small"]["status"]["value"] == "loaded"
        assert llama["broken"]["status"]["failed"] is True
        tags = (await http.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["small", "large", "huge", "broken"]
        (running,) = (await http.get("/api/ps")).json()["models"]
        assert running["name"] == "small" and running["size"] == 10 * 2**20
        assert running["context_length"] == 256


async def test_the_description_of_the_api_has_the_routes_of_models() -> None:
    async with _server() as (http, _):
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert {"/models/load", "/models/unload", "/api/ps", "/v1/models"} <= set(paths)


async def test_what_cannot_be_served_says_why_and_stops_nothing() -> None:
    async with _server() as (http, _):
        body = {"prompt": "hi", "max_tokens": 2}
        broken = await http.post("/v1/completions", json=body | {"model": "broken"})
        assert broken.status_code == 503 and "truncated" in broken.text
        assert int(broken.headers["retry-after"]) > 30
        huge = await http.post("/v1/completions", json=body | {"model": "huge"})
        assert huge.status_code == 507
        assert "99 MiB" in huge.text and "30 MiB" in huge.text
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        cold = await http.post("/v1/completions?autoload=false", json=body | {"model": "large"})
        assert cold.status_code == 400 and "known" in cold.text


async def test_a_server_without_autoload_loads_what_is_asked_for_alone() -> None:
    async with _server(autoload=False) as (http, pool):
        body = {"model": "large", "prompt": "hi", "max_tokens": 2}
        assert (await http.post("/v1/completions", json=body)).status_code == 400
        assert pool.states.models["large"].state is State.KNOWN
        asked = await http.post("/v1/completions?autoload=true", json=body)
        assert asked.status_code == 200


async def test_a_load_that_takes_too_long_is_refused_for_now_and_begins() -> None:
    async with _server(max_waits={"large": 0.0, "broken": 0.0}) as (http, pool):
        with pytest.raises(ModelFailedError):
            await pool.load("broken")
        failed = pool.states.loaded["failed"]
        rests = await http.post("/v1/completions", json={"model": "broken", "prompt": "hi"})
        assert rests.status_code == 503 and "truncated" in rests.text
        assert pool.states.loaded["failed"] == failed, "it was loaded once more"
        body = {"model": "large", "prompt": "hi", "max_tokens": 2}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "not in memory" in refused.text
        while pool.states.models["large"].state is not State.READY:
            await pool.changed()
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_models_are_loaded_unloaded_and_pinned_by_callers() -> None:
    async with _server() as (http, pool):
        assert (await http.post("/models/load", json={"model": "large"})).json() == {
            "success": True
        }
        assert pool.states.models["large"].state is State.READY
        assert (await http.post("/models/unload", json={"model": "large"})).status_code == 200
        await _unloaded(pool, "large")
        assert (await http.post("/models/pin", json={"model": "tiny"})).status_code == 200
        # a pinned model makes no way
        assert pool.states.models["small"].spec.pinned
        assert (await http.post("/models/load", json={"model": "unknown"})).status_code == 404
        assert (await http.post("/models/load", json={"model": "huge"})).status_code == 507


async def test_only_admins_change_models() -> None:
    keys = (
        ApiKey.of("user", "user", "sk-user-key"),
        ApiKey.of("boss", "admin", "sk-boss-key"),
    )
    async with _server(api_keys=keys) as (http, pool):
        body = {"model": "large"}
        user, boss = ({"Authorization": f"Bearer sk-{who}-key"} for who in ("user", "boss"))
        assert (await http.post("/models/load", json=body)).status_code == 401
        for path in ("/models/load", "/models/unload", "/models/pin"):
            assert (await http.post(path, json=body, headers=user)).status_code == 403
            assert (await http.post(path, json=body, headers=boss)).status_code == 200
        # keep_alive unloads a model for all, too
        asked = {"model": "small", "prompt": "x", "stream": False, "keep_alive": 0}
        asked["options"] = {"num_predict": 2}
        for headers, keeps in ((user, None), (boss, 0.0)):
            answer = await http.post("/api/generate", json=asked, headers=headers)
            assert answer.status_code == 200
            assert pool.states.models["small"].keep_alive == keeps


async def test_ollamas_empty_prompt_loads_and_its_keep_alive_unloads() -> None:
    async with _server() as (http, pool):
        large = pool.states.models["large"]
        loaded = await http.post("/api/generate", json={"model": "large:latest", "stream": False})
        assert loaded.json()["done_reason"] == "load" and large.state is State.READY
        await http.post("/api/generate", json={"model": "large", "keep_alive": "1h30m"})
        assert pool.states.kept(large) == 5400.0
        await http.post("/api/generate", json={"model": "large", "keep_alive": 1e12})
        shown = (await http.get("/api/ps")).json()["models"]
        (expires,) = (each["expires_at"] for each in shown if each["name"] == "large")
        assert expires.startswith("21")
        gone = await http.post(
            "/api/generate", json={"model": "large", "keep_alive": 0, "stream": False}
        )
        assert gone.json()["done_reason"] == "unload"
        await _unloaded(pool, "large")
        assert (await http.post("/api/pull", json={"model": "large"})).status_code == 200
        assert (await http.post("/api/pull", json={"model": "other"})).status_code == 404


async def test_neither_options_nor_a_second_name_load_a_model_again() -> None:
    async with _server() as (http, pool):
        await pool.load("large")
        for number in range(3):
            for name in ("small", "tiny", "large", "tiny:latest"):
                options = {"num_ctx": 64 << number, "num_predict": 2, "num_thread": 1 + number}
                body = chat_body(model=name, stream=False, options=options)
                answer = await http.post("/api/chat", json=body)
                assert answer.status_code == 200, answer.text
        text = (await http.get("/metrics")).text
        assert metric(text, "paceline:model_loads_total", outcome="ready") == 2
        assert metric(text, "paceline:model_evictions_total", reason="room") == 0
        assert pool.states.models["small"].state is pool.states.models["large"].state is State.READY


@pytest.mark.parametrize("ends", ["caller", "server"])
async def test_changes_are_followed_as_events(ends: str) -> None:
    async with _server() as (http, pool):
        app = http._transport.app  # type: ignore[attr-defined]
        received: list[bytes] = []
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            received.append(message.get("body", b""))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
            "path": "/models/sse", "raw_path": b"/models/sse", "query_string": b"", "headers": [],
            "server": ("test", 80), "client": ("test", 1), "scheme": "http",
        }  # fmt: skip
        following = asyncio.create_task(app(scope, receive, send))
        while b"broken" not in b"".join(received):
            await asyncio.sleep(0)
        await pool.load("large")
        while b"".join(received).count(b'"large"') < 2:
            await asyncio.sleep(0)
        if ends == "caller":
            gone.set()
        else:
            app.state.service.draining = True
            await pool.drain(30.0)
        await following
        lines = b"".join(received).decode().split("\n\n")
        shown = [json.loads(each.removeprefix("data: ")) for each in lines if "data:" in each]
        assert [each["data"]["state"] for each in shown if each["model"] == "large"][-1] in (
            "loading", "ready",
        )  # fmt: skip


async def test_metrics_have_series_of_each_model_under_one_head() -> None:
    async with _server() as (http, _):
        for name, count in (("small", 3), ("large", 5)):
            body = {"model": name, "prompt": "hi", "max_tokens": count, "ignore_eos": True}
            await http.post("/v1/completions", json=body)
        text = await scrape(http)
        for name, count in (("small", 3), ("large", 5)):
            assert metric(text, "vllm:generation_tokens_total", model_name=name) == count
        heads = [line for line in text.splitlines() if line.startswith("# TYPE ")]
        assert len(heads) == len(set(heads))
        assert text.count("# TYPE http_requests_total ") == 1


async def test_requests_of_all_models_count_as_the_servers() -> None:
    async with _server() as (http, pool):
        await pool.load("large")
        body = {"model": "large", "prompt": "hi", "max_tokens": 400, "ignore_eos": True}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        for _ in range(1000):
            if (await http.get("/load")).json()["server_load"]:
                break
            await asyncio.sleep(0.001)
        else:
            raise AssertionError("the request was never counted")
        assert (await running).status_code == 200
        assert (await http.get("/load")).json()["server_load"] == 0


async def test_a_caller_who_leaves_holds_no_model_and_waits_for_none() -> None:
    async with _server(25) as (http, pool):
        app = http._transport.app  # type: ignore[attr-defined]
        small, large = pool.states.models["small"], pool.states.models["large"]
        held = await pool.take("small")

        def ask(model: str, gone: asyncio.Event) -> asyncio.Task[None]:
            body = {"model": model, "prompt": "x", "max_tokens": 200, "stream": True}
            messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive() -> dict[str, Any]:
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(_: dict[str, Any]) -> None:
                pass

            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
                "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
                "query_string": b"", "headers": [(b"content-type", b"application/json")],
                "server": ("test", 80), "client": ("test", 1), "scheme": "http",
            }  # fmt: skip
            return asyncio.create_task(app(scope, receive, send))

        gone = asyncio.Event()
        waits, streams = ask("large", gone), ask("small", gone)
        async with asyncio.timeout(60.0):
            while not large.waiting or len(small.leases) < 2:
                await asyncio.sleep(0.001)
        gone.set()
        await asyncio.gather(waits, streams)
        assert not large.waiting and small.leases == {held}
        pool.give(held)


def _slowly(pool: ModelPool, name: str, until: asyncio.Event | None = None) -> None:
    """Have a model's loads take 0.3 s, or wait for an event."""
    start = pool._starts[name]

    async def slow(tokenizer: Tokenizer | None) -> EngineClient:
        await (asyncio.sleep(0.3) if until is None else until.wait())
        return await start(tokenizer)

    pool._starts = {**pool._starts, name: slow}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("patience", "begins"), [(0.05, r": loading \d+%\n\n"), (60.0, "[de]")])
async def test_a_stream_begins_with_comments_while_its_model_is_loaded(
    path: str, patience: float, begins: str
) -> None:
    async with _server(sse_keep_alive=patience) as (http, pool):
        _slowly(pool, "large")
        body = chat_body(model="large", max_tokens=4, stream=True)
        answer = await http.post(path, json=body)
        assert answer.status_code == 200 and re.match(begins, answer.text), answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        warm = (await http.post(path, json=body)).text.split("\n\n")
        told = [each for each in answer.text.split("\n\n") if not each.startswith(": ")]
        # one start, whatever came at once
        assert told[-2] == warm[-2] and told[0].partition(":")[0] == warm[0].partition(":")[0]
        assert answer.text.count("message_start") == answer.text.count("message_stop")


async def test_what_fails_after_a_stream_began_is_its_last_event() -> None:
    async with _server(sse_keep_alive=0.05) as (http, pool):
        body = chat_body(model="broken", stream=True)
        _slowly(pool, "broken")
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        error = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert error["code"] == 503 and "cannot be loaded: " in error["message"]
        # what the model's own rules refuse
        _slowly(pool, "large")
        body = chat_body(model="large", stream=True, max_tokens=100_000)
        answer = await http.post("/v1/chat/completions", json=body)
        error = json.loads(answer.text.split("\n\n")[-3].removeprefix("data: "))["error"]
        assert error["code"] == 400


@pytest.mark.parametrize("model", ["broken", "large"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 2}),
        ("/v1/responses", {"input": "x" * 2000}),
    ],
)
async def test_an_api_of_named_events_names_the_one_of_a_failure(
    path: str, body: dict[str, Any], model: str
) -> None:
    """Where the load fails, and where the model's own rules refuse: readers skip other events."""
    async with _server(sse_keep_alive=0.05) as (http, pool):
        _slowly(pool, model)
        asked = {"model": model, "stream": True} | body
        answer = await http.post(path, json=asked)
        assert answer.status_code == 200 and answer.text.startswith(": loading"), answer.text
        *_, last, end = answer.text.split("\n\n")
        assert not end and last.startswith("event: error\ndata: "), answer.text
        error = json.loads(last.partition("data: ")[2])
        assert error["type"] == "error"
        says = "cannot be loaded" if model == "broken" else "512"
        assert says in (error.get("error") or error)["message"]


async def test_the_time_of_a_load_is_part_of_the_first_tokens() -> None:
    async with _server() as (http, pool):
        _slowly(pool, "large")
        seconds = []
        for _ in range(2):
            body = {"model": "large", "prompt": "x", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            name = "vllm:time_to_first_token_seconds_sum"
            seconds.append(metric(await scrape(http), name, model_name="large"))
        assert seconds[0] >= 0.3 > seconds[1] - seconds[0]


async def test_too_many_who_wait_for_a_model_are_told_when_to_come_back() -> None:
    async with _server() as (http, pool):
        _slowly(pool, "large")
        large = pool.states.models["large"]
        large.spec = replace(large.spec, max_waiting=1)
        body = {"model": "large", "prompt": "x", "max_tokens": 2}
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        while not large.waiting:
            await asyncio.sleep(0.001)
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "1 requests wait for the model large" in refused.text
        assert (await first).status_code == 200


async def test_a_fallback_answers_while_a_model_is_loaded_and_says_so() -> None:
    async with _server() as (http, pool):
        large = pool.states.models["large"]
        large.spec = replace(large.spec, fallback="tiny")
        may_load = asyncio.Event()
        _slowly(pool, "large", may_load)
        body = chat_body(model="large", max_tokens=4)
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["model"] == "small" == answer.headers["x-paceline-model"]
        streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
        assert events(streamed.text)[0]["model"] == "small"
        # what a caller says of the model that is named says nothing of its fallback
        small = pool.states.models["small"]
        asked = {"model": "large", "prompt": "x", "stream": False, "keep_alive": 0}
        answer = await http.post("/api/generate", json=asked)
        assert answer.json()["model"] == "small" and small.keep_alive is None
        may_load.set()
        # ids are of one model
        ids = await http.post("/tokenize", json={"model": "large", "prompt": "x"})
        assert ids.json()["max_model_len"] == LENGTHS["large"]
        while large.state is not State.READY:
            await pool.changed()
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["model"] == "large" and "x-paceline-model" not in answer.headers
        # without loads by requests neither is loaded, and without the fallback it is refused
        for name in ("large", "small"):
            pool.unload(name)
            await _unloaded(pool, name)
            answer = await http.post("/v1/chat/completions?autoload=false", json=body)
            assert answer.status_code == (200 if name == "large" else 400)
            assert pool.states.models["large"].state is State.UNLOADED


@pytest.mark.parametrize("name", ["sql", "sql:latest"])
async def test_an_adapter_has_no_fallback(name: str) -> None:
    async with _server(adapters={"sql": "large"}) as (http, pool):
        large = pool.states.models["large"]
        large.spec = replace(large.spec, fallback="tiny")
        body = chat_body(model=name, stream=False)
        answer = await http.post("/api/chat?autoload=false", json=body)
        assert answer.status_code == 400 and "'large' is known" in answer.json()["error"]


async def test_a_batch_line_names_its_model() -> None:
    from paceline.server.batches.answering import answer_line
    from paceline.server.batches.lines import BatchLine

    async with _server() as (http, _):
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        body = {"model": "large", "prompt": "x" * 300, "max_tokens": 2}
        line = BatchLine(index=0, custom_id="1", digest="", url="/v1/completions", body=body)
        answer = await answer_line(service, line, "r")
        assert answer.status == 200 and b'"large"' in answer.body


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        (-1, float("inf")),
        ("90", 90.0),
        ("-1", float("inf")),
        ("-5m", float("inf")),
        (1e300, float("inf")),
        (10**400, float("inf")),
        ("9" * 400, float("inf")),
        ("1.5h", 5400.0),
    ],
)
def test_durations_as_ollama_has_them(given: object, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", [True, "soon", "-soon", "-", "5 minutes", [], float("nan")])
def test_other_durations_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="keep_alive"):
        seconds_of(given)
