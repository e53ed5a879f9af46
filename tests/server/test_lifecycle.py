"""A whole server process: drains, deaths, and callers who hang up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import ConfigError
from paceline.server.lifecycle import bind
from tests.server.helpers import chat_body, events, metric, say
from tests.server.live_process import LiveServer, eventually, live_server, raw_request

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SLOW = {"step_time": 0.01}


def long_body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "go", "max_tokens": 3000, "logit_bias": say("x"), **fields}


def post_in_background(server: LiveServer, body: dict[str, Any]) -> list[httpx.Response]:
    """The response appears in the list when it is there."""
    answers: list[httpx.Response] = []
    threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + TEXT, json=body, timeout=30)),
        daemon=True,
    ).start()
    eventually(lambda: server.running() > 0)
    return answers


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_drain_lets_requests_end(tmp_path: Path, number: signal.Signals) -> None:
    with live_server(tmp_path / "log", backend=SLOW) as server:
        answers = post_in_background(server, long_body(max_tokens=60))
        streamed = httpx.Client(base_url=server.url)
        body = long_body(max_tokens=60, stream=True)
        with streamed.stream("POST", TEXT, json=body, timeout=30) as stream:
            parts = stream.iter_text()
            text = next(parts)
            server.signal(number)
            eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            refused = httpx.post(server.url + TEXT, json=long_body())
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) == 30
            assert "shutting down" in refused.json()["error"]["message"]
            text += "".join(parts)
        streamed.close()
        assert server.wait() == 0
        said = "".join(chunk["choices"][0]["text"] for chunk in events(text))
        assert said == "x" * 60
        (answer,) = answers
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == "x" * 60


def test_drain_timeout_aborts_the_rest(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", backend=SLOW, config={"drain_timeout": 0.3}) as server:
        answers = post_in_background(server, long_body())
        with httpx.stream("POST", server.url + TEXT, json=long_body(stream=True)) as stream:
            parts = stream.iter_text()
            text = next(parts)
            started = time.monotonic()
            server.signal()
            text += "".join(parts)
        assert server.wait() == 0
        assert 0.25 < time.monotonic() - started < 5
        error = events(text)[-1]["error"]
        assert (error["code"], error["type"]) == (503, "Service Unavailable")
        assert "shutting down" in error["message"]
        assert answers[0].status_code == 503


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", backend=SLOW) as server:
        answers = post_in_background(server, long_body())
        started = time.monotonic()
        server.signal()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        server.signal()
        assert server.wait() == 0
        assert time.monotonic() - started < 5
        assert answers[0].status_code == 503


def test_idle_server_ends_at_once(tmp_path: Path) -> None:
    with live_server(tmp_path / "log") as server:
        idle = server.connect()
        started = time.monotonic()
        server.signal()
        assert server.wait() == 0
        assert time.monotonic() - started < 3
        idle.close()


def test_engine_failure_ends_the_server(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", backend=SLOW, die_on=7) as server:
        answers = post_in_background(server, long_body())
        fatal = httpx.post(server.url + TEXT, json={"prompt": [7]})
        assert server.wait() == 1
        for answer in (fatal, answers[0]):
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "is gone" in message
            # neither addresses nor paths leave the server
            assert "0x" not in message
            assert "/var" not in message


def test_killed_engine_process_ends_the_server(tmp_path: Path) -> None:
    with live_server(tmp_path / "log", backend=SLOW, process=True) as server:
        answers = post_in_background(server, long_body())
        with httpx.stream("POST", server.url + TEXT, json=long_body(stream=True)) as stream:
            parts = stream.iter_text()
            text = next(parts)
            assert server.engine_pid is not None
            os.kill(server.engine_pid, signal.SIGKILL)
            text += "".join(parts)
        assert server.wait() == 1
        assert "SIGKILL" in events(text)[-1]["error"]["message"]
        assert answers[0].status_code == 503


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("live") / "log"
    with live_server(log, backend=SLOW, process=True) as server:
        yield server
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rude", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_hanging_up_frees_everything(
    slow: LiveServer, stream: bool, rude: bool, prompts: int
) -> None:
    body = long_body(stream=stream, prompt=["go"] * prompts, n=2)
    connection = slow.connect()
    connection.sendall(raw_request(TEXT, body))
    eventually(lambda: slow.running() == 2 * prompts)
    assert metric(slow.metrics(), "vllm:kv_cache_usage_perc") > 0
    if rude:
        # a reset instead of a goodbye
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()
    eventually(lambda: slow.running() == 0, 5)
    assert metric(slow.metrics(), "vllm:kv_cache_usage_perc") == 0
    eventually(lambda: httpx.get(f"{slow.url}/load").json() == {"server_load": 0}, 5)


def test_hanging_up_in_the_queue(slow: LiveServer) -> None:
    connections = [slow.connect() for _ in range(300)]
    for connection in connections:
        connection.sendall(raw_request(TEXT, long_body(max_tokens=2000)))
    eventually(lambda: metric(slow.metrics(), "vllm:num_requests_waiting") > 0)
    for connection in connections:
        connection.close()
    eventually(lambda: slow.running() == 0, 5)
    eventually(lambda: metric(slow.metrics(), "vllm:num_requests_waiting") == 0, 5)
    eventually(lambda: metric(slow.metrics(), "vllm:kv_cache_usage_perc") == 0, 5)


def test_hanging_up_within_the_body(slow: LiveServer) -> None:
    connection = slow.connect()
    connection.sendall(raw_request(TEXT, long_body())[:-20])
    connection.close()
    eventually(lambda: httpx.get(f"{slow.url}/load").json() == {"server_load": 0}, 5)


def test_endless_head_is_refused(slow: LiveServer) -> None:
    with slow.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 * 2**20:
                connection.sendall(b"X-Long: " + b"x" * 8000 + b"\r\n")
                sent += 8010
            pytest.fail(f"{sent} bytes of headers were taken")
    assert httpx.get(f"{slow.url}/health").status_code == 200


def test_head_just_too_long_gets_a_status(slow: LiveServer) -> None:
    with slow.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 66_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 431 ")


def test_head_of_a_usual_size_is_fine(slow: LiveServer) -> None:
    headers = {f"X-{i}": "y" * 1000 for i in range(30)}
    response = httpx.post(
        slow.url + TEXT, json={"prompt": "x" * 4000, "max_tokens": 1}, headers=headers
    )
    assert response.status_code == 200


def test_two_hundred_callers(slow: LiveServer) -> None:
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=slow.url, limits=limits, timeout=30) as client:

        def ask(number: int) -> str:
            letter = chr(ord("a") + number % 26)
            fields = chat_body(f"caller {number}", max_tokens=20, logit_bias=say(letter))
            if number % 2:
                answer = client.post(CHAT, json=fields)
                assert answer.status_code == 200, answer.text
                return str(answer.json()["choices"][0]["message"]["content"])
            answer = client.post(CHAT, json={**fields, "stream": True})
            assert answer.status_code == 200, answer.text
            return "".join(c["choices"][0]["delta"]["content"] for c in events(answer.text))

        with ThreadPoolExecutor(200) as pool:
            texts = list(pool.map(ask, range(200)))
    assert texts == [chr(ord("a") + i % 26) * 20 for i in range(200)]
    eventually(lambda: slow.running() == 0, 5)


def test_tokens_arrive_one_by_one(slow: LiveServer) -> None:
    body = long_body(max_tokens=20, stream=True)
    times = []
    with httpx.stream("POST", slow.url + TEXT, json=body) as stream:
        for _ in stream.iter_raw():
            times.append(time.monotonic())
    assert len(times) >= 5
    # 20 steps of 10 ms each; the first token does not wait for the last
    assert times[-1] - times[0] > 0.1


def test_taken_port_is_a_clear_error() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use.*--port"):
            bind("127.0.0.1", port)


# of the second no resolver can be asked
@pytest.mark.parametrize("host", ["no such host", "a..b"])
def test_unknown_host_is_a_clear_error(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot resolve host '{host}'"):
        bind(host, 0)
