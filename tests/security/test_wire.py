"""The wire itself: framing that two parsers could read differently, floods, and open ports."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.live_process import LiveServer, eventually, live_server

BODY = b'{"prompt": "x", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# what would be smuggled behind a body that the other side thinks longer or shorter
HIDDEN = b"GET /version HTTP/1.1\r\nHost: smuggled\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("live") / "log"
    config = {"max_body_bytes": 4096, "bounds": {"receive_timeout": 2.0}}
    with live_server(log, process=True, config=config) as made:
        yield made
        assert "Traceback" not in made.log()


def exchange(server: LiveServer, request: bytes) -> bytes:
    """Everything that comes back, until the server has nothing more to say."""
    with server.connect() as connection:
        connection.settimeout(3)
        parts = []
        try:
            connection.sendall(request)
            while part := connection.recv(65536):
                parts.append(part)
        except (ConnectionError, TimeoutError):
            pass
    return b"".join(parts)


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


CLOSE = b"Connection: close\r\n"


def test_a_chunked_body_is_a_body(server: LiveServer) -> None:
    request = chunked(BODY[:5], BODY[5:]).replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n", 1)
    assert exchange(server, request).startswith(b"HTTP/1.1 200 ")


def test_a_chunked_body_is_bounded(server: LiveServer) -> None:
    """It has no length to be refused by, so it is counted as it comes."""
    answer = exchange(server, chunked(*[b" " * 500] * 20, BODY))
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b"4096" in answer


TE = b"Transfer-Encoding: chunked\r\n"
SMUGGLED = {
    "length and chunks": HEAD + b"Content-Length: 4\r\n" + TE + b"\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": HEAD + TE + b"Content-Length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + b"Content-Length: 32\r\nContent-Length: 0\r\n\r\n" + BODY + HIDDEN,
    "a list of lengths": HEAD + b"Content-Length: 32, 32\r\n\r\n" + BODY + HIDDEN,
    "a length with a sign": HEAD + b"Content-Length: +32\r\n\r\n" + BODY + HIDDEN,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY + HIDDEN,
    "a length in hexadecimal": HEAD + b"Content-Length: 0x20\r\n\r\n" + BODY + HIDDEN,
    "a huge length": HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n" + BODY + HIDDEN,
    "a length with a space before the colon": HEAD + b"Content-Length : 32\r\n\r\n" + BODY + HIDDEN,
    "a chunk size with a sign": HEAD + TE + b"\r\n+20\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size with 0x": HEAD + TE + b"\r\n0x20\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size that overflows": HEAD + TE + b"\r\n" + b"f" * 20 + b"\r\n" + BODY + HIDDEN,
    "a chunk that ends elsewhere": HEAD + TE + b"\r\n20\r\n" + BODY + b"XX0\r\n\r\n" + HIDDEN,
    "an unknown coding": HEAD + b"Transfer-Encoding: chunked, odd\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks not last": HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a folded header": HEAD + b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 4\r\n\r\n"
    + b"0\r\n\r\n" + HIDDEN,
    "a bare line feed": b"POST /v1/completions HTTP/1.1\nContent-Length: 4\n" + TE + b"\n0\r\n\r\n"
    + HIDDEN,
    "a null in a header": HEAD + b"X: a\x00b\r\nContent-Length: 32\r\n\r\n" + BODY + HIDDEN,
    "no version": b"POST /v1/completions\r\n\r\n" + HIDDEN,
    "HTTP/2 by prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLED)
def test_nothing_is_smuggled(server: LiveServer, name: str) -> None:
    """Refused, and what came behind is not answered as a request of its own."""
    answer = exchange(server, SMUGGLED[name])
    assert b'"version"' not in answer, answer
    assert b"HTTP/1.1 200" not in answer, answer
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    assert httpx.get(f"{server.url}/health").status_code == 200


def resident(pid: int) -> int:
    """Bytes of memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("lines", [b"A: " + b"x" * 2**25, b"A: b\r\n" * 200_000])
def test_a_giant_head_takes_no_memory(server: LiveServer, lines: bytes) -> None:
    before = resident(server.process.pid)
    answer = exchange(server, b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n")
    assert b" 200 " not in answer
    assert resident(server.process.pid) - before < 64 * 2**20
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_bodies_that_are_not_json_are_not_read(server: LiveServer) -> None:
    """No route parses a form: a boundary of dashes burns nothing."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    posts = {
        path: methods["post"].get("requestBody", {}).get("content", {})
        for path, methods in paths.items()
        if "post" in methods
    }
    kinds = {
        "multipart/form-data; boundary=----x": b"-" * 4000,
        "application/x-www-form-urlencoded": b"prompt=x&" * 400,
        "text/plain": BODY,
    }
    tried = 0
    for path, content in posts.items():
        for kind, body in kinds.items():
            if "application/json" not in content or kind.split(";")[0] in content:
                continue
            tried += 1
            url = server.url + re.sub(r"\{[^}]*\}", "x", path)
            answer = httpx.post(url, content=body, headers={"Content-Type": kind})
            if path.endswith("_lora_adapter"):
                # refused before the body is looked at, on a server without adapters
                assert answer.status_code == 403, (path, kind)
                continue
            assert answer.status_code == 400, (path, kind)
            assert "application/json" in json.dumps(answer.json()), (path, kind)
    assert tried >= 20


def listening(pids: set[int]) -> set[int]:
    """TCP ports that these processes listen on."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if match := re.fullmatch(r"socket:\[(\d+)\]", target):
                sockets.add(match[1])
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in sockets:
                ports.add(int(columns[1].rsplit(":", 1)[1], 16))
    return ports


def test_only_the_apis_port_is_open(server: LiveServer) -> None:
    """The engine's process is reached through a socket in a folder of its user's alone."""
    assert server.engine_pid is not None
    assert listening({server.process.pid, server.engine_pid}) == {server.port}
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = {
        os.readlink(fd)
        for fd in Path(f"/proc/{server.process.pid}/fd").iterdir()
        if fd.is_symlink() and os.path.lexists(fd)
    }
    paths = {row[7] for row in unix if len(row) > 7 and f"socket:[{row[6]}]" in inodes}
    for path in paths:
        if path.startswith("/"):
            assert Path(path).parent.stat().st_mode & 0o077 == 0, path


def test_vanished_callers_leave_nothing(server: LiveServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": True, "n": 2}).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    for _ in range(12):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
    eventually(lambda: server.running() == 0, 15)
    eventually(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0}, 15)
