"""What engines say that they can do: asked once, and again when they come back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.gateway.settings.config import EngineConfig, EngineKind, GatewayConfig, check_config
from paceline.gateway.settings.engine_types import KINDS
from paceline.gateway.upstreams import registry
from paceline.http.listening import bind
from tests.gateway.fault_server import Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    VLLM,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    pieces,
    prefer_others,
    serving,
    streamed,
    text_of,
    until,
)

FIELDS = {
    "token_ids": "return_token_ids",
    "resume": "resume_output_ids",
    "continues": "continue_final_message",
}


def described(*fields: str, inline: bool = False) -> dict[str, Any]:
    """An API's description, as FastAPI writes it."""
    own = {"properties": {name: {} for name in ("messages", "model", *fields)}}
    schema = own if inline else {"$ref": "#/components/schemas/Chat"}
    content = {"application/json": {"schema": schema}}
    return {
        "paths": {CHAT: {"post": {"requestBody": {"content": content}}}},
        "components": {
            "schemas": {"Other": {"properties": {"resume_output_ids": {}}}, "Chat": own}
        },
    }


def template(asked: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp fills one that knows how to go on."""
    assert asked["continue_final_message"] is True and not asked["add_generation_prompt"]
    user, said = (message["content"] for message in asked["messages"])
    return {"prompt": f"<user>{user}</user><assistant>{said}"}


def old_template(asked: dict[str, Any]) -> dict[str, Any]:
    """And as one does that does not."""
    return {"prompt": template(asked)["prompt"] + "</assistant>\n"}


def tokenized(asked: dict[str, Any]) -> dict[str, Any]:
    goes_on = asked["continue_final_message"]
    return {"count": 20 if goes_on else 22, "max_model_len": 2048, "tokens": []}


def tokenized_in_vain(asked: dict[str, Any]) -> dict[str, Any]:
    return {"count": 22, "max_model_len": 2048, "tokens": []}


def shown(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "parameters": 'num_keep    4\nnum_ctx                        4096\nstop    "x"',
        "model_info": {"llama.context_length": 131072},
    }


PROPS = {
    "default_generation_settings": {"n_ctx": 1024}, "total_slots": 4, "build_info": "b6000-abc",
}  # fmt: skip
INFO = {"version": "0.5.9", "max_running_requests": 32, "context_length": None,
        "max_req_input_len": 8186}  # fmt: skip

# the kind, what the engine says, and what is known then: capabilities, and the rest
SAID: dict[str, tuple[EngineKind, Mapping[str, Any], Mapping[str, bool], Mapping[str, Any]]] = {
    "paceline": (
        "paceline",
        {"/openapi.json": described(*FIELDS.values()), "/version": {"version": "0.1.0"}},
        {"token_ids": True, "resume": True, "continues": True},
        {"version": "0.1.0"},
    ),
    "paceline, older": (
        "paceline",
        {"/openapi.json": described("return_token_ids", "continue_final_message", inline=True)},
        {"token_ids": True, "resume": False, "continues": True},
        {},
    ),
    "vllm": (
        "vllm",
        {
            "/openapi.json": described("return_token_ids", "continue_final_message"),
            "/version": {"version": "0.32.0"},
        },
        {"token_ids": True, "resume": False, "continues": True},
        {"version": "0.32.0"},
    ),
    "vllm, without a description": (
        "vllm",
        {"/tokenize": tokenized, "/version": {"version": "0.32.0"}},
        {"continues": True},
        {"contexts": {"m": 2048}, "version": "0.32.0"},
    ),
    "vllm, that does not go on": (
        "vllm", {"/tokenize": tokenized_in_vain}, {"continues": False}, {"contexts": {"m": 2048}},
    ),
    "sglang": (
        "sglang",
        {"/openapi.json": described("continue_final_message"), "/get_server_info": INFO},
        {"token_ids": False, "resume": False, "continues": True},
        {"contexts": {"m": 8186}, "slots": 32, "version": "0.5.9"},
    ),
    "sglang, newer": (
        "sglang",
        {"/server_info": {**INFO, "context_length": 4096}},
        {},
        {"contexts": {"m": 4096}, "slots": 32, "version": "0.5.9"},
    ),
    "llama.cpp": (
        "llama.cpp",
        {"/props": PROPS, "/apply-template": template},
        {"continues": True},
        {"contexts": {"m": 1024}, "slots": 4, "version": "b6000-abc"},
    ),
    "llama.cpp, older": (
        "llama.cpp",
        {"/props": PROPS, "/apply-template": old_template},
        {"continues": False},
        {"contexts": {"m": 1024}, "slots": 4, "version": "b6000-abc"},
    ),
    "ollama": (
        "ollama",
        {"/api/version": {"version": "0.20.0"}, "/api/show": shown, "/api/ps": {"models": []}},
        {},
        {"contexts": {"m": 4096}, "version": "0.20.0"},
    ),
}  # fmt: skip


async def told(http: Any, name: str = "e1") -> dict[str, Any]:
    found: dict[str, Any] = (await http.get("/status")).json()["engines"][name]["capabilities"]
    return found


async def probed(gateway: Any, name: str = "e1") -> Any:
    engine = gateway.upstreams.by_name[name]
    await until(lambda: gateway.upstreams.is_probed(engine))
    return engine


@pytest.mark.parametrize("case", SAID)
async def test_what_each_kind_says(case: str) -> None:
    kind, pages, known, beside = SAID[case]
    async with (
        scripted(GOOD, pages=pages) as engine,
        gateway_over(configured(engine, kinds={"e1": kind})) as (gateway, http),
    ):
        facts = (await probed(gateway)).facts
        found = await told(http)
        assert found["probe"] == "answered"
        table = KINDS[kind]
        held = {"token_ids": table.resumes, "resume": table.resumes, "continues": table.continues}
        for capability, field in FIELDS.items():
            source = "engine" if capability in known else "kind"
            assert found[field] == {"can": known.get(capability, held[capability]), "from": source}
        assert facts.resumes == (known.get("resume", table.resumes))
        assert facts.continues == known.get("continues", table.continues)
        for name, wanted in {
            "contexts": {"m": None},
            "slots": None,
            "version": None,
            **beside,
        }.items():
            assert found[name] == wanted, name
        # nothing was generated for it
        assert not engine.bodies


@pytest.mark.parametrize("kind", ["paceline", "vllm", "sglang", "llama.cpp", "openai"])
async def test_who_says_nothing_leaves_the_kinds_table(kind: EngineKind) -> None:
    async with serving(GOOD, kinds={"e1": kind}) as (_, gateway, http):
        assert (await probed(gateway)).facts == KINDS[kind]
        found = await told(http)
        assert found["probe"] == "unanswered"
        assert {found[field]["from"] for field in FIELDS.values()} == {"kind"}
        # which is no outage
        one = gateway.upstreams.by_name["e1"]
        assert not one.num_misses and one.breaker_state(gateway.now()) == "closed"
        assert text_of(streamed(await http.post(CHAT, json=chat(stream=True)))) == "".join(WORDS)


async def test_nonsense_is_no_answer() -> None:
    pages = {
        "/openapi.json": {"paths": {CHAT: []}},
        "/version": [1],
        "/tokenize": {"count": "many", "max_model_len": -1},
    }
    async with (
        scripted(GOOD, pages=pages) as engine,
        gateway_over(configured(engine, kinds={"e1": "vllm"})) as (gateway, http),
    ):
        assert (await probed(gateway)).facts == KINDS["vllm"]
        assert (await told(http))["probe"] == "unanswered"


def refuses_both(asked: dict[str, Any]) -> tuple[int, Any]:
    """As engines do that know both fields; a chat of one token has ids."""
    if asked.get("continue_final_message") and asked.get("add_generation_prompt"):
        why = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        return 400, {"error": {"message": why}}
    ids = {"token_ids": [7]} if asked.get("return_token_ids") else {}
    return 200, {"choices": [{"index": 0, "message": {"content": "a"}, **ids}]}


def knows_neither(asked: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "message": {"content": "a"}}]}


def is_strict(asked: dict[str, Any]) -> tuple[int, Any]:
    unknown = sorted(set(asked) - {"model", "messages", "max_tokens"})
    why = f"Unrecognized request arguments supplied: {', '.join(unknown)}"
    return (400, {"error": {"message": why}}) if unknown else (200, {})


def is_busy(asked: dict[str, Any]) -> tuple[int, Any]:
    return 503, {"error": {"message": "both of continue_final_message are busy"}}


def is_too_small(asked: dict[str, Any]) -> tuple[int, Any]:
    return 400, {"error": {"message": "both messages are longer than the context of m"}}


@pytest.mark.parametrize(
    ("page", "known"),
    [
        (refuses_both, {"token_ids": True, "continues": True}),
        (knows_neither, {"token_ids": False, "continues": False}),
        (is_strict, {"token_ids": False, "continues": False}),
        (is_busy, {}),
        # it says nothing of the field
        (is_too_small, {}),
    ],
)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_what_is_not_said_can_be_tried(
    page: Any, known: Mapping[str, bool], kind: EngineKind
) -> None:
    fields = {"e1": {"probe": "try"}}
    async with (
        scripted(GOOD, pages={CHAT: page}) as engine,
        gateway_over(configured(engine, kinds={"e1": kind}, engine_fields=fields)) as (
            gateway,
            http,
        ),
    ):
        facts = (await probed(gateway)).facts
        found = await told(http)
        for capability, value in known.items():
            assert found[FIELDS[capability]] == {"can": value, "from": "tried"}
        assert found["probe"] == ("answered" if known else "unanswered")
        assert facts.continues == known.get("continues", KINDS[kind].continues)
        # ids alone are not resumed behind
        assert not facts.resumes
        assert engine.asked.count(CHAT) == 2


async def test_what_is_said_is_not_tried_and_nothing_is_unless_it_may_be() -> None:
    says = {"/openapi.json": described("continue_final_message"), CHAT: refuses_both}
    silent = {CHAT: refuses_both}
    for probe, pages, tried in (("try", says, 0), ("try", silent, 2), ("ask", silent, 0)):
        async with (
            scripted(GOOD, pages=pages) as engine,
            gateway_over(
                configured(engine, kinds={"e1": "vllm"}, engine_fields={"e1": {"probe": probe}})
            ) as (gateway, _),
        ):
            await probed(gateway)
            assert engine.asked.count(CHAT) == tried
            # once
            assert engine.asked.count("/openapi.json") == 1


async def test_who_is_not_to_be_asked_is_not() -> None:
    pages = {"/openapi.json": described("continue_final_message")}
    fields = {"e1": {"probe": "off"}}
    config_of = {"kinds": {"e1": "paceline"}, "engine_fields": fields, "poll_interval": 0.02}
    async with (
        scripted(GOOD, metrics=VLLM, pages=pages) as engine,
        gateway_over(configured(engine, **config_of)) as (gateway, http),
    ):
        one = gateway.upstreams.by_name["e1"]
        await until(lambda: one.num_polls > 4)
        assert (await told(http))["probe"] == "off" and not engine.asked
        assert one.facts == KINDS["paceline"]


def test_a_cloud_is_tried_nothing_on() -> None:
    for fields in ({"cloud": True}, {"kind": "anthropic"}):
        engine = EngineConfig(name="e1", url="https://a.example", probe="try", **fields)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a cloud charges for"):
            check_config(GatewayConfig(engines=(engine,)))


async def test_an_answer_decides_where_a_stream_goes_on() -> None:
    """Two engines of one kind, of which the second is too old to go on behind text."""
    broken = pieces(2, ids=False)
    for pages, resumed in (
        ({"/apply-template": template}, True),
        ({"/apply-template": old_template}, False),
    ):
        async with (
            scripted(broken) as one,
            scripted(Step(parts=chat_chunks(WORDS[2:], ids=False)), pages=pages) as two,
            gateway_over(
                configured(
                    one, two, kinds={"e1": "llama.cpp", "e2": "llama.cpp"}, resume_by_text=True
                )
            ) as (gateway, http),
        ):
            await probed(gateway, "e2")
            prefer_others(gateway, "e2")
            chunks = streamed(await http.post(CHAT, json=chat(stream=True)))
            assert len(two.bodies) == resumed
            error = [chunk for chunk in chunks if chunk != "[DONE]" and "error" in chunk]
            assert bool(error) is not resumed


async def test_who_comes_back_is_asked_again() -> None:
    """It may be another version; until it has said, its kind's table holds."""
    pages: dict[str, Any] = {"/openapi.json": described("return_token_ids", "resume_output_ids")}
    metrics = "vllm:num_requests_waiting 0.0\nvllm:num_requests_running 0.0\npaceline:ready 1.0\n"
    async with scripted(GOOD, metrics=metrics, pages=pages) as engine:
        config = configured(engine, poll_interval=0.02, poll_timeout=0.1)
        async with gateway_over(config) as (gateway, _):
            one = await probed(gateway)
            assert one.kind == "paceline" and one.facts.resumes and not one.facts.continues
            engine.frozen = True
            await until(lambda: one.num_misses > 5)
            pages["/openapi.json"] = described("continue_final_message")
            engine.frozen = False
            await until(lambda: one.facts.continues and not one.facts.resumes)
            assert engine.asked.count("/openapi.json") == 2
            # and one that the file says anew
            changed = configured(engine, engine_fields={"e1": {"max_concurrent": 9}})
            await gateway.reload(changed, gateway.keys)
            again = await probed(gateway)
            assert again is not one and not again.facts.resumes
            assert engine.asked.count("/openapi.json") == 3


async def test_who_starts_after_the_gateway_is_asked_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_MODEL_POLLS", 10)
    monkeypatch.setattr(registry, "_MAX_POLL_WAIT", 0.02)
    with bind("127.0.0.1", 0) as listener:
        later = Engine(port=listener.getsockname()[1])
    fields = {"e1": {"probe": "try", "models": ("m",)}, "e2": {"probe": "try"}}
    kinds: dict[str, EngineKind] = {"e1": "openai", "e2": "openai", "e3": "vllm"}
    config = configured(later, later, later, kinds=kinds, engine_fields=fields, poll_interval=0.02)
    async with gateway_over(config) as (gateway, http):
        await probed(gateway, "e1")
        assert (await told(http, "e1"))["probe"] == "unanswered"
        for name in ("e2", "e3"):
            assert (await told(http, name))["probe"] == "waiting"
        one, two = gateway.upstreams.by_name["e1"], gateway.upstreams.by_name["e2"]
        pages = {CHAT: refuses_both, "/openapi.json": described("continue_final_message")}
        async with scripted(GOOD, port=later.port, pages=pages):
            for name in kinds:
                engine = gateway.upstreams.by_name[name]
                await until(lambda engine=engine: engine.capabilities.continues)
            assert not two.trouble
        # one that is not polled shows by its list that it has gone, and takes requests all the same
        await until(lambda: two.trouble)
        assert not two.usable(gateway.now())
        async with scripted(GOOD, port=later.port, pages={CHAT: knows_neither}):
            await until(lambda: two.capabilities.continues is False)
            # one whose models the file names has no list to tell by: its connection was closed
            await until(lambda: one.capabilities.continues is False)


@pytest.mark.parametrize("most", [None, 512])
async def test_a_context_goes_with_the_engine_that_said_it(most: int | None) -> None:
    pages: dict[str, Any] = {"/get_server_info": INFO}
    async with scripted(GOOD, metrics="sglang:token_usage 0.1\n", pages=pages) as engine:
        config = configured(engine, kinds={"e1": "sglang"}, poll_timeout=0.1)
        async with gateway_over(config) as (gateway, http):
            one = await probed(gateway)
            assert (await told(http))["contexts"] == {"m": 8186}
            engine.frozen = True
            await until(lambda: one.num_misses > 5)
            del pages["/get_server_info"]
            engine.max_model_len = most
            engine.frozen = False
            await until(lambda: one.models["m"].max_model_len == most)
            await probed(gateway)
            assert (await told(http))["contexts"] == {"m": most}


async def test_reloads_come_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(GOOD, metrics=VLLM) as (engine, gateway, _):
        engine.frozen = True
        changed = [
            configured(engine, engine_fields={"e1": {"max_concurrent": most}}) for most in (8, 9)
        ]
        reloads = asyncio.gather(*(gateway.reload(each, gateway.keys) for each in changed))
        # the first waits for the engine
        await asyncio.sleep(0.1)
        assert not reloads.done()
        engine.frozen = False
        await reloads
        one = gateway.upstreams.by_name["e1"]
        assert one.config == changed[1].engines[0] == gateway.config.engines[0]
        before = one.num_polls
        await until(lambda: one.num_polls > before + 3 and not one.trouble)
    assert not [record for record in caplog.records if "failed" in record.message]


async def test_no_request_waits_for_it() -> None:
    """An engine that never says what it can do serves meanwhile, and is no less alive."""
    said = asyncio.Event()

    async def never(asked: dict[str, Any]) -> dict[str, Any]:
        await said.wait()
        return {}

    async with (
        scripted(WHOLE, pages={"/openapi.json": never}, metrics=VLLM) as engine,
        gateway_over(configured(engine)) as (gateway, http),
    ):
        assert (await http.post(CHAT, json=chat())).status_code == 200
        one = gateway.upstreams.by_name["e1"]
        await until(lambda: "/openapi.json" in engine.asked)
        polls = one.num_polls
        await until(lambda: one.num_polls > polls + 3)
        assert (await told(http))["probe"] == "under way" and not one.trouble
        said.set()
        await probed(gateway)
