"""A gateway before engines that answer, refuse, fall silent and die."""

import asyncio
import gc
import json
from typing import Any

import pytest

from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.placement import Placement
from paceline.gateway.proxy.proxied_request import ProxiedRequest
from paceline.gateway.proxy.response import Response
from paceline.gateway.proxy.upstream_request import UpstreamRequest
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    is_clean,
    pieces,
    prefer_others,
    refused,
    serving,
    streamed,
    text_of,
    until,
)


async def test_an_answer_comes_through_as_it_is() -> None:
    async with serving(GOOD) as (engine, _, client):
        response = await client.post(CHAT, json=chat(stream=True, top_k=5, odd=[1]))
        told = streamed(response)
        assert text_of(told) == "".join(WORDS) and told[-1] == "[DONE]"
        assert response.headers["x-paceline-engine"] == "e1"
        # fields that the gateway does not know go through; the caller asked for no usage
        assert engine.bodies[0]["top_k"] == 5 and engine.bodies[0]["odd"] == [1]
        assert not any(chunk["choices"] == [] for chunk in told[:-1])
        engine.script[:] = [WHOLE]
        answer = await client.post(CHAT, json=chat())
        assert answer.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("fails", [(), (pieces(0),), (refused(503), refused(503))])
async def test_a_request_is_no_work_for_the_garbage_collector(
    stream: bool, fails: tuple[Step, ...]
) -> None:
    """What is left of one is found free at once: nothing of it points in circles."""
    good, kinds = (
        GOOD if stream else WHOLE,
        {ProxiedRequest, Response, UpstreamRequest, Attempt, Placement},
    )

    def left() -> list[str]:
        # not isinstance: some modules' objects warn when they are asked for their class
        return [type(each).__name__ for each in gc.get_objects() if type(each) in kinds]

    async with serving([*fails[:1], good], [*fails[1:], good]) as (_, _, gateway, client):
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await client.post(CHAT, json=chat(stream=stream))
            await until(lambda: is_clean(gateway) and not left())
        finally:
            gc.enable()


@pytest.mark.parametrize("size", [100, 70_000])
async def test_a_stream_that_came_whole_counts_as_one(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Of a long body, too, whose connection a task watches meanwhile."""
    said = [{"role": "user", "content": "x" * size}]
    async with serving(GOOD) as (_, gateway, client):
        ended, seen = gateway.metrics.ended, list[str]()

        def note(*told: Any) -> None:
            seen.append(told[1])
            ended(*told)

        monkeypatch.setattr(gateway.metrics, "ended", note)
        for _ in range(3):
            answer = await client.post(CHAT, json=chat(stream=True, messages=said))
            assert streamed(answer)[-1] == "[DONE]"
        await until(lambda: is_clean(gateway))
    assert seen == ["ok"] * 3


async def test_ids_and_usage_are_shown_to_who_asked() -> None:
    async with serving(GOOD, metrics=PACELINE_METRICS) as (engine, _, client):
        plain = await client.post(CHAT, json=chat(stream=True))
        assert "token_ids" not in plain.text and "usage" not in plain.text
        assert engine.bodies[0]["return_token_ids"] is True
        assert engine.bodies[0]["stream_options"] == {"include_usage": True}
        assert isinstance(engine.bodies[0]["seed"], int)
        asked = chat(stream=True, return_token_ids=True, stream_options={"include_usage": True})
        told = streamed(await client.post(CHAT, json=asked))
        assert told[1]["choices"][0]["token_ids"] == [0]
        assert told[-2]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("cut", range(1, 5))
async def test_a_stream_goes_on_at_another_engine(cut: int) -> None:
    rest = Step(parts=chat_chunks(WORDS[cut:], first_id=cut, created=2))
    async with (
        scripted(pieces(cut), metrics=PACELINE_METRICS) as dies,
        scripted(rest, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(dies, lives)) as (gateway, client),
    ):
        prefer_others(gateway, "e2")
        asked = chat(stream=True, stream_options={"include_usage": True})
        request = asyncio.ensure_future(client.post(CHAT, json=asked))
        response = await request
        told = streamed(response)
        assert text_of(told) == "".join(WORDS)
        assert lives.bodies[0]["resume_output_ids"] == list(range(cut))
        assert lives.bodies[0]["seed"] == dies.bodies[0]["seed"]
        # one head, one role, one end, and a word about what happened
        assert {chunk["id"] for chunk in told[:-1]} == {"chat-1"}
        assert response.text.count('"role"') == 1 and told[-1] == "[DONE]"
        assert told[-2]["usage"]["completion_tokens"] == 5
        notes = [chunk["paceline"] for chunk in told[:-1] if "paceline" in chunk]
        assert notes == [{"engine": "e2", "attempts": 2, "resumed": 1}]


async def test_before_its_first_word_it_begins_anew() -> None:
    async with serving(pieces(0), GOOD, metrics=PACELINE_METRICS) as (dies, lives, gateway, client):
        told = await _first_to(gateway, client, dies, "e2")
        assert text_of(told) == "".join(WORDS)
        assert "resume_output_ids" not in lives.bodies[0]
        assert sum('"role"' in json.dumps(chunk) for chunk in told) == 1


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (pieces(2, ids=False), "without ids"),
        (pieces(2, ids=False, then="end"), "an end without a finish reason is no end"),
        (Step(parts=(*chat_chunks(WORDS, ids=False)[:3], b"data: {oops\n\n")), "no JSON"),
        (
            Step(parts=(*chat_chunks(WORDS, ids=False)[:3], b"data: [DONE]\n\n")),
            "a last event too early",
        ),
    ],
)
async def test_what_cannot_go_on_says_so(step: Step, why: str) -> None:
    async with serving(step) as (_, _, client):
        told = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(told) == "Once upon", why
        error = told[-2]["error"]
        assert error["code"] == "engine_failed" and error["resume"]["possible"] is False
        assert told[-1] == "[DONE]"


async def test_a_missing_end_after_the_finish_reason_is_no_fault() -> None:
    step = Step(parts=chat_chunks(WORDS, done=False, usage=False), then="cut")
    async with serving(step, metrics=PACELINE_METRICS) as (_, _, client):
        asked = chat(stream=True, stream_options={"include_usage": True})
        told = streamed(await client.post(CHAT, json=asked))
        assert text_of(told) == "".join(WORDS) and told[-1] == "[DONE]"
        assert told[-2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
async def test_a_refusal_goes_elsewhere(status: int) -> None:
    async with serving(refused(status), GOOD) as (refuses, takes, gateway, client):
        told = await _first_to(gateway, client, refuses, "e2")
        assert text_of(told) == "".join(WORDS) and len(takes.bodies) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_the_callers_fault_is_told_as_the_engine_said_it(status: int) -> None:
    async with serving(refused(status), refused(status)) as (one, two, gateway, client):
        response = await client.post(CHAT, json=chat(stream=True))
        assert response.status_code == status
        assert response.json()["error"]["message"] == f"no: {status}"
        assert len(one.bodies) + len(two.bodies) == 1
        states = {e.breaker_state(gateway.now()) for e in gateway.upstreams.by_name.values()}
        assert states == {"closed"}


async def test_all_refuse_and_the_wait_is_told() -> None:
    async with (
        scripted(refused(429, retry_after="7")) as one,
        scripted(refused(429, retry_after="9")) as two,
        gateway_over(configured(one, two)) as (_, client),
    ):
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 429
        assert response.headers["retry-after"] in ("7", "9")
        assert len(one.bodies) == len(two.bodies) == 1


async def test_at_most_three_attempts() -> None:
    async with (
        scripted(refused(503)) as a,
        scripted(refused(503)) as b,
        scripted(refused(503)) as c,
        scripted(refused(503)) as d,
        gateway_over(configured(a, b, c, d)) as (_, client),
    ):
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 503
        assert sum(len(engine.bodies) for engine in (a, b, c, d)) == 3


async def test_the_caller_can_forbid_it() -> None:
    headers = {"x-paceline-allow": "fallback"}
    async with serving(refused(503), refused(503)) as (one, two, _, client):
        response = await client.post(CHAT, json=chat(), headers=headers)
        assert response.status_code == 503
        assert len(one.bodies) + len(two.bodies) == 1


async def test_the_gateways_own_key_is_not_the_callers_trouble() -> None:
    async with serving(refused(401)) as (_, _, client):
        response = await client.post(CHAT, json=chat())
        assert response.status_code == 502
        assert "refused the gateway's credentials" in response.json()["error"]["message"]


async def test_an_engine_that_falls_silent_is_left() -> None:
    rest = Step(parts=chat_chunks(WORDS[2:], first_id=2))
    async with (
        scripted(pieces(2, then="stall"), metrics=PACELINE_METRICS) as stops,
        scripted(rest, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(stops, lives)) as (gateway, client),
    ):
        prefer_others(gateway, "e2")
        request = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True)))
        await until(lambda: bool(stops.bodies))
        stops.frozen = True
        assert text_of(streamed(await request)) == "".join(WORDS)
        assert gateway.upstreams.by_name["e1"].breaker_state(gateway.now()) == "open"
        # no request goes there meanwhile
        lives.script[:] = [GOOD]
        for _ in range(5):
            await client.post(CHAT, json=chat(stream=True))
        assert len(stops.bodies) == 1


async def test_a_stream_that_stalls_while_its_engine_lives_is_left() -> None:
    rest = Step(parts=chat_chunks(WORDS[2:], first_id=2))
    async with (
        scripted(pieces(2, then="stall"), metrics=PACELINE_METRICS) as stops,
        scripted(rest, metrics=PACELINE_METRICS) as lives,
        gateway_over(configured(stops, lives, stall_timeout=0.2)) as (gateway, client),
    ):
        told = await _first_to(gateway, client, stops, "e2")
        assert text_of(told) == "".join(WORDS)
        await until(lambda: stops.hung_up == 1)


async def test_counters_return_to_zero_whatever_happens() -> None:
    steps = [GOOD, pieces(2), refused(500), WHOLE, pieces(0), Step(raw=b"garbage\r\n\r\n")]
    async with (
        scripted(*steps, GOOD, metrics=PACELINE_METRICS) as one,
        scripted(*reversed(steps), GOOD, metrics=PACELINE_METRICS) as two,
        gateway_over(configured(one, two)) as (gateway, client),
    ):
        for number in range(12):
            await client.post(CHAT, json=chat(stream=number % 2 == 0))
        for engine in gateway.upstreams.by_name.values():
            assert not engine.running and not engine.load.running
            assert engine.load.prefill_tokens == pytest.approx(0.0)
            assert engine.load.resident_tokens == pytest.approx(0.0)
        assert gateway.in_flight == 0


async def test_other_apis_begin_anew_until_something_is_said() -> None:
    start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    async with (
        scripted(Step(parts=(start,), then="cut"), Step(parts=(start, delta), then="cut")) as dies,
        scripted(Step(parts=(start, delta, stop))) as lives,
        gateway_over(configured(dies, lives)) as (gateway, client),
    ):
        prefer_others(gateway, "e2")
        request = asyncio.ensure_future(client.post("/v1/messages", json=chat(stream=True)))
        assert (await request).content == start + delta + stop
        gateway.upstreams.by_name["e2"].draining = True
        broken = await client.post("/v1/messages", json=chat(stream=True))
        assert broken.content.startswith(start + delta + b"event: error\n")


async def test_an_idle_connection_that_was_closed_is_no_failure() -> None:
    """However short a time ago it was used; one that is new, and closes, is one."""
    closes = Step(raw=b"")
    async with serving(WHOLE) as (engine, gateway, client):
        state = gateway.upstreams.by_name["e1"]
        for idle, status in ((30.0, 503), (3.0, 200), (0.0, 200)):
            engine.script[:] = [WHOLE]
            assert (await client.post(CHAT, json=chat())).status_code == 200
            for connection in state.pool._free:
                connection.idle_since -= idle
            sent = len(engine.bodies)
            engine.script[:] = [closes, WHOLE] if idle < 10.0 else [closes]
            answer = await client.post(CHAT, json=chat(), headers={"x-paceline-allow": ""})
            # one that was open too long is not used at all
            assert answer.status_code == status
            assert len(engine.bodies) - sent == (2 if status == 200 else 1)
            # and a second time in a row it is the engine's fault
            engine.script[:] = [closes]
            assert (await client.post(CHAT, json=chat())).status_code == 503


async def test_a_fault_of_ours_at_the_end_of_an_answer_ends_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(WHOLE) as (_, gateway, client):
        state: Any = gateway.upstreams.by_name["e1"]

        class _Broken(type(state.dialect)):  # type: ignore[misc]
            def answer(self, path: str, body: bytes) -> bytes:
                raise RuntimeError("a fault of ours")

        state.dialect = _Broken()
        response = await client.post(CHAT, json=chat(), timeout=10.0)
        assert response.status_code == 503 and "failed on this answer" in response.text
        assert not state.running and "a fault of ours" in caplog.text


async def _first_to(gateway: Any, client: Any, first: Any, then: str) -> list[Any]:
    """A streamed request that goes to ``first``, as ``then`` looks busy."""
    prefer_others(gateway, then)
    response = await client.post(CHAT, json=chat(stream=True))
    assert first.bodies
    return streamed(response)
