"""``/metrics`` from a process of its own: what it shows, and whose end it does not outlive."""

from __future__ import annotations

import http.client
import mmap
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paceline.server.observability.metrics import exporter_process
from paceline.server.observability.metrics.exporter_process import (
    HEADER,
    SEQUENCE,
    Answers,
    Exporter,
    read_text,
)
from tests.cli.servers import start_server
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


def test_a_server_that_stands_still_shows_by_its_age(server: LiveServer) -> None:
    server.signal(signal.SIGSTOP)
    try:
        eventually(lambda: metric(metrics(server), AGE) >= 0.9)
    finally:
        server.signal(signal.SIGCONT)
    eventually(lambda: metric(metrics(server), AGE) < 0.9)


def test_it_ends_with_the_server_and_is_replaced_if_it_ends_before(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", metrics_port=0) as server:
        metrics(server)
        first = exporter_of(server)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: exporter_of(server) not in (0, first))
        assert AGE in metrics(server)
        second = exporter_of(server)
        server.process.kill()
        server.wait()
        eventually(lambda: not Path(f"/proc/{second}").exists())


def exporter_of(server: LiveServer) -> int:
    """The process id of a server's exporter; 0: there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue
        if parent == server.process.pid and b"exporter_process" in command:
            return int(entry.name)
    return 0


def test_too_many_connections_are_closed(server: LiveServer) -> None:
    address = ("127.0.0.1", server.metrics_port)
    held = [socket.create_connection(address, timeout=10) for _ in range(32)]
    # these hold their places once they are taken
    for connection in held:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1)
    with socket.create_connection(address, timeout=10) as one_more:
        assert one_more.recv(1) == b""
    for connection in held:
        connection.close()
    eventually(lambda: _answers(server))


def _answers(server: LiveServer) -> bool:
    try:
        return AGE in metrics(server)
    except httpx.TransportError:
        return False


def test_the_flag_opens_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with start_server("--backend", "null", "--metrics-port", str(port)) as server:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert metric(text, "paceline:ready") == 1
        assert server.stop()[0] == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_a_text_being_replaced_is_not_shown() -> None:
    memory = mmap.mmap(-1, 4096)
    assert read_text(memory) is None
    memory[HEADER.size : HEADER.size + 3] = b"abc"
    HEADER.pack_into(memory, 0, 2, 3, 7.0)
    assert read_text(memory) == (b"abc", 7.0)
    # its writer stopped halfway
    SEQUENCE.pack_into(memory, 0, 3)
    assert read_text(memory) is None


def test_a_text_being_replaced_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(exporter_process.time, "sleep", waits.append)
    memory = filled(b"a 1\nage 0.0\n")
    SEQUENCE.pack_into(memory, 0, 3)
    answers = Answers(memory)
    request = b"GET /metrics HTTP/1.1"
    assert b" 503 " in answers.to(request)[0]
    # milliseconds: everybody else waits as long
    assert len(waits) > 1 and sum(waits) <= 0.005
    waits.clear()
    assert b" 503 " in answers.to(request)[0]
    assert not waits
    SEQUENCE.pack_into(memory, 0, 4)
    answers.begin_round()
    assert b" 200 " in answers.to(request)[0]


def test_an_unforeseen_error_ends_its_connection_alone(capsys: pytest.CaptureFixture[str]) -> None:
    # a text without the age's line, which is none that the server writes
    memory = filled(b"age")
    until, end = os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=10) as kept,
        socket.create_connection(listener.getsockname(), timeout=10) as broken,
        ThreadPoolExecutor(1) as pool,
    ):
        serving = pool.submit(Exporter(listener, memory).run_until, until)
        try:
            for connection, asked in (
                (kept, b"GET /x HTTP/1.1\r\n\r\n"),
                (broken, b"GET /metrics HTTP/1.1\r\n\r\n"),
                (kept, b"GET /x HTTP/1.0\r\n\r\n"),
            ):
                connection.sendall(asked)
                answer = connection.recv(4096)
                assert answer.startswith(b"HTTP/1.1 404 ") if connection is kept else not answer
            assert kept.recv(4096) == b""
        finally:
            os.close(end)
        serving.result(10)
    os.close(until)
    assert "metrics_exporter_error error=ValueError" in capsys.readouterr().err


def filled(text: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, 1 << 20)
    memory[HEADER.size : HEADER.size + len(text)] = text
    HEADER.pack_into(memory, 0, 2, len(text), time.monotonic())
    return memory


@pytest.mark.parametrize(
    ("head", "status", "keep"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x", 200, True),
        (b"GET /metrics?a=b HTTP/1.1\r\nconnection:Close", 200, False),
        (b"GET /metrics HTTP/1.0", 200, False),
        (b"GET /metrics HTTP/1.0\r\nConnection: keep-alive", 200, True),
        (b"GET /metric HTTP/1.1", 404, True),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 0", 200, True),
        # what follows is no request, whatever else is said
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 7\r\nConnection: keep-alive", 200, False),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0", 501, False),
        (b"POST /metrics HTTP/1.1\r\nConnection: keep-alive", 501, False),
        (b"HEAD /metrics HTTP/1.1", 501, False),
        (b"HEAD /metrics HTTP/1.1\r\nConnection: keep-alive", 501, False),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 7", 501, False),
        (b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked", 501, False),
        (b"GET /metrics", 400, False),
        (b"", 400, False),
        (b"\x16\x03\x01 \x00 \xff", 400, False),
    ],
)
def test_what_is_answered(head: bytes, status: int, keep: bool) -> None:
    answer, kept = Answers(filled(b"a 1\nage 0.0\n")).to(head)
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *headers = top.split(b"\r\n")
    assert int(first.split(b" ")[1]) == status
    assert (kept, b"Connection: close" in headers) == (keep, not keep)
    if head.startswith(b"HEAD "):
        assert body == b""
    else:
        assert b"Content-Length: %d" % len(body) in headers
    if status == 200:
        assert re.fullmatch(rb"a 1\nage 0\.\d{3}\n", body)


def test_one_thread_serves_whoever_is_ready(server: LiveServer) -> None:
    """Half a request, several in one piece, and a page that is not read hold up nobody."""
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    address = ("127.0.0.1", server.metrics_port)
    with (
        socket.create_connection(address, timeout=10) as half,
        socket.create_connection(address, timeout=10) as unread,
        socket.create_connection(address, timeout=10) as late,
    ):
        half.sendall(request[:20])
        # more pages than the system keeps for it
        unread.sendall(request * 400)
        assert AGE in metrics(server)
        half.sendall(request[20:] + request)
        # a connection that is accepted before it says anything
        time.sleep(1.5)
        late.sendall(request)
        for connection, count in ((late, 1), (half, 2), (unread, 400)):
            data = b""
            while data.count(f"\n{AGE} ".encode()) < count or not data.endswith(b"\n"):
                part = connection.recv(1 << 20)
                assert part, "closed before all was sent"
                data += part
            assert data.count(b"HTTP/1.1 200 OK\r\n") == count
        half.sendall(b"GET /" + b"x" * 17_000)
        assert half.recv(1 << 16).startswith(b"HTTP/1.1 431 ")
        assert half.recv(1) == b""


_SLICES = """
import ctypes, platform, struct
from paceline.server.observability.metrics.exporter_process import ask_for_short_slices
granted = ask_for_short_slices()
number = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
seen = ctypes.create_string_buffer(56)
if number is not None:
    ctypes.CDLL(None).syscall(number, 0, seen, 56, 0)
print(int(granted), struct.unpack_from("=IIQiIQ", seen)[5])
"""


def test_the_exporter_asks_to_run_soon() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SLICES], stdout=subprocess.PIPE, check=True, text=True
    )
    granted, runtime = map(int, done.stdout.split())
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    if platform.system() != "Linux" or release < [6, 12]:
        pytest.skip(f"{platform.system()} {platform.release()} has no slices to ask for")
    if not granted:
        pytest.skip("the system refuses to change a slice here")
    assert runtime == 100_000
