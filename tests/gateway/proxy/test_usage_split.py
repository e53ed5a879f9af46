"""Who is charged for what, where requests are given up, go on elsewhere and are asked twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from paceline.gateway.settings.config import PriceConfig
from paceline.gateway.settings.prices import show_amount
from paceline.gateway.streams.usage import text_bytes, used_by
from tests.gateway.billing.test_spending import ANN, AS_ANN, AS_BOB, BOB, spending
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WORDS,
    chat,
    configured,
    gateway_over,
    pieces,
    streamed,
    text_of,
    until,
)
from tests.gateway.proxy.test_hedging import HEDGED, LATE, OTHER, _known
from tests.gateway.upstreams.dialects.samples import ANTHROPIC_WHOLE

MILLIONTH = 10**6
# a million tokens of prompt, and of output, cost so much
PRICES = (
    PriceConfig(engine="e1", input=10, output=100, request="0.5"),
    PriceConfig(engine="e2", input=20, output=1000, request="0.25"),
)
EMBEDDINGS = "/v1/embeddings"


def rows(tmp_path: Path) -> list[tuple[Any, ...]]:
    """Of the file: engine, requests, tokens of prompt and output, amount."""
    with contextlib.closing(sqlite3.connect(tmp_path / "spend.sqlite")) as database:
        return list(
            database.execute(
                "SELECT engine, requests, prompt_tokens, output_tokens, amount FROM spend "
                "ORDER BY engine"
            )
        )


@pytest.mark.parametrize(
    ("path", "stream", "ids"),
    [(CHAT, True, True), (CHAT, True, False), (CHAT, False, False), (EMBEDDINGS, False, False)],
)
async def test_who_hangs_up_before_a_word_pays_for_the_prompt(
    tmp_path: Path, path: str, stream: bool, ids: bool
) -> None:
    begun = chat_chunks(WORDS, ids=ids)[:1] if stream else (b"{",)
    body = chat(stream=stream) if path == CHAT else {"model": "m", "input": "word " * 40}
    async with (
        scripted(Step(parts=begun, stream=stream, then="stall"), metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, **spending(tmp_path)), (ANN,)) as (gateway, client),
    ):
        sent = asyncio.ensure_future(client.post(path, json=body, headers=AS_ANN))
        await until(lambda: bool(one.bodies))
        if ids:
            (attempt,) = gateway.upstreams.by_name["e1"].running
            await until(lambda: attempt._owner.relay.prompt_tokens == 3)  # type: ignore[attr-defined]
        sent.cancel()
        await until(lambda: gateway.in_flight == 0)
        shown = body["messages"] if path == CHAT else body["input"]
        estimate = round(len(json.dumps(shown, separators=(",", ":"))) / 4)
        # of the prompt, as the engine counted it or as many as its bytes are
        prompt = 3 if ids else estimate
        spent = gateway.spending.status()["ann"]["spent"]
        assert spent == show_amount(prompt * 10 * MILLIONTH) and prompt


async def test_who_hangs_up_before_an_engine_was_told_pays_nothing(tmp_path: Path) -> None:
    stall = Step(parts=(b"{",), stream=False, then="stall")
    fields = {"e1": {"max_concurrent": 1}}
    async with (
        scripted(stall, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, engine_fields=fields, **spending(tmp_path)), (ANN, BOB)) as (
            gateway,
            client,
        ),
    ):
        first = asyncio.ensure_future(client.post(CHAT, json=chat(), headers=AS_BOB))
        await until(lambda: bool(one.bodies))
        second = asyncio.ensure_future(client.post(CHAT, json=chat(), headers=AS_ANN))
        await until(lambda: gateway.flow_control.num_waiting == 1)
        second.cancel()
        await until(lambda: gateway.in_flight == 1)
        first.cancel()
        await until(lambda: gateway.in_flight == 0)
        assert set(gateway.spending.status()) == {"bob"}


async def test_every_engine_is_paid_for_what_it_made(tmp_path: Path) -> None:
    rest = Step(parts=chat_chunks(WORDS[2:], first_id=2))
    async with (
        scripted(pieces(2), metrics=PACELINE_METRICS) as dies,
        scripted(rest, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(dies, lives, **spending(tmp_path, prices=PRICES)), (ANN,)) as (
            gateway,
            client,
        ),
    ):
        gateway.upstreams.by_name["e2"].load.prefill_tokens += 1e6
        told = streamed(await client.post(CHAT, json=chat(stream=True), headers=AS_ANN))
        assert text_of(told) == "".join(WORDS) and len(lives.bodies) == 1
    half = 10**12 // 2
    assert rows(tmp_path) == [
        # the prompt and the request once, where it began
        ("e1", 1, 3, 2, half + (3 * 10 + 2 * 100) * MILLIONTH),
        ("e2", 0, 0, 3, 3 * 1000 * MILLIONTH),
    ]


async def test_what_goes_on_behind_text_is_counted_in_all(tmp_path: Path) -> None:
    def part(words: tuple[str, ...], prompt: int) -> tuple[bytes, ...]:
        """As an engine says it that knows of what came before as a part of its prompt."""
        parts = chat_chunks(words, ids=False)
        counts = {"prompt_tokens": prompt, "completion_tokens": len(words), "total_tokens": 99}
        told = {"id": "chat-1", "created": 1, "model": "m", "choices": [], "usage": counts}
        return (*parts[:-2], b"data: " + json.dumps(told).encode() + b"\n\n", parts[-1])

    vllm = PACELINE_METRICS.replace("paceline:ready 1.0\n", "")
    fields = spending(tmp_path, prices=PRICES, resume_by_text=True)
    async with (
        scripted(Step(parts=part(WORDS, 7)[:3], then="cut"), metrics=vllm) as dies,
        scripted(Step(parts=part(WORDS[2:], 9)), metrics=vllm) as lives,
        gateway_over(configured(dies, lives, **fields), (ANN,)) as (gateway, client),
    ):
        gateway.upstreams.by_name["e2"].load.prefill_tokens += 1e6
        told = streamed(await client.post(CHAT, json=chat(stream=True), headers=AS_ANN))
        assert text_of(told) == "".join(WORDS)
    assert [row[:4] for row in rows(tmp_path)] == [("e1", 1, 7, 2), ("e2", 0, 0, 3)]


async def test_who_wins_a_hedge_is_credited(tmp_path: Path) -> None:
    fields = {**HEDGED, **spending(tmp_path, prices=PRICES)}
    async with (
        scripted(LATE, metrics=PACELINE_METRICS) as late,
        scripted(OTHER, metrics=PACELINE_METRICS) as quick,
        gateway_over(configured(late, quick, **fields), (ANN,)) as (gateway, client),
    ):
        _known(gateway)
        answer = await client.post(CHAT, json=chat(stream=True), headers=AS_ANN)
        assert answer.headers["x-paceline-engine"] == "e2"
        told = gateway.metrics.render(gateway.upstreams.by_name.values(), 0, gateway.now())
        for name in (
            'requests_total{engine="%s",result="ok"} 1',
            'time_to_first_token_seconds_count{engine="%s"} 1',
            'request_seconds_count{engine="%s"} 1',
        ):
            assert f"paceline:gateway_{name % 'e2'}" in told
            assert f"paceline:gateway_{name % 'e1'}" not in told
    quarter = 10**12 // 4
    assert rows(tmp_path) == [("e2", 1, 3, 5, quarter + (3 * 20 + 5 * 1000) * MILLIONTH)]


async def test_who_hangs_up_while_two_are_asked_pays_the_first(tmp_path: Path) -> None:
    silent = Step(parts=chat_chunks(WORDS)[:1], then="stall")
    fields = {**HEDGED, **spending(tmp_path, prices=PRICES)}
    async with (
        scripted(silent, metrics=PACELINE_METRICS) as one,
        scripted(silent, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two, **fields), (ANN,)) as (gateway, client),
    ):
        _known(gateway)
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True), headers=AS_ANN))
        await until(lambda: len(one.bodies) + len(two.bodies) == 2)
        sent.cancel()
        await until(lambda: gateway.in_flight == 0)
    half = 10**12 // 2
    assert rows(tmp_path) == [("e1", 1, 3, 0, half + 3 * 10 * MILLIONTH)]


async def test_what_was_tried_in_vain_is_free_for_who_hangs_up_later(tmp_path: Path) -> None:
    """A request between two engines is at none of them."""
    refuses = Step(status=503, headers=(("retry-after", "3"),), parts=(b"{}",), stream=False)
    async with (
        scripted(refuses, GOOD, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, **spending(tmp_path)), (ANN,)) as (gateway, client),
    ):
        sent = asyncio.ensure_future(client.post(CHAT, json=chat(), headers=AS_ANN))
        await until(lambda: bool(one.bodies))
        sent.cancel()
        await until(lambda: gateway.in_flight == 0)
        assert "ann" not in gateway.spending.status()


async def test_a_whole_answer_to_a_request_for_a_stream_is_charged(tmp_path: Path) -> None:
    answer = {"object": "list", "data": [], "usage": {"prompt_tokens": 40, "total_tokens": 40}}
    whole = Step(parts=(json.dumps(answer).encode(),), stream=False)
    async with (
        scripted(whole, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, **spending(tmp_path)), (ANN,)) as (_, client),
    ):
        body = {"model": "m", "input": "word " * 40, "stream": True}
        assert (await client.post(EMBEDDINGS, json=body, headers=AS_ANN)).status_code == 200
    ((_, requests, prompt, output, _amount),) = rows(tmp_path)
    assert (requests, prompt, output) == (1, 40, 0)


async def test_a_role_without_an_answer_costs_nothing(tmp_path: Path) -> None:
    begun = chat_chunks(WORDS, ids=True)[:1]
    dies = Step(parts=begun, stream=True, then="cut")
    async with (
        scripted(dies, metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one, **spending(tmp_path)), (ANN,)) as (_, client),
    ):
        answer = await client.post(CHAT, json=chat(stream=True), headers=AS_ANN)
        assert "no engine answered" in answer.text
    assert rows(tmp_path) == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
async def test_absurd_counts_of_an_anthropic_engine_are_not_believed(
    tmp_path: Path, path: str, stream: bool
) -> None:
    """However they are told, no count is below nothing or beyond what can be."""
    usage = {
        "input_tokens": -5, "cache_read_input_tokens": 10**12, "output_tokens": 10**15,
        "cache_creation_input_tokens": 10**12,
    }  # fmt: skip
    message = {**ANTHROPIC_WHOLE, "usage": usage}
    events = [
        {"type": "message_start", "message": {**message, "content": []}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "hi"},
        },
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    parts = [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
    whole = Step(parts=(json.dumps(message).encode(),), stream=False)
    fields = {"kinds": {"e1": "anthropic"}, "engine_fields": {"e1": {"models": ("m",)}}}
    async with (
        scripted(Step(parts=tuple(parts)) if stream else whole) as one,
        gateway_over(configured(one, **fields, **spending(tmp_path)), (ANN,)) as (_, client),
    ):
        answer = await client.post(path, json=chat(stream=stream), headers=AS_ANN)
        assert answer.status_code == 200, answer.text
        if path == CHAT:
            asked = chat(stream=stream, stream_options={"include_usage": True})
            answer = await client.post(path, json=asked, headers=AS_ANN)
            told = streamed(answer)[-2] if stream else answer.json()
            assert told["usage"]["prompt_tokens"] == told["usage"]["completion_tokens"] == 10**9
    ((_, requests, prompt, output, amount),) = rows(tmp_path)
    assert (prompt, output) == (requests * 10**9, requests * 10**9)
    # all of the prompt was cached
    assert amount == requests * 10**9 * (1 + 100) * MILLIONTH


async def test_a_body_nested_without_end_has_no_usage() -> None:
    body = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert used_by(CHAT, body) is None and text_bytes(body) == 0
