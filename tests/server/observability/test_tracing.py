"""Traces, as a collector sees them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.errors import ConfigError
from paceline.http.otlp import check_endpoint
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from tests.server.helpers import VOCAB, chat_body, connect, say
from tests.server.live_process import live_server
from tests.server.otlp_receiver import Receiver, attributes, receiving

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def traced(
    receiver: Receiver, *, backend: dict[str, Any] | None = None, **core: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A server that sends its traces; they are there once the block is left."""
    client = null_client(NullBackend(vocab_size=VOCAB, **(backend or {})), **core)
    app = create_app(client, ServerConfig(otlp_endpoint=receiver.url))
    async with connect(app) as http:
        yield http
    await client.close()
    tracing = service_of(app).tracing
    assert tracing is not None
    await asyncio.to_thread(tracing.close)


async def test_a_request_is_a_span_with_its_phases_inside() -> None:
    with receiving() as receiver:
        async with traced(receiver, backend={"step_time": 0.005}) as http:
            body = chat_body(max_tokens=7, temperature=0.5, logit_bias=say("x"), n=2)
            before = time.time_ns()
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            after = time.time_ns()
    assert receiver.paths == ["/v1/traces"]
    assert receiver.resource["service.name"] == "paceline"
    root = receiver.named("chat null")
    phases = [receiver.named(name) for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    assert {span.trace_id for span in phases} == {root.trace_id}
    assert root.kind == 2  # SERVER
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "null"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (7, 0.5)
    assert found["gen_ai.usage.output_tokens"] == 14
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert found["paceline.slo.class"] == "standard"
    # one after the other, and together no longer than the whole
    times = [
        time for span in phases for time in (span.start_time_unix_nano, span.end_time_unix_nano)
    ]
    assert times == sorted(times)
    assert before - 1e6 <= root.start_time_unix_nano == times[0]
    assert times[-1] <= root.end_time_unix_nano <= after + 1e6
    decode = phases[2].end_time_unix_nano - phases[2].start_time_unix_nano
    # the first token may have been seen late
    assert decode >= 5 * 5e6
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(
        (times[3] - times[0]) / 1e9, abs=1e-5
    )
    prompt = attributes(phases[1])["gen_ai.usage.input_tokens"]
    assert prompt == found["gen_ai.usage.input_tokens"] > 0


async def test_the_callers_trace_goes_on_and_its_word_on_sampling_holds() -> None:
    body = {"prompt": "secret words", "max_tokens": 2, "stream": True}
    with receiving() as receiver:
        async with traced(receiver) as http:
            for flag in ("01", "00"):
                headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-{flag}"}
                await http.post("/v1/completions", json=body, headers=headers)
            await http.post("/v1/completions", json=body, headers={"traceparent": "00-zz"})
    roots = [span for span in receiver.spans if span.name == "text_completion null"]
    assert [span.parent_span_id.hex() for span in roots] == [PARENT, ""]
    assert roots[0].trace_id.hex() == TRACE_ID != roots[1].trace_id.hex()
    assert not any(b"secret" in span.SerializeToString() for span in receiver.spans)


async def test_waiting_has_its_reasons() -> None:
    with receiving() as receiver:
        # one runs, the other waits for its place
        async with traced(receiver, backend={"step_time": 0.01}, max_num_seqs=1) as http:
            body = {"prompt": "x", "max_tokens": 20, "logit_bias": say("x")}
            await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
    queues = sorted(
        (span for span in receiver.spans if span.name == "queue"),
        key=lambda span: span.end_time_unix_nano,
    )
    waited = attributes(queues[1])
    assert waited["paceline.waited.slots"] >= 0.1
    assert "paceline.waited.slots" not in attributes(queues[0])


async def test_failures_and_hang_ups() -> None:
    with receiving() as receiver:
        backend = {"poison_token": 7, "step_time": 0.01}
        async with traced(receiver, backend=backend, pipeline_depth=1) as http:
            failed = await http.post("/v1/completions", json={"prompt": [7], "max_tokens": 5})
            assert failed.status_code == 500
            body = {"prompt": "x", "max_tokens": 3000, "logit_bias": say("x")}
            with pytest.raises(httpx.TimeoutException):
                await asyncio.wait_for(_never(http, body), 0.3)
    failed_span, gone = (s for s in receiver.spans if s.name == "text_completion null")
    assert failed_span.status.code == 2  # ERROR
    assert attributes(failed_span)["error.type"] == "RequestFailedError"
    assert gone.status.code == 0
    assert "gen_ai.response.finish_reasons" not in attributes(gone)


async def _never(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    try:
        await http.post("/v1/completions", json=body)
    except asyncio.CancelledError:
        raise httpx.ReadTimeout("hung up") from None


def test_a_server_sends_what_is_left_when_it_ends(tmp_path: Path) -> None:
    with receiving() as receiver:
        config = {"otlp_endpoint": f"{receiver.url}/v1/traces"}
        with live_server(tmp_path / "log", config=config) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 200
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert receiver.paths == ["/v1/traces"]
    assert len(receiver.spans) == 4


async def test_a_collector_that_is_gone_delays_the_end_by_seconds_only() -> None:
    with receiving() as receiver:
        pass
    began = time.monotonic()
    async with traced(receiver) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert time.monotonic() - began < 15


def test_nothing_is_imported_when_it_is_off() -> None:
    program = (
        "import sys, asyncio\n"
        "from paceline.backends.reference.null import NullBackend\n"
        "from paceline.engine.testing import null_client\n"
        "from paceline.server import ServerConfig, create_app\n"
        "client = null_client(NullBackend(vocab_size=259))\n"
        "create_app(client, ServerConfig())\n"
        "asyncio.run(client.close())\n"
        # FastAPI or one of its own may load the API, which does nothing by itself
        "ours = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto')\n"
        "sys.exit(any(name.startswith(ours) for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:4318/otlp/v1/traces", "http://c:4318/otlp/v1/traces"),
    ],
)
def test_endpoints(endpoint: str, url: str) -> None:
    assert check_endpoint(endpoint) == url


@pytest.mark.parametrize("endpoint", ["c:4318", "grpc://c:4317", "http://", "http://c:99999"])
def test_bad_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=endpoint):
        ServerConfig(otlp_endpoint=endpoint)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[otel\]'"):
        ServerConfig(otlp_endpoint="http://127.0.0.1:4318")
