"""What a connection may do, over real sockets: how many, how large a head, how slow."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse

import httpx
import pytest

from paceline.http.bounds import Bounds
from paceline.http.connections import allow_open_files
from tests.server.helpers import say
from tests.server.live_process import LiveServer, eventually, live_server, raw_request

TEXT = "/v1/completions"
PATIENCE = 1.0
BOUNDS = {
    "max_head_bytes": 4096,
    "max_headers": 20,
    "max_connections": 12,
    "receive_timeout": PATIENCE,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    with live_server(log, backend={"step_time": 0.01}, config={"bounds": BOUNDS}) as made:
        yield made
        assert "Traceback" not in made.log()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def refused(server: LiveServer, answer: bytes, status: int) -> str:
    """The message of an answer that a connection gives by itself: an error like any other, whose
    id leads to the log."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].startswith(f"HTTP/1.1 {status} "), lines
    headers = dict(line.split(": ", 1) for line in lines[1:])
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close" and len(headers["x-request-id"]) == 32
    logged = f"refused id={headers['x-request-id']} status={status} client=127.0.0.1\n"
    assert server.log().count(logged) == 1
    assert ("retry-after" in headers) == (status == 503)
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["code"] == status and error["type"] and error["param"] is None
    message: str = error["message"]
    return message


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
def test_a_head_is_a_get_without_its_body(server: LiveServer, path: str) -> None:
    whole = httpx.get(f"{server.url}{path}")
    with server.connect() as connection:
        connection.sendall(
            f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            + b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        answers = read_all(connection)
    head, _, rest = answers.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    assert f"content-type: {whole.headers['content-type']}" in lines
    assert any(line.startswith("content-length: ") and line[16:] != "0" for line in lines)
    # the next answer follows at once
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n") and rest.endswith(b'"}')


@pytest.mark.parametrize("stream", [False, True])
def test_who_knows_no_chunks_is_sent_none(server: LiveServer, stream: bool) -> None:
    """HTTP/1.0, as some proxies and load tools speak it: the end of the connection is the end."""
    asked = {"prompt": "x", "max_tokens": 5, "logit_bias": say("a"), "stream": stream}
    with server.connect() as connection:
        connection.sendall(raw_request(TEXT, asked).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok" and "connection: close" in lines
    assert not any(line.startswith("transfer-encoding") for line in lines)
    if stream:
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(event.startswith(b"data: ") for event in events[:-1])
        chunks = [json.loads(event[6:]) for event in events[:-2]]
        assert "".join(c["text"] for each in chunks for c in each["choices"]) == "aaaaa"
    else:
        assert f"content-length: {len(body)}" in lines
        assert json.loads(body)["choices"][0]["text"] == "aaaaa"


def test_a_packed_body_is_named_as_that(server: LiveServer) -> None:
    answer = httpx.post(
        f"{server.url}{TEXT}",
        content=b"\x1f\x8b",
        headers={"content-type": "application/json", "content-encoding": "gzip"},
    )
    assert answer.status_code == 400
    assert "Content-Encoding 'gzip' is not served" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200), ("1.0", 2, 400)],
)
def test_a_request_has_one_host(server: LiveServer, version: str, hosts: int, status: int) -> None:
    with server.connect() as connection:
        lines = "Host: x\r\n" * hosts + "Connection: close\r\n"
        connection.sendall(f"GET /version HTTP/{version}\r\n{lines}\r\n".encode())
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 400:
        message = json.loads(body)["error"]["message"]
        assert message == f"a request must have one Host header, got {hosts}"


@pytest.mark.parametrize("count", [10, 100, 20_000])
def test_the_number_of_headers(server: LiveServer, count: int) -> None:
    lines = b"".join(b"A%d: b\r\n" % i for i in range(count))
    with server.connect() as connection:
        try:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        except ConnectionError:
            assert count > 1000
        status = connection.recv(4096).split(b"\r\n")[0] if count <= 1000 else b""
    if count == 10:
        assert status == b"HTTP/1.1 200 OK"
    elif status:
        assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_the_size_of_a_head(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 3000 + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 4200)
        assert "4096 bytes" in refused(server, read_all(connection), 431)


def test_what_is_sent_ahead_of_a_head_is_not_part_of_it(server: LiveServer) -> None:
    """A client that does not wait for answers: one body, and the beginning of the next request."""
    first = raw_request(TEXT, {"prompt": "x" * 5000, "max_tokens": 1, "truncate_prompt_tokens": 1})
    with server.connect() as connection:
        connection.sendall(first + b"GET /version HT")
        time.sleep(0.2)
        connection.sendall(b"TP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2, answers
    # it is still bounded
    with server.connect() as connection:
        connection.sendall(first + b"GET /version HTTP/1.1\r\n")
        time.sleep(0.2)
        connection.sendall(b"A: " + b"b" * 5000)
        assert b" 431 " in read_all(connection)


def test_too_many_headers_are_counted(server: LiveServer) -> None:
    lines = b"".join(b"A%d: b\r\n" % i for i in range(30))
    with server.connect() as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        assert refused(server, read_all(connection), 431) == "a request may have 20 headers, got 31"


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_costs_no_body(server: LiveServer, protocol: str) -> None:
    """As the JDK's client asks for it with every first request, and sends the body apart."""
    asked = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AA\r\n"
    good = raw_request(TEXT, {"prompt": "x", "max_tokens": 2, "logit_bias": say("a")})
    head, _, body = good.partition(b"\r\n\r\n")
    hidden = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n".ljust(len(body))
    with server.connect() as connection:
        for text, status in ((body, 200), (hidden, 400)):
            connection.sendall(head + b"\r\n" + asked.encode() + b"\r\n")
            time.sleep(0.05)
            connection.sendall(text)
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == status and json.loads(answer.read())
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = read_all(connection)
    assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 ") == 1


def test_what_is_no_request_waits_its_turn(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(raw_request(TEXT, {"prompt": "x", "max_tokens": 20}) + b"\x00\x00")
        answers = read_all(connection)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == 2 and b"HTTP/1.1 400 " in answers


def test_what_is_no_request(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /version HTPP/1.1\r\n\r\n")
        assert "not an HTTP request" in refused(server, read_all(connection), 400)


def test_the_number_of_connections(server: LiveServer) -> None:
    with ExitStack() as opened:
        for _ in range(BOUNDS["max_connections"]):  # type: ignore[call-overload]
            connection = opened.enter_context(server.connect())
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        one_more = opened.enter_context(server.connect())
        assert "limit of 12 connections" in refused(server, read_all(one_more), 503)
    eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 5)


def test_a_connection_that_says_nothing_is_closed(server: LiveServer) -> None:
    started = time.monotonic()
    with server.connect() as connection:
        assert read_all(connection) == b""
    assert PATIENCE * 0.9 < time.monotonic() - started < PATIENCE + 5


@pytest.mark.parametrize(
    ("part", "more"),
    [
        (b"GET /version HT", b"T"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", b"A"),
        (raw_request(TEXT, {"prompt": "x"})[:-5], b"x"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
            b"5",
        ),
    ],
    ids=["line", "head", "body", "chunks"],
)
def test_a_request_that_does_not_arrive_is_ended(
    server: LiveServer, part: bytes, more: bytes
) -> None:
    started = time.monotonic()
    with server.connect() as connection:
        connection.sendall(part)
        time.sleep(PATIENCE / 2)
        # a byte now and then does not help
        connection.sendall(more)
        answer = read_all(connection)
    assert "within 1 s" in refused(server, answer, 408)
    assert time.monotonic() - started < PATIENCE + 5
    eventually(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0}, 5)


def test_a_large_body_may_take_its_time(server: LiveServer) -> None:
    """Where it comes at a rate: 40 KiB in the time that one word gets."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * 40_000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with server.connect() as connection:
        connection.sendall(head + body[:30_000])
        time.sleep(1.5 * PATIENCE)
        connection.sendall(body[30_000:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_an_answer_takes_as_long_as_it_takes(server: LiveServer) -> None:
    """Also where the next request was begun meanwhile, on the same connection."""
    tokens = round(1.6 * PATIENCE / 0.01)
    body = {"prompt": "go", "max_tokens": tokens, "logit_bias": say("x"), "stream": True}
    with server.connect() as connection:
        connection.sendall(raw_request(TEXT, body))
        started = time.monotonic()
        assert connection.recv(10).startswith(b"HTTP/1.1 2")
        connection.sendall(b"GET /version HT")
        seen = b""
        while b"[DONE]" not in seen:
            part = connection.recv(65536)
            assert part, seen[-300:]
            seen += part
        assert time.monotonic() - started > 1.2 * PATIENCE
        assert b" 408 " not in seen
        connection.sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
        rest = b""
        while b"version" not in rest:
            part = connection.recv(4096)
            assert part, rest
            rest += part
        assert b"HTTP/1.1 200 OK" in rest


def test_room_for_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [1024, 2048]
    made: list[tuple[int, int]] = []
    module = "paceline.http.connections.resource"
    monkeypatch.setattr(f"{module}.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(f"{module}.setrlimit", lambda _, pair: made.append(pair))
    assert allow_open_files(Bounds(max_connections=512)) == 512 and not made
    assert allow_open_files(Bounds(max_connections=1500)) == 1500
    assert made == [(1756, 2048)] and not caplog.records
    assert allow_open_files(Bounds(max_connections=4000)) == 1792
    assert made[-1] == (2048, 2048)
    assert "max_connections_lowered from=4000 to=1792" in caplog.text
