"""Connections between two requests: reused at every age, and closed only as was announced."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.http.bounds import DEFAULT_BOUNDS
from tests.server.live_process import LiveServer, eventually, live_server, raw_request

IDLE = 1.0
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    bounds = {"keep_alive_timeout": IDLE}
    with live_server(log, backend={"step_time": 0.01}, config={"bounds": bounds}) as made:
        yield made
        assert "Traceback" not in made.log()


def ask(connection: socket.socket, request: bytes = VERSION) -> tuple[int, dict[str, str]]:
    """Status and headers; 0 where the server has closed."""
    connection.sendall(request)
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return 0, {}
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(first.split()[1]), headers


def test_no_proxys_pool_outlives_a_connection() -> None:
    # nginx and Envoy keep them for 60 s, or an hour where told to; 75 s is nginx' own answer
    assert DEFAULT_BOUNDS.keep_alive_timeout >= 75


def test_a_connection_is_reused_at_every_age(server: LiveServer) -> None:
    def reuse(age: float) -> None:
        with server.connect() as connection:
            for _ in range(2):
                status, headers = ask(connection)
                assert status == 200 and "connection" not in headers
                time.sleep(age * IDLE)
            assert ask(connection)[0] == 200

    ages = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85)
    with ThreadPoolExecutor(len(ages)) as pool:
        assert list(pool.map(reuse, ages)) == [None] * len(ages)


def test_an_idle_connection_is_closed_in_the_end(server: LiveServer) -> None:
    with server.connect() as connection:
        assert ask(connection)[0] == 200
        began = time.monotonic()
        assert connection.recv(1) == b""
        assert IDLE * 0.9 < time.monotonic() - began < IDLE * 5


def test_a_request_that_takes_longer_is_not_idle(server: LiveServer) -> None:
    with server.connect() as connection:
        assert ask(connection)[0] == 200
        slow = raw_request("/v1/completions", {"prompt": "x", "max_tokens": 150})
        began = time.monotonic()
        assert ask(connection, slow)[0] == 200
        assert time.monotonic() - began > IDLE
        assert ask(connection)[0] == 200


def test_what_is_told_is_less_than_what_holds(tmp_path: Path) -> None:
    config: dict[str, dict[str, int]] = {"bounds": {"keep_alive_timeout": 100}}
    with live_server(tmp_path / "log", config=config) as server, server.connect() as connection:
        status, headers = ask(connection)
        assert (status, headers["keep-alive"]) == (200, "timeout=95")
    config = {"bounds": {"keep_alive_timeout": 0}}
    with live_server(tmp_path / "log", config=config) as server, server.connect() as connection:
        status, headers = ask(connection)
        assert (status, headers["connection"]) == (200, "close")
        assert connection.recv(1) == b""


def test_the_last_answer_before_the_end_says_so(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", backend={"step_time": 0.02}) as server:
        with server.connect() as busy, server.connect() as idle:
            assert ask(idle)[0] == 200
            answers: list[tuple[int, dict[str, str]]] = []
            body = {"prompt": "x", "max_tokens": 100}
            running = threading.Thread(
                target=lambda: answers.append(ask(busy, raw_request("/v1/completions", body)))
            )
            running.start()
            eventually(lambda: server.running() == 1)
            server.signal(signal.SIGTERM)
            eventually(lambda: "draining" in server.log())
            # an idle connection is still answered, for the last time
            status, headers = ask(idle, raw_request("/v1/completions", body))
            assert (status, headers["connection"]) == (503, "close") and "retry-after" in headers
            assert idle.recv(1) == b""
            running.join()
            assert answers[0][0] == 200 and answers[0][1]["connection"] == "close"
        assert server.wait() == 0
