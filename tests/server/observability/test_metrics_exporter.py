"""``/metrics`` from threads of their own: what they answer, and whom they do not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socketserver import ThreadingMixIn

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.observability.metrics import exporter
from paceline.server.observability.metrics.exporter import exporting
from tests.server.helpers import metric
from tests.server.live_process import LiveServer, eventually, live_server

AGE = "paceline:metrics_age_seconds"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("live") / "log", metrics_port=0) as made:
        yield made


def metrics(server: LiveServer) -> str:
    answer = httpx.get(f"http://127.0.0.1:{server.metrics_port}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


def test_both_ports_show_the_same(server: LiveServer) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    tokens = "vllm:generation_tokens_total"
    eventually(lambda: metric(metrics(server), tokens) == 5)
    # the exchange itself is counted a moment after its tokens
    counted = 'http_requests_total{handler="/v1/completions"'
    eventually(lambda: counted in metrics(server))
    texts = metrics(server), server.metrics()
    names = [[line.split(" ")[0] for line in text.splitlines()] for text in texts]
    assert names[0] == names[1]
    assert metric(texts[1], AGE) == 0 <= metric(texts[0], AGE) < 5
    port = server.metrics_port
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 404
    assert httpx.post(f"http://127.0.0.1:{port}/metrics").status_code == 501
    # a connection that is kept serves again
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    for _ in range(2):
        kept.request("GET", "/metrics?name=x")
        assert AGE in kept.getresponse().read().decode()
    kept.close()


async def test_a_loop_that_stands_still_shows_by_its_age() -> None:
    app = create_app(null_client(NullBackend()), ServerConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    pool = ThreadPoolExecutor(1)
    async with exporting(service_of(app).metrics, listener):

        def late() -> str:
            time.sleep(1.0)
            return httpx.get(address).text

        asked = pool.submit(late)
        # the loop does nothing else meanwhile
        assert metric(asked.result(10), AGE) >= 0.9
        await asyncio.sleep(0.1)
        later = await asyncio.to_thread(httpx.get, address)
        assert metric(later.text, AGE) < 0.9
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(httpx.get, address)


def test_one_connection_too_many_closes_the_one_idle_longest(server: LiveServer) -> None:
    held = [http.client.HTTPConnection("127.0.0.1", server.metrics_port, 10) for _ in range(32)]
    for connection in held:
        connection.connect()
    for connection in (*held[1:], held[0]):
        connection.request("GET", "/metrics")
        assert AGE in connection.getresponse().read().decode()
    assert AGE in metrics(server)
    (closed,), _, _ = select.select([connection.sock for connection in held], [], [], 10)
    assert closed is not held[0].sock and closed.recv(1) == b""
    for connection in held:
        connection.close()


async def test_slow_and_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_BUSY", 0.4)
    app = create_app(null_client(NullBackend()), ServerConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    def sends(begun: bytes, more: bytes) -> float:
        start = time.monotonic()
        connection = socket.create_connection(address, timeout=0.1)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(begun)
            while time.monotonic() < start + 10:
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1 << 16):
                        break
                connection.sendall(more)
        return time.monotonic() - start

    async with exporting(service_of(app).metrics, listener):
        slow = asyncio.to_thread(sends, b"GET /metrics HTTP/1.1\r\nx: ", b"y")
        silent = asyncio.to_thread(sends, b"", b"")
        assert max(await asyncio.gather(slow, silent)) < 5
        kept = await asyncio.to_thread(socket.create_connection, address, 10)
        await asyncio.to_thread(kept.sendall, b"GET /metrics HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.8)
    # the end closes what is open
    with kept, kept.makefile("rb") as reader:
        assert AGE.encode() in await asyncio.to_thread(reader.read)


async def test_a_thread_that_cannot_start_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(null_client(NullBackend()), ServerConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    monkeypatch.setattr(exporter, "_MAX_CONNECTIONS", 1)
    made: list[exporter._Exporter] = []
    monkeypatch.setattr(exporter._Exporter, "handle_error", lambda self, *_: made.append(self))
    async with exporting(service_of(app).metrics, listener):
        with monkeypatch.context() as patch:
            patch.setattr(ThreadingMixIn, "process_request", _cannot_start)
            with await asyncio.to_thread(socket.create_connection, address, 10) as refused:
                assert await asyncio.to_thread(refused.recv, 1) == b""
        assert not made[0]._deadlines


def _cannot_start(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("head", "status", "keep"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x", 200, True),
        (b"GET /metrics?a=b HTTP/1.1\r\nconnection:Close", 200, False),
        (b"GET /metrics HTTP/1.0", 200, False),
        (b"GET /metric HTTP/1.1", 404, False),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 0", 200, True),
        # what follows is not a request, whatever else is said
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 7\r\nConnection: keep-alive", 200, False),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: x", 200, False),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked", 200, False),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0", 501, False),
        (b"HEAD /metrics HTTP/1.1", 501, False),
        (b"\x16\x03\x01 \x00 \xff", 400, False),
    ],
)
def test_what_is_answered(server: LiveServer, head: bytes, status: int, keep: bool) -> None:
    address = ("127.0.0.1", server.metrics_port)
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head + b"\r\n\r\n")
        reader = connection.makefile("rb")
        assert int(reader.readline().split(b" ")[1]) == status
        headers = dict(line.split(b": ", 1) for line in iter(reader.readline, b"\r\n"))
        body = reader.read(int(headers.get(b"Content-Length", b"0")))
        assert (AGE.encode() in body) == (status == 200)
        if keep:
            connection.sendall(b"GET /x HTTP/1.1\r\n\r\n")
            assert b" 404 " in reader.readline()
        else:
            assert not reader.read()


def test_half_a_request_delays_no_other(server: LiveServer) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.metrics_port), timeout=10) as half:
        half.sendall(request[:20])
        assert AGE in metrics(server)
        half.sendall(request[20:])
        assert half.recv(1 << 20).startswith(b"HTTP/1.1 200 ")
