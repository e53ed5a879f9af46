"""Blocks over TCP: what comes is what was sent, and a peer that misbehaves costs its deadline."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from queue import SimpleQueue
from zlib import crc32

import pytest

from paceline.engine.blocks import peer as module
from paceline.engine.blocks.keeper import Asked
from paceline.engine.blocks.peer import BlockServer, Peer
from paceline.engine.types import parse_kv_url
from paceline.errors import ConfigError

SIZE = 1000
PRINT, KEY = bytes(32), b"a shared key"
HASHES = [sha256(b"%d" % n).digest() for n in range(10)]
BLOCKS = {each: bytes([n]) * SIZE for n, each in enumerate(HASHES)}


def have(asked: Asked) -> None:
    """Answer as an engine that has all but the last two blocks would."""
    data = b""
    for each in asked.hashes:
        if each not in HASHES[:8]:
            break
        data += BLOCKS[each]
    asked.reply(data)


@contextmanager
def serving(ask: Callable[[Asked], None] = have) -> Iterator[str]:
    server = BlockServer(socket.create_server(("127.0.0.1", 0)), ask, PRINT, SIZE, KEY)
    try:
        yield f"tcp://127.0.0.1:{server.port}"
    finally:
        server.close()


def read(
    url: str, hashes: Sequence[bytes] = HASHES, key: bytes = KEY, **more: float
) -> list[bytes]:
    data = b"".join(
        Peer(url, PRINT, SIZE, key).read(hashes, module._within(more.get("timeout", 30.0)))
    )
    return [data[i : i + SIZE] for i in range(0, len(data), SIZE)]


def test_the_run_that_the_peer_has_comes() -> None:
    with serving() as url:
        assert read(url) == [BLOCKS[each] for each in HASHES[:8]]
        assert read(url, HASHES[8:]) == []
        assert list(Peer(url, b"x" * 32, SIZE, KEY).read(HASHES, lambda: 30.0)) == []


def test_an_answer_in_parts_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def few(question: Asked) -> None:
        asked.append(len(question.hashes))
        have(Asked(question.hashes[:3], question.reply))

    monkeypatch.setattr(module, "_PIECE", 2 * SIZE)
    with serving(few) as url:
        assert read(url, HASHES[:8]) == [BLOCKS[each] for each in HASHES[:8]]
    assert asked == [8, 5, 2]


def test_neither_side_talks_to_one_without_the_key() -> None:
    asked = list[Asked]()
    with serving(asked.append) as url, pytest.raises(OSError, match="hung up"):
        read(url, key=b"another")
    assert not asked

    def pretend(connection: socket.socket) -> None:
        module._send(connection, module.Hello(bytes(32)), module._within(30.0))
        module._receive(connection, module.Ask, module._within(30.0))
        module._send(connection, module.Have(1, bytes(32)), module._within(30.0))

    with fake(pretend) as url, pytest.raises(OSError, match="does not know the key"):
        read(url)
    with pytest.raises(ConfigError, match="PACELINE_KV_KEY"), closing(socket.socket()) as unused:
        BlockServer(unused, have, PRINT, SIZE, b"")


@contextmanager
def fake(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A peer of which each connection is served by ``serve``, and left open then."""
    listener = socket.create_server(("127.0.0.1", 0))
    left: list[socket.socket] = []

    def run() -> None:
        try:
            connection, _ = listener.accept()
            left.append(connection)
            serve(connection)
        except OSError:
            return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in left:
            connection.close()


def begin(connection: socket.socket, count: int) -> None:
    """Answer a question as one that has the first ``count`` blocks does, and send the first."""
    until = module._within(30.0)
    module._send(connection, module.Hello(bytes(32)), until)
    ask = module._receive(connection, module.Ask, until)
    proof = module._prove(KEY, b"paceline-kv-give", ask.nonce)
    module._send(connection, module.Have(count, proof), until)
    checksum = crc32(BLOCKS[HASHES[0]], crc32(HASHES[0]))
    connection.sendall(module._LENGTH.pack(checksum) + BLOCKS[HASHES[0]])


def test_a_peer_that_stops_inside_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", SIZE)

    def stop(connection: socket.socket) -> None:
        begin(connection, 3)
        connection.sendall(b"abc")

    with fake(stop) as url:
        blocks = Peer(url, PRINT, SIZE, KEY).read(HASHES, module._within(1.0))
        assert next(blocks) == BLOCKS[HASHES[0]], "what came before is of use"
        with pytest.raises(TimeoutError):
            next(blocks)


def test_a_read_that_is_not_wanted_any_more_ends() -> None:
    wanted = True

    def stop(connection: socket.socket) -> None:
        nonlocal wanted
        begin(connection, 3)
        wanted = False

    with fake(stop) as url, pytest.raises(TimeoutError):
        list(Peer(url, PRINT, SIZE, KEY).read(HASHES, lambda: 600.0 if wanted else 0.0))


@pytest.mark.parametrize("count", [-1, -(2**40), 0])
def test_a_count_below_one_is_none(count: int) -> None:
    with fake(lambda connection: begin(connection, count)) as url:
        assert read(url) == []


def test_few_answers_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ANSWERS", 1)
    asked, came = SimpleQueue[Asked](), list[int]()
    with serving(asked.put) as url:
        readers = [threading.Thread(target=lambda: came.append(len(read(url)))) for _ in range(3)]
        for reader in readers:
            reader.start()
        # each asks for the rest, too
        for _ in range(2 * len(readers)):
            question = asked.get(timeout=60)
            assert asked.empty()
            have(question)
        for reader in readers:
            reader.join()
    assert came == [8, 8, 8]


def test_a_wrong_checksum_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(connection: socket.socket) -> None:
        begin(connection, 2)
        connection.sendall(bytes(4 + SIZE))

    with fake(spoil) as url:
        blocks = Peer(url, PRINT, SIZE, KEY).read(HASHES, lambda: 30.0)
        assert next(blocks) == BLOCKS[HASHES[0]]
        with pytest.raises(OSError, match="wrong checksum"):
            next(blocks)


def test_what_is_no_answer() -> None:
    def shout(connection: socket.socket) -> None:
        connection.sendall(b"\xff\xff\xff\xffHTTP/1.1 400 Bad Request\r\n")

    with fake(shout) as url, pytest.raises(OSError, match="at most 163840"):
        read(url)
    with fake(lambda connection: connection.close()) as url, pytest.raises(OSError):
        read(url)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            read(url, timeout=0.2)
        with pytest.raises(OSError):
            silent.close()
            read(url)
    assert read(url, timeout=0.0) == []


def test_a_server_survives_what_is_no_question() -> None:
    with serving() as url:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00abcd", b"\x04\x00"):
            with closing(socket.create_connection(parse_kv_url(url))) as connection:
                module._receive(connection, module.Hello, module._within(30.0))
                # it may have hung up already
                with suppress(OSError):
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    assert connection.recv(1) == b""
        assert len(read(url)) == 8


def test_more_peers_than_are_served_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PEERS", 1)
    with serving() as url, closing(socket.create_connection(parse_kv_url(url))) as first:
        module._receive(first, module.Hello, module._within(30.0))
        with pytest.raises(OSError):
            read(url)


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "tcp://a", "tcp://:5", "tcp://a:99999", "tcp://u:p@a:1", "tcp://a:1/x", ""],
)
def test_only_tcp_host_and_port(url: str) -> None:
    with pytest.raises(ValueError):
        parse_kv_url(url)


def test_addresses() -> None:
    assert parse_kv_url("tcp://[::1]:5700") == ("::1", 5700)
