"""A stream that goes on elsewhere takes its KV along; callers do not say where that is from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
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

REST = Step(parts=chat_chunks(WORDS[2:], first_id=2, created=2))
KV = {"/version": {"version": "0.1.0", "kv": {"port": 5700, "fingerprint": "ab"}}}
NONE = {"/version": {"version": "0.1.0"}}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (KV, KV, {"url": "tcp://127.0.0.1:5700", "fingerprint": "ab"}),
        (NONE, KV, None),
        (KV, NONE, None),
    ],
)
async def test_it_goes_on_with_its_blocks(before: Any, after: Any, told: Any) -> None:
    async with (
        scripted(pieces(2), metrics=PACELINE_METRICS, pages=before) as dies,
        scripted(REST, metrics=PACELINE_METRICS, pages=after) as lives,
        gateway_over(configured(dies, lives)) as (gateway, client),
    ):
        engines = list(gateway.upstreams.by_name.values())
        await until(lambda: all(gateway.upstreams.is_probed(each) for each in engines))
        prefer_others(gateway, "e2")
        answer = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(answer) == "".join(WORDS)
        assert lives.bodies[0]["resume_output_ids"] == [0, 1]
        assert lives.bodies[0].get("kv_source") == told
        assert "kv_source" not in dies.bodies[0]


async def test_an_engine_that_is_gone_is_not_asked() -> None:
    async with (
        scripted(GOOD, metrics=PACELINE_METRICS, pages=KV) as engine,
        gateway_over(configured(engine)) as (gateway, _),
    ):
        (upstream,) = gateway.upstreams.by_name.values()
        await until(lambda: gateway.upstreams.is_probed(upstream))
        assert upstream.kv_source is not None
        engine.frozen = True
        await until(lambda: upstream.kv_source is None)


async def test_callers_name_no_source() -> None:
    async with serving(GOOD, metrics=PACELINE_METRICS) as (engine, _, client):
        source = {"url": "tcp://10.0.0.1:1", "fingerprint": "ab"}
        for name in ("kv_source", "kv\\u005fsource"):
            body = b'{"model":"m","messages":[],"%s":%s}' % (name.encode(), str(source).encode())
            refused = await client.post(CHAT, content=body.replace(b"'", b'"'))
            assert refused.status_code == 400 and "not taken from callers" in refused.text
        assert not engine.bodies
