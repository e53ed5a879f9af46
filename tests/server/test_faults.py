"""What callers see when the engine under a live server is hurt, or when they do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.protocol import Sink
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.types import GenerationOutput, GenerationRequest
from paceline.errors import ConfigError, EngineLostError, PoisonedRequestError
from paceline.http.errors import error_response, reply_to
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.batches.answering import answer_line
from paceline.server.batches.lines import BatchLine
from tests.server.helpers import VOCAB, connect, expected_text, metric
from tests.server.live_process import LiveServer, eventually, live_server, raw_request

TEXT = "/v1/completions"
DIE = 7
COUNTERS = (
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "paceline:step_seconds_total",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    settings = {"backend": {"step_time": 0.005, "die_on": DIE}, "supervise": {"max_restarts": 50}}
    with live_server(log, **settings) as made:
        yield made
        made.signal()
        assert made.wait() == 0
        assert "Traceback" not in made.log()


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "go", "max_tokens": 200, "ignore_eos": True, **fields}


def engine_pid(server: LiveServer) -> int:
    """Of the engine process that is there now."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if int(fields[1]) == server.process.pid and fields[0] != "Z":
            return int(entry.parent.name)
    raise AssertionError("no engine")


def stream(server: LiveServer, fields: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """The text of a stream and its error, if it ended in one; [DONE] comes in any case."""
    text, error, last = "", None, ""
    with httpx.stream("POST", server.url + TEXT, json=fields, timeout=30) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", ()))
            last = line or last
    assert last == "data: [DONE]"
    return text, error


def test_a_lost_engine_is_replaced(server: LiveServer) -> None:
    _, expected = expected_text(ByteTokenizer().encode("go"), 200)
    unfaulted = httpx.post(server.url + TEXT, json=body()).json()["choices"][0]["text"]
    assert unfaulted.startswith(expected)
    before = server.metrics()
    losses = metric(before, "paceline:engine_failures_total")
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(stream, server, body(stream=True)) for _ in range(8)]
        wholes = [
            pool.submit(httpx.post, server.url + TEXT, json=body(n=1 + i % 2), timeout=30)
            for i in range(8)
        ]
        eventually(lambda: server.running() == 20)
        os.kill(engine_pid(server), signal.SIGKILL)
        eventually(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        refusal = httpx.get(f"{server.url}/health")
        assert (refusal.status_code, int(refusal.headers["Retry-After"]) >= 1) == (503, True)
        down = server.metrics()
        assert metric(down, "paceline:engine_up") == 0
        assert metric(down, "vllm:num_requests_running") == 0
        for text, error in (future.result(30) for future in streams):
            assert error is None
            assert text == unfaulted
        for answer in (future.result(30) for future in wholes):
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            # choices of one request are all alike here
            assert {choice["text"] for choice in choices} == {unfaulted}
            assert answer.json()["usage"]["completion_tokens"] == 200 * len(choices)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    after = server.metrics()
    for name in COUNTERS:
        assert metric(before, name) <= metric(down, name) <= metric(after, name)
    assert metric(after, "paceline:engine_failures_total") == losses + 1
    assert metric(after, "paceline:engine_up") == 1
    assert metric(after, "paceline:engine_recovery_seconds") > 0
    eventually(lambda: metric(server.metrics(), "vllm:kv_cache_usage_perc") == 0)


def test_a_poison_is_told_not_to_come_again(server: LiveServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        good = [
            pool.submit(httpx.post, server.url + TEXT, json=body(), timeout=30) for _ in range(3)
        ]
        eventually(lambda: server.running() > 0)
        poison = httpx.post(server.url + TEXT, json={"prompt": [DIE]}, timeout=30)
        assert poison.status_code == 500
        assert poison.headers["x-should-retry"] == "false"
        assert "2 times under this request" in poison.json()["error"]["message"]
        assert [future.result(30).status_code for future in good] == [200] * 3
    found = metric(server.metrics(), "paceline:engine_failure_requests_total", outcome="poisoned")
    assert found == 1


def lazy(server: LiveServer, *, stream: bool = True, **fields: Any) -> socket.socket:
    """A caller who asks for a lot and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", server.port))
    made.sendall(raw_request(TEXT, body(**{"max_tokens": 3000, "stream": stream} | fields)))
    return made


@pytest.mark.parametrize("timeout", [0.5, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_slow_readers(tmp_path: Path, timeout: float) -> None:
    config = {"slow_reader_timeout": timeout}
    with live_server(tmp_path / "log", process=True, config=config) as server:
        # every event carries much, so that buffers fill up
        callers = [lazy(server, logprobs=5) for _ in range(5)]
        eventually(lambda: metric(server.metrics(), "paceline:slow_readers") == 5, 30)
        if not timeout:
            time.sleep(1.0)
            assert metric(server.metrics(), "paceline:slow_readers_cut_total") == 0
            # whoever reads in the end gets everything
            read = b""
            while not read.endswith(b"0\r\n\r\n"):
                read += callers[0].recv(1 << 20)
            assert read.count(b'"finish_reason":"length"') == 1
            eventually(lambda: metric(server.metrics(), "paceline:slow_readers") == 4)
        else:
            eventually(lambda: metric(server.metrics(), "paceline:slow_readers_cut_total") == 5)
            eventually(lambda: server.running() == 0)
            assert metric(server.metrics(), "vllm:kv_cache_usage_perc") == 0
            assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
            assert "slow_reader_cut client=127.0.0.1" in server.log()
        for caller in callers:
            caller.close()


def test_who_reads_steadily_is_not_cut(tmp_path: Path) -> None:
    """An answer in one piece, on a line that needs several timeouts for it."""
    with live_server(tmp_path / "log", config={"slow_reader_timeout": 0.5}) as server:
        with lazy(server, stream=False, n=8, max_tokens=1000, logprobs=5) as caller:
            eventually(lambda: metric(server.metrics(), "paceline:slow_readers") == 1, 30)
            started = time.monotonic()
            read = b""
            while not read.endswith(b'"metrics":null}') and (part := caller.recv(1 << 14)):
                read += part
                if time.monotonic() - started < 2.0:
                    time.sleep(0.05)
            assert json.loads(read.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 8000
        assert metric(server.metrics(), "paceline:slow_readers_cut_total") == 0


class Stumbles(ByteTokenizer):
    """Cannot say what "%" is."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == ord("%"):
            raise KeyError(token_id)
        return super().token_bytes(token_id)


@pytest.fixture
async def stumbling() -> AsyncIterator[httpx.AsyncClient]:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.002)
    client = null_client(backend, tokenizer=Stumbles())
    async with connect(create_app(client, ServerConfig())) as http:
        yield http
    await client.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_tokenizer_fault_ends_its_request_alone(
    stumbling: httpx.AsyncClient, whole: bool
) -> None:
    import asyncio

    def ask(letter: str) -> Any:
        fields = body(max_tokens=20, logit_bias={str(ord(letter)): 100}, stream=not whole)
        return stumbling.post(TEXT, json=fields)

    good, bad, other = await asyncio.gather(ask("x"), ask("%"), ask("y"))
    for answer, letter in ((good, "x"), (other, "y")):
        assert answer.status_code == 200
        assert answer.text.count(letter) >= 20 or letter * 20 in answer.text
    assert bad.status_code == 500
    assert "could not be turned into text" in bad.json()["error"]["message"]
    assert metric((await stumbling.get("/metrics")).text, "vllm:kv_cache_usage_perc") == 0


async def test_a_line_of_a_batch_is_asked_again() -> None:
    """A lost engine is no answer to keep."""
    client = null_client(NullBackend(vocab_size=VOCAB))
    generate, asked = client.generate, 0

    async def lost_once(
        request: GenerationRequest, sink: Sink | None = None
    ) -> AsyncGenerator[GenerationOutput, None]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise EngineLostError("gone", 0.1)
        async for output in generate(request, sink):
            yield output

    client.generate = lost_once  # type: ignore[method-assign]
    service = service_of(create_app(client, ServerConfig()))
    asks = {"model": "null", "prompt": "hi", "max_tokens": 2}
    line = BatchLine(index=0, custom_id="a", digest="", url=TEXT, body=asks)
    answer = await answer_line(service, line, "r")
    await client.close()
    assert (answer.status, asked) == (200, 2)


def test_what_callers_are_told() -> None:
    lost = error_response(reply_to(EngineLostError("gone", 2.3), drain_timeout=0.0))
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "3")
    assert "x-should-retry" not in lost.headers
    poison = error_response(reply_to(PoisonedRequestError("again"), drain_timeout=0.0))
    assert (poison.status_code, poison.headers["x-should-retry"]) == (500, "false")


def test_a_bad_slow_reader_timeout_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="slow_reader_timeout must be 0 or more seconds, got -1"):
        ServerConfig(slow_reader_timeout=-1.0)
