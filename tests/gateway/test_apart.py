"""Prompts computed at one engine, answers made at another: Paceline's, vLLM's and SGLang's.

The engines are scripts; test_apart_live.py has real ones of Paceline. The transports of
vLLM (NIXL) and of SGLang need GPUs and are not run anywhere here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.errors import ConfigError
from paceline.gateway import EngineConfig, GatewayConfig, ModelConfig
from paceline.gateway.proxy.handing import bootstrap_of
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.config import PriceConfig, check_config
from paceline.gateway.settings.engines import PoolConfig, parse_members
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.keys import ApiKey
from tests.gateway.fault_server import PACELINE_METRICS, Engine, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    VLLM,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    prefer_others,
    refused,
    streamed,
    text_of,
    until,
)

KV = {"/version": {"version": "0.1.0", "kv": {"port": 5700, "fingerprint": "ab"}}}
OTHER_KV = {"/version": {"version": "0.1.0", "kv": {"port": 5700, "fingerprint": "cd"}}}
SGLANG = "sglang:num_queue_reqs 0.0\nsglang:num_running_reqs 0.0\nsglang:token_usage 0.1\n"
METRICS = {"paceline": PACELINE_METRICS, "vllm": VLLM.replace("0.9", "0.1"), "sglang": SGLANG}
# the first token, and then nothing until the stream is taken away
FIRST = Step(parts=chat_chunks(WORDS)[:2], then="stall")
REST = Step(parts=chat_chunks(WORDS[1:], first_id=1, created=2))
PARAMS = {"remote_engine_id": "p-1", "remote_block_ids": [[1, 2]], "remote_port": 5600}


def whole(**more: Any) -> Step:
    usage: dict[str, Any] = {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}
    usage["prompt_tokens_details"] = {"cached_tokens": more.pop("cached", 0)}
    message = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}
    body = {"id": "x", "model": "m", "choices": [message], "usage": usage, **more}
    return Step(parts=(json.dumps(body).encode(),), stream=False)


@asynccontextmanager
async def apart(
    prompts: list[Step], outputs: list[Step], kind: str = "paceline", **fields: Any
) -> AsyncIterator[tuple[list[Engine], list[Engine], Any, httpx.AsyncClient]]:
    """Engines with roles and a gateway before them, whose engines for outputs look busy."""
    pages = fields.pop("pages", [KV] * 9)
    extra = fields.pop("engine_fields", {})
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                scripted(step, metrics=METRICS[kind], pages=pages[i] if kind == "paceline" else {})
            )
            for i, step in enumerate([*prompts, *outputs])
        ]
        names = [f"e{number}" for number in range(1, len(engines) + 1)]
        roles = ["prompts"] * len(prompts) + ["outputs"] * len(outputs)
        config = configured(
            *engines,
            kinds=dict.fromkeys(names, kind),
            engine_fields={
                name: {"role": role, **extra.get(name, {})}
                for name, role in zip(names, roles, strict=True)
            },
            **{"split_above": 1, **fields.pop("config", {})},
        )
        gateway, client = await stack.enter_async_context(gateway_over(config, **fields))
        found = gateway.upstreams
        await until(lambda: all(found.is_probed(e) and e.models for e in found.by_name.values()))
        for name, role in zip(names, roles, strict=True):
            if role == "outputs":
                prefer_others(gateway, name)
        yield engines[: len(prompts)], engines[len(prompts) :], gateway, client


async def handed(client: httpx.AsyncClient) -> dict[str, int]:
    """Counts of prompts that were to be computed elsewhere, by result."""
    counts: dict[str, int] = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith("paceline:gateway_handed_total{"):
            result = line.partition('result="')[2].partition('"')[0]
            counts[result] = counts.get(result, 0) + round(float(line.split()[-1]))
    return counts


# ---------------------------------------------------------------------- Paceline


async def test_a_stream_goes_on_at_an_engine_for_outputs() -> None:
    async with apart([FIRST], [REST]) as ([p], [d], gateway, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        chunks = streamed(answer)
        assert text_of(chunks) == "".join(WORDS)
        assert "resume_output_ids" not in p.bodies[0] and p.bodies[0].get("max_tokens") is None
        assert d.bodies[0]["resume_output_ids"] == [0]
        assert d.bodies[0]["kv_source"] == {"url": "tcp://127.0.0.1:5700", "fingerprint": "ab"}
        # the seed of both, or the rest would be another answer's
        assert d.bodies[0]["seed"] == p.bodies[0]["seed"]
        assert answer.headers["x-paceline-engine"] == "e1"
        note = next(c["paceline"] for c in chunks if c != "[DONE]" and "paceline" in c)
        assert note["prompt_engine"] == "e1" and note["engine"] == "e2" and "resumed" not in note
        assert await handed(client) == {"handed": 1}
        told = (await client.get("/metrics")).text
        assert 'gateway_moved_total{engine="e1"' not in told
        await until(lambda: p.hung_up == 1)
        # what D's first token took is not what prompts take there, and a gap was learned
        assert gateway.upstreams.by_name["e2"].load.num_first == 0
        assert gateway._picker.hand_overs.gap(1000.0) > 0.0
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        assert is_clean(gateway)


@pytest.mark.parametrize(
    ("config", "pages", "body"),
    [
        # a short prompt; no KV port; KV that the other engine cannot use; one token
        ({"split_above": 500}, [KV, KV], {}),
        ({}, [{}, KV], {}),
        ({}, [KV, {}], {}),
        ({}, [KV, OTHER_KV], {}),
        ({}, [KV, KV], {"max_tokens": 1}),
        # the caller resumes itself, so nothing may be added
        ({}, [KV, KV], {"resume_output_ids": [1]}),
    ],
)
async def test_a_request_stays_whole(
    config: dict[str, Any], pages: list[Any], body: dict[str, Any]
) -> None:
    async with apart([FIRST], [GOOD], config=config, pages=pages) as ([p], [d], _, client):
        answer = await client.post(CHAT, json=chat(stream=True, **body))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert not p.bodies and "kv_source" not in d.bodies[0]
        assert not await handed(client)


async def test_an_engine_for_prompts_that_is_full_gets_none() -> None:
    limit = {"e1": {"max_concurrent": 1}}
    async with apart([FIRST], [GOOD], engine_fields=limit) as ([p], [d], gateway, client):
        gateway.upstreams.by_name["e1"].load.running.add(object())
        await client.post(CHAT, json=chat(stream=True))
        assert not p.bodies and d.bodies


async def test_an_idle_engine_computes_its_prompts_itself() -> None:
    async with apart([FIRST], [GOOD]) as ([p], [d], gateway, client):
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        await client.post(CHAT, json=chat(stream=True))
        assert not p.bodies and d.bodies


async def test_a_caller_may_forbid_it() -> None:
    async with apart([FIRST], [GOOD]) as ([p], [d], _, client):
        headers = {"x-paceline-allow": "retry"}
        await client.post(CHAT, json=chat(stream=True), headers=headers)
        assert not p.bodies and d.bodies


@pytest.mark.parametrize("why", ["drained", "full", "pressed"])
async def test_without_room_the_stream_stays(why: str) -> None:
    # so that the engine for outputs is full when the first token comes
    late = Step(parts=chat_chunks(WORDS), gap=0.05, delay=0.1)
    limit = {"e2": {"max_concurrent": 1}}
    async with apart([late], [GOOD], engine_fields=limit) as ([p], [d], gateway, client):
        e2 = gateway.upstreams.by_name["e2"]

        async def occupy() -> None:
            await until(lambda: bool(p.bodies))
            if why == "drained":
                e2.drain(on=True, now=0.0)
            elif why == "pressed":
                e2.load.pressed, e2.load.heard = True, lambda _: None
            else:
                e2.load.running.add(object())

        task = asyncio.ensure_future(occupy())
        answer = await client.post(CHAT, json=chat(stream=True))
        await task
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert not d.bodies and await handed(client) == {"stayed": 1}


@pytest.mark.parametrize(
    "fails", [Step(parts=chat_chunks(WORDS)[:1], then="cut"), refused(503), refused(500)]
)
async def test_an_engine_that_fails_before_its_first_token_is_replaced(fails: Step) -> None:
    async with apart([fails], [GOOD]) as ([p], [d], _, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert len(p.bodies) == 1 and "resume_output_ids" not in d.bodies[0]


@pytest.mark.parametrize("fails", [refused(503), Step(parts=REST.parts[:2], then="cut")])
async def test_a_stream_that_fails_behind_its_hand_over_goes_on_anywhere(fails: Step) -> None:
    async with apart([FIRST], [fails, GOOD]) as ([p], [d, other], gateway, client):
        prefer_others(gateway, "e3")
        words = len(chat_chunks(WORDS)) and (1 if fails.status == 503 else 2)
        rest = Step(parts=chat_chunks(WORDS[words:], first_id=words, created=3))
        p.script.append(rest)
        p.script[0:1] = [FIRST]
        other.script[:] = [rest]
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        last = (p.bodies[1:] + other.bodies)[0]
        assert last["resume_output_ids"] == list(range(words)) and len(d.bodies) == 1


async def test_a_whole_answer_is_made_behind_a_prompt_computed_elsewhere() -> None:
    price = PriceConfig(input="2", output="0", cached_input="0")
    keys = (ApiKey.of("ann", "user", "secret-ann-0123"), ApiKey.of("r", "admin", "secret-root-012"))
    over: dict[str, Any] = {"keys": keys, "config": {"prices": (price,), "spend_storage": ""}}
    async with apart([whole(cached=3)], [whole(cached=8)], **over) as ([p], [d], _, client):
        client.headers["Authorization"] = "Bearer secret-ann-0123"
        body = chat(max_completion_tokens=9, n=2, min_tokens=4)
        answer = await client.post(CHAT, json=body)
        assert answer.headers["x-paceline-prompt-engine"] == "e1"
        assert answer.json()["paceline"]["prompt_engine"] == "e1"
        asked = p.bodies[0]
        assert (asked["max_tokens"], asked["max_completion_tokens"]) == (1, 1)
        assert asked["stream"] is False and not {"n", "min_tokens", "kv_source"} & set(asked)
        assert d.bodies[0]["kv_source"]["url"] == "tcp://127.0.0.1:5700" and d.bodies[0]["n"] == 2
        assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"]
        client.headers["Authorization"] = "Bearer secret-root-012"
        text = (await client.get("/metrics")).text
        (spent,) = [line for line in text.splitlines() if "gateway_spend_today{" in line]
        # 8 tokens less the 3 that were cached where they were computed, at 2 for a million
        assert float(spent.split()[-1]) == pytest.approx(1e-5), spent


# ---------------------------------------------------------------------- vLLM


async def test_vllm_hands_opaque_parameters_over_once() -> None:
    computed = whole(kv_transfer_params=PARAMS)
    async with apart([computed], [refused(503), GOOD], "vllm") as (
        [p],
        [d, other],
        gateway,
        client,
    ):
        prefer_others(gateway, "e3")
        body = chat(stream=True, stream_options={"include_usage": True}, min_tokens=2)
        answer = await client.post(CHAT, json={**body, "max_tokens": 50})
        assert text_of(streamed(answer)) == "".join(WORDS)
        asked = p.bodies[0]
        assert asked["max_tokens"] == 1 and asked["stream"] is False
        assert not {"stream_options", "min_tokens", "max_completion_tokens"} & set(asked)
        assert asked["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        first, second = (d, other) if d.bodies[0].get("kv_transfer_params") else (other, d)
        assert first.bodies[0]["kv_transfer_params"] == PARAMS
        assert first.bodies[0]["max_tokens"] == 50 and first.bodies[0]["stream"] is True
        for later in (*first.bodies[1:], *second.bodies, *p.bodies[1:]):
            # another prompt may be computed for it; these parameters are not sent again
            assert later.get("kv_transfer_params", {}).get("remote_port") in (None, 5600)
        assert p.headers[0]["x-request-id"] == first.headers[0]["x-request-id"]


@pytest.mark.parametrize(
    "fails",
    [
        refused(500), refused(400), whole(), whole(kv_transfer_params=None),
        Step(raw=b""), Step(parts=(b"no JSON",), stream=False),
    ],
)  # fmt: skip
async def test_vllm_computes_where_no_parameters_came(fails: Step) -> None:
    async with apart([fails], [GOOD], "vllm") as ([p], [d], gateway, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert p.bodies and "kv_transfer_params" not in d.bodies[0]
        assert await handed(client) == {"failed": 1}
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        assert is_clean(gateway)


@pytest.mark.parametrize("body", [{"n": 2}, {"max_tokens": 1}])
async def test_vllm_blocks_are_pulled_once(body: dict[str, Any]) -> None:
    async with apart([whole()], [whole()], "vllm") as ([p], [d], _, client):
        assert (await client.post(CHAT, json=chat(**body))).status_code == 200
        assert not p.bodies and len(d.bodies) == 1


async def test_a_caller_that_leaves_ends_the_prompt() -> None:
    async with apart([Step(delay=30.0)], [GOOD], "vllm") as ([p], [d], gateway, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=chat(stream=True), timeout=0.3)
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        await until(lambda: is_clean(gateway))
        assert len(p.bodies) == 1 and not d.bodies


async def test_a_caller_that_leaves_pays_for_the_prompt() -> None:
    price = PriceConfig(input="2", output="0")
    keys = (ApiKey.of("ann", "user", "secret-ann-0123"), ApiKey.of("r", "admin", "secret-root-012"))
    over: dict[str, Any] = {"keys": keys, "config": {"prices": (price,), "spend_storage": ""}}
    async with apart([Step(delay=30.0)], [GOOD], "vllm", **over) as ([p], _, gateway, client):
        client.headers["Authorization"] = "Bearer secret-ann-0123"
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=chat(stream=True), timeout=0.3)
        await until(lambda: gateway.in_flight == 0)
        client.headers["Authorization"] = "Bearer secret-root-012"
        text = (await client.get("/metrics")).text
        (spent,) = [line for line in text.splitlines() if "gateway_spend_today{" in line]
        assert len(p.bodies) == 1 and float(spent.split()[-1]) > 0.0


# ---------------------------------------------------------------------- SGLang


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_asks_both_at_once(stream: bool) -> None:
    step = GOOD if stream else whole()
    fields = {"e1": {"bootstrap_port": 9001}}
    async with apart([step], [step], "sglang", engine_fields=fields) as ([p], [d], _, client):
        answer = await client.post(CHAT, json=chat(stream=stream, max_tokens=20))
        assert answer.status_code == 200
        told = p.bodies[0]
        assert told["bootstrap_host"] == "127.0.0.1" and told["bootstrap_port"] == 9001
        assert 0 <= told["bootstrap_room"] < 1 << 63
        # the same body, so the same room
        assert p.bodies == d.bodies and told["max_tokens"] == 20
        await client.post(CHAT, json=chat(stream=stream))
        assert p.bodies[1]["bootstrap_room"] != told["bootstrap_room"]
        assert await handed(client) == {"handed": 2}


async def test_sglang_goes_to_another_pair_where_a_prompt_is_lost() -> None:
    """The engine for outputs would wait for its prompt for minutes."""
    waits = Step(delay=60.0)
    async with apart([refused(500), GOOD], [waits], "sglang") as (prompts, [d], gateway, client):
        prefer_others(gateway, "e2")
        d.script.append(GOOD)
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        rooms = [each["bootstrap_room"] for each in d.bodies]
        assert len(rooms) == len(set(rooms)) == 2
        assert [len(each.bodies) for each in prompts] == [1, 1]
        assert await handed(client) == {"failed": 1, "handed": 1}


async def test_sglang_refuses_what_both_refuse() -> None:
    late = Step(status=400, parts=refused(400).parts, stream=False, delay=0.1)
    async with apart([refused(400)], [late], "sglang") as ([p], _, gateway, client):
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 400 and "no: 400" in answer.text
        assert len(p.bodies) == 1
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        await until(lambda: is_clean(gateway))


async def test_sglang_refuses_what_one_refuses() -> None:
    """The engine for outputs would wait for its prompt for minutes."""
    async with apart([refused(400)], [Step(delay=60.0)], "sglang") as (_, [d], gateway, client):
        answer = await client.post(CHAT, json=chat(), timeout=5.0)
        assert answer.status_code == 400 and "no: 400" in answer.text
        assert await handed(client) == {"failed": 1} and len(d.bodies) <= 1
        gateway.upstreams.by_name["e2"].load.prefill_tokens -= 1e6
        await until(lambda: is_clean(gateway))


async def test_sglang_has_no_hedge_without_a_prompt() -> None:
    late = replace(GOOD, delay=0.6)
    hedged = {"hedge_share": 0.5, "hedge_after": 0.1}
    async with apart([late], [late, late], "sglang", config=hedged) as (_, outputs, gateway, http):
        for upstream in gateway.upstreams.by_name.values():
            for _ in range(64):
                upstream.load.latency.saw_first(10.0, 0, 0.0, 0.02)
            upstream.load.prefill_tokens = 0.0
        gateway.hedges._saved = 5.0
        answer = await http.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        bodies = [body for engine in outputs for body in engine.bodies]
        assert len(bodies) == 1 and "bootstrap_room" in bodies[0]


async def test_room_for_prompts_is_none_for_answers_of_sglang() -> None:
    limits = {"e1": {"max_concurrent": 8}, "e2": {"max_concurrent": 1}}
    step = replace(GOOD, delay=0.1)
    async with apart([step], [step], "sglang", engine_fields=limits) as (_, [d], gateway, client):
        calls = [asyncio.ensure_future(client.post(CHAT, json=chat(stream=True))) for _ in range(3)]
        await until(lambda: len(d.bodies) == 1 and gateway.flow_control.num_waiting == 2)
        for answer in await asyncio.gather(*calls):
            assert text_of(streamed(answer)) == "".join(WORDS)


async def test_a_model_of_long_prompts_hears_nothing_of_a_pair() -> None:
    words = b'{"error":{"message":"the maximum context length is 10 tokens","code":400}}'
    long = Step(status=400, parts=(words,), stream=False)
    models = (
        ModelConfig(name="chat", tiers=(("e1:m", "e2:m"),), length_over={"100000": "long"}),
        ModelConfig(name="long", tiers=(("e3:m",),)),
    )
    fields: dict[str, Any] = {
        "engine_fields": {"e3": {"role": "both"}}, "config": {"models": models},
    }  # fmt: skip
    async with apart([long], [long, GOOD], "sglang", **fields) as ([p], [_, other], _, client):
        answer = await client.post(CHAT, json=chat(model="chat", stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
        assert len(p.bodies) == 1 and "bootstrap_room" not in other.bodies[0]


async def test_sglang_without_engines_for_prompts_is_unavailable() -> None:
    async with apart([GOOD], [GOOD], "sglang") as ([p], [d], gateway, client):
        gateway.upstreams.by_name["e1"].drain(on=True, now=0.0)
        assert (await client.post(CHAT, json=chat())).status_code == 503
        gateway.upstreams.by_name["e1"].drain(on=False, now=0.0)
        gateway.upstreams.by_name["e2"].drain(on=True, now=0.0)
        # nor does the one for prompts answer alone
        assert (await client.post(CHAT, json=chat())).status_code == 503
        assert not p.bodies and not d.bodies


def test_a_bootstrap_host_of_ipv6_has_brackets() -> None:
    config = EngineConfig(name="p", url="http://[fd00::7]:30000", kind="sglang", role="prompts")
    endpoint = Endpoint(Upstream(config, GatewayConfig(engines=(config,)), 0.0), "m", 0)
    told = bootstrap_of(endpoint)
    assert told["bootstrap_host"] == "[fd00::7]" and told["bootstrap_port"] == 8998


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"]
)
async def test_callers_name_no_place_of_a_prompt(name: str) -> None:
    async with apart([GOOD], [GOOD], "vllm") as ([p], [d], _, client):
        answer = await client.post(CHAT, json=chat(**{name: {"remote_host": "10.0.0.1"}}))
        assert answer.status_code == 400 and f"{name} is not taken from callers" in answer.text
        assert not p.bodies and not d.bodies


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kind": "ollama", "role": "prompts"}, "role prompts is for kinds paceline, vllm, sglang"),
        ({"kind": "sglang", "bootstrap_port": 70000}, "1 to 65535, got 70000"),
    ],
)
def test_wrong_roles(fields: dict[str, Any], why: str) -> None:
    config = GatewayConfig(engines=(EngineConfig(name="a", url="http://a", **fields),))
    with pytest.raises(ConfigError, match=why):
        check_config(config)


def test_a_pool_says_roles() -> None:
    engine = {"name": "p", "url": "http://p", "kind": "sglang", "role": "prompts"}
    word = {"epoch": 1, "version": 1, "engines": [{**engine, "bootstrap_port": 9}]}
    pool = PoolConfig(name="chat")
    (member,) = parse_members(json.dumps(word).encode(), pool).configs(pool).values()
    assert (member.role, member.bootstrap_port) == ("prompts", 9)
