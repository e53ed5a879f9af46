"""A gateway's traces, as a collector sees them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from paceline.errors import ConfigError
from paceline.gateway import Gateway, GatewayConfig
from paceline.gateway.observability.tracing import NO_TRACING, Tracing
from paceline.gateway.settings.config import EngineConfig, check_config, parse_config
from paceline.gateway.settings.prices import Used
from paceline.http.otlp import check_endpoint
from tests.gateway.fault_server import PACELINE_METRICS, Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    WORDS,
    chat,
    configured,
    gateway_over,
    refused,
    streamed,
    text_of,
)
from tests.gateway.proxy.test_hedging import HEDGED, ROLE_ONLY, _known
from tests.server.live_process import live_server
from tests.server.otlp_receiver import Receiver, attributes, receiving

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def traced(
    receiver: Receiver, *engines: Any, **fields: Any
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that sends its traces; they are there once the block is left."""
    config = configured(*engines, otlp_endpoint=receiver.url, **fields)
    check_config(config)
    async with gateway_over(config) as found:
        yield found


async def test_a_request_is_a_span_with_its_attempts_inside() -> None:
    with receiving() as receiver:
        async with (
            scripted(Step(parts=chat_chunks(WORDS), delay=0.02), metrics=PACELINE_METRICS) as one,
            traced(receiver, one) as (_, client),
        ):
            before = time.time_ns()
            answer = await client.post(CHAT, json=chat(stream=True))
            after = time.time_ns()
    assert receiver.paths == ["/v1/traces"]
    assert receiver.resource["service.name"] == "paceline-gateway"
    root, attempt = receiver.named("chat m"), receiver.named("attempt e1")
    assert len(receiver.spans) == 2 and (root.kind, attempt.kind) == (2, 3)  # SERVER, CLIENT
    assert attempt.parent_span_id == root.span_id and attempt.trace_id == root.trace_id
    assert root.parent_span_id == b""
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "m"
    assert (found["paceline.result"], found["paceline.attempts"]) == ("ok", 1)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (
        3,
        len(WORDS),
    )
    assert found["paceline.request_id"] == answer.headers["x-request-id"]
    assert "error.type" not in found and "paceline.fallback" not in found
    inside = attributes(attempt)
    assert (inside["paceline.engine"], inside["paceline.engine_kind"]) == ("e1", "paceline")
    assert (inside["server.address"], inside["server.port"]) == ("127.0.0.1", one.port)
    assert inside["http.response.status_code"] == 200 and inside["paceline.result"] == "done"
    # it took at least as long as the engine's pause, and lies inside of the request
    first = inside["gen_ai.latency.time_to_first_token"]
    assert 0.02 <= first <= found["gen_ai.latency.time_to_first_token"]
    (event,) = attempt.events
    assert event.name == "first_token"
    times = (
        root.start_time_unix_nano, attempt.start_time_unix_nano, event.time_unix_nano,
        attempt.end_time_unix_nano, root.end_time_unix_nano,
    )  # fmt: skip
    assert list(times) == sorted(times)
    assert before - 1e6 <= times[0] and times[-1] <= after + 1e7
    # the engine is told that its parent is the attempt
    told = f"00-{root.trace_id.hex()}-{attempt.span_id.hex()}-"
    assert one.headers[0]["traceparent"].startswith(told)
    assert int(one.headers[0]["traceparent"][-2:], 16) & 1


async def test_the_callers_trace_goes_on_to_every_engine() -> None:
    """An engine is lost in the middle, another goes on: one trace has both."""
    with receiving() as receiver:
        async with (
            scripted(
                Step(parts=chat_chunks(WORDS)[:3], gap=0.1, then="cut"), metrics=PACELINE_METRICS
            ) as one,
            scripted(
                Step(parts=chat_chunks(WORDS[2:], first_id=2)), metrics=PACELINE_METRICS
            ) as two,
            traced(receiver, one, two) as (gateway, client),
        ):
            gateway.upstreams.by_name["e2"].draining = True
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "tracestate": "a=b"}
            task = asyncio.ensure_future(client.post(CHAT, json=chat(stream=True), headers=headers))
            while not one.bodies:
                await asyncio.sleep(0.005)
            gateway.upstreams.by_name["e2"].draining = False
            answer = await task
    assert text_of(streamed(answer)) == "".join(WORDS)
    root = receiver.named("chat m")
    first, second = receiver.named("attempt e1"), receiver.named("attempt e2")
    assert root.trace_id.hex() == TRACE_ID and root.parent_span_id.hex() == PARENT
    assert {first.parent_span_id, second.parent_span_id} == {root.span_id}
    assert (attributes(first)["paceline.result"], first.status.code) == ("lost", 2)
    assert attributes(first)["error.type"] == "lost"
    assert (attributes(second)["paceline.result"], second.status.code) == ("done", 0)
    assert attributes(second)["paceline.tokens_before"] == 2
    found = attributes(root)
    assert (found["paceline.resumed"], found["paceline.attempts"]) == (1, 2)
    assert found["paceline.result"] == "ok" and root.status.code == 0
    for engine, span in ((one, first), (two, second)):
        assert engine.headers[0]["traceparent"] == f"00-{TRACE_ID}-{span.span_id.hex()}-01"
        assert engine.headers[0]["tracestate"] == "a=b"


async def test_who_is_not_to_be_sampled_is_not_and_words_stay_here() -> None:
    with receiving() as receiver:
        async with (
            scripted(Step(parts=chat_chunks(WORDS)), metrics=PACELINE_METRICS) as one,
            traced(receiver, one) as (_, client),
        ):
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-00"}
            body = chat(stream=True, messages=[{"role": "user", "content": "secret words"}])
            await client.post(CHAT, json=body, headers=headers)
            await client.post(CHAT, json=body, headers={"traceparent": "00-zz"})
    assert len(receiver.spans) == 2
    # the engine is told not to sample its spans either
    assert one.headers[0]["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert one.headers[0]["traceparent"].endswith("-00")
    assert int(one.headers[1]["traceparent"][-2:], 16) & 1
    assert not any(b"secret" in span.SerializeToString() for span in receiver.spans)


async def test_failures_say_so_and_waiting_is_a_span() -> None:
    with receiving() as receiver:
        ok = Step(parts=chat_chunks(WORDS), delay=0.1)
        async with (
            scripted(ok, ok, refused(500), refused(400), metrics=PACELINE_METRICS) as one,
            traced(receiver, one, engine_fields={"e1": {"max_concurrent": 1}}) as (_, client),
        ):
            both = [client.post(CHAT, json=chat(stream=True)) for _ in range(2)]
            await asyncio.gather(*both)
            for status in (500, 400):
                assert (await client.post(CHAT, json=chat(stream=True))).status_code == status
    # on a busy machine others may have waited a moment, too
    queue = max(
        (span for span in receiver.spans if span.name == "queue"),
        key=lambda span: span.end_time_unix_nano - span.start_time_unix_nano,
    )
    assert (queue.end_time_unix_nano - queue.start_time_unix_nano) / 1e9 >= 0.05
    roots = {span.span_id: span for span in receiver.spans if span.name == "chat m"}
    assert len(roots) == 4 and queue.parent_span_id in roots
    # what is the caller's fault is no error of a server
    failed = [span for span in roots.values() if span.status.code == 2]
    assert [attributes(span)["error.type"] for span in failed] == ["refused"]
    refusals = [s for s in receiver.spans if s.name == "attempt e1" and s.status.code == 2]
    assert [attributes(s)["http.response.status_code"] for s in refusals] == [500, 400]
    assert refusals[0].parent_span_id == failed[0].span_id


async def test_off_nothing_changes_on_the_way() -> None:
    async with (
        scripted(Step(parts=chat_chunks(WORDS)), metrics=PACELINE_METRICS) as one,
        gateway_over(configured(one)) as (gateway, client),
    ):
        assert gateway.tracing is NO_TRACING
        given = f"00-{TRACE_ID}-{PARENT}-01"
        await client.post(CHAT, json=chat(stream=True), headers={"traceparent": given})
        await client.post(CHAT, json=chat(stream=True))
    assert one.headers[0]["traceparent"] == given and "traceparent" not in one.headers[1]


def test_a_servers_spans_lie_inside_the_gateways(tmp_path: Path) -> None:
    """Real processes, with the flag."""
    with receiving() as receiver:
        config = {"otlp_endpoint": receiver.url}
        with live_server(tmp_path / "server-log", config=config) as server:
            flags = ["--engine", server.url, "--port", "0", "--otlp-endpoint", receiver.url]
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli.main", "gateway", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=tmp_path,
            )
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[3]
                answer = httpx.post(f"{url}/completions", json={"prompt": "x", "max_tokens": 3})
                assert answer.status_code == 200
            finally:
                process.terminate()
                assert process.wait(20) == 0
                assert process.stdout is not None
                process.stdout.close()
            server.signal()
            assert server.wait() == 0
    roots = [span for span in receiver.spans if span.name == "text_completion null"]
    (outer,) = [span for span in roots if not span.parent_span_id]
    (inner,) = [span for span in roots if span.parent_span_id]
    attempt = receiver.named("attempt engine1")
    assert attempt.parent_span_id == outer.span_id and inner.parent_span_id == attempt.span_id
    # the gateway has a queue of its own, which is told where anything held it up
    inside = [span.name for span in receiver.spans if span.parent_span_id == inner.span_id]
    for name in ("queue", "prefill", "decode"):
        assert inside.count(name) == 1
    assert {span.trace_id for span in receiver.spans} == {outer.trace_id}
    assert attributes(outer)["gen_ai.usage.output_tokens"] == 3


class _Stuck(SpanExporter):
    """A collector that takes spans and never answers."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        self.free.wait(60)
        return SpanExportResult.SUCCESS


def test_a_collector_that_hangs_holds_up_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """More spans than are kept: making them waits for nothing, and the rest is dropped."""
    monkeypatch.setattr("paceline.http.otlp._CLOSE_TIMEOUT", 0.2)
    stuck = _Stuck()
    tracing = Tracing("http://127.0.0.1:9", exporter=stuck)
    longest = 0.0
    for number in range(3000):
        began = time.monotonic()
        trace = tracing.begin(CHAT, "m", str(number), [], began)
        trace.ended(
            "ok",
            200,
            {},
        )
        trace.close(Used(), time.monotonic())
        longest = max(longest, time.monotonic() - began)
    # on a machine that others use too; an export that is waited for takes a minute here
    assert longest < 5.0
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 10.0
    stuck.free.set()


def test_nothing_is_imported_when_it_is_off() -> None:
    program = (
        "import sys\n"
        "from paceline.gateway import EngineConfig, Gateway, GatewayConfig\n"
        "from paceline.http.keys import KeyRing\n"
        "config = GatewayConfig(engines=(EngineConfig(name='a', url='http://127.0.0.1:1'),))\n"
        "Gateway(config, KeyRing([]))\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_bad_endpoint_is_refused() -> None:
    engine = b'[[engines]]\nname = "a"\nurl = "http://127.0.0.1:1"\n'
    with pytest.raises(ConfigError, match="grpc://c:4317"):
        parse_config(b'otlp_endpoint = "grpc://c:4317"\n' + engine)
    for secret in ("grpc://me:pass@w0rd@c:4317/x", "//me:pass@w0rd@c", "http://me:pass@w0rd@:x"):
        with pytest.raises(ConfigError, match="an OTLP endpoint is") as caught:
            check_endpoint(f"{secret}?key=pass@w0rd")
        assert "pass" not in str(caught.value) and "w0rd" not in str(caught.value)
    for secret in ("ftp://me:pass@host", "http://me:pass@host:99999", "http://me:pass/pa?ss@host"):
        with pytest.raises(ConfigError, match="engine a: url") as caught:
            check_config(GatewayConfig(engines=(EngineConfig(name="a", url=secret),)))
        assert "pass" not in str(caught.value)
    config = GatewayConfig(engines=(EngineConfig(name="a", url="http://h"),))
    check_config(config)


async def test_a_second_engine_that_is_given_up_says_nothing_of_how_it_ended() -> None:
    """The first one refuses for good; the other one had begun to answer, and was not waited for."""
    with receiving() as receiver:
        async with (
            scripted(
                replace(refused(501, x_should_retry="false"), delay=0.3), metrics=PACELINE_METRICS
            ) as one,
            scripted(ROLE_ONLY, metrics=PACELINE_METRICS) as two,
            traced(receiver, one, two, **HEDGED) as (gateway, client),
        ):
            _known(gateway)
            assert (await client.post(CHAT, json=chat(stream=True))).status_code == 501
            assert len(two.bodies) == 1
    root = receiver.named("chat m")
    assert root.status.code == 2 and attributes(root)["error.type"] == "refused"
    assert attributes(receiver.named("attempt e2"))["paceline.result"] == "abandoned"
