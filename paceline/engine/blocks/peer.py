"""KV blocks between engines over TCP. ::

    asks                                        gives
      <--------------------------------- Hello(nonce)
      Ask(proof, nonce, fingerprint, hashes) --->
      <--------------------------- Have(count, proof)
      <------- count times: crc32 4, bytes of a block
      Ask(...) --->                       (the rest, on the same connection)

A message is a u32 length and MessagePack. Both sides prove that they know the key, by HMAC over the
other's nonce, so the key itself is never sent, and blocks from a stranger are not taken. Nothing is
encrypted: KV of a prompt is as private as the prompt, and belongs in a private network.

This module does not know requests, or which blocks an engine has.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from struct import Struct
from typing import Final, TypeAlias, TypeVar
from zlib import crc32

import msgspec

from paceline.engine.blocks.keeper import Asked
from paceline.engine.types import parse_kv_url
from paceline.errors import ConfigError

__all__ = ["BlockServer", "Peer"]

_log = logging.getLogger(__name__)

_LENGTH: Final = Struct("<I")
_MOST_HASHES: Final = 4096
# bytes of a message: 4,096 hashes of 32 bytes, and what is around them
_MOST_MESSAGE: Final = 160 << 10
_NONCE: Final = 32
# connections open at once, more are closed; and answers in memory, for which others wait
_MOST_PEERS: Final = 16
_MOST_ANSWERS: Final = 4
# seconds without a question after which a connection is closed, and for an answer of the engine
_IDLE_S: Final = 10.0
# seconds to connect at most, and between looks whether an answer is still wanted
_CONNECT_S: Final = 2.0
_LOOK_S: Final = 0.1
# bytes of one piece of a read
_PIECE: Final = 4 << 20
_ASKS: Final = b"paceline-kv-ask"
_GIVES: Final = b"paceline-kv-give"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    nonce: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    proof: bytes
    nonce: bytes
    fingerprint: bytes
    hashes: list[bytes]


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    count: int
    proof: bytes


_M = TypeVar("_M", Hello, Ask, Have)
# seconds that are left; 0 or less: nothing more is wanted
_Left: TypeAlias = Callable[[], float]


class Peer:
    """A ``store.BlockSource`` at another engine."""

    def __init__(self, url: str, fingerprint: bytes, block_bytes: int, key: bytes) -> None:
        self._address = parse_kv_url(url)
        self._fingerprint, self._block, self._key = fingerprint, block_bytes, key

    def read(self, hashes: Sequence[bytes], left: _Left) -> Iterator[bytes]:
        if (rest := left()) <= 0.0:
            return
        with socket.create_connection(self._address, min(rest, _CONNECT_S)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = _receive(connection, Hello, left)
            while hashes:
                asked = hashes[:_MOST_HASHES]
                nonce = secrets.token_bytes(_NONCE)
                proof = _prove(self._key, _ASKS, hello.nonce, self._fingerprint)
                _send(connection, Ask(proof, nonce, self._fingerprint, list(asked)), left)
                have = _receive(connection, Have, left)
                if not hmac.compare_digest(have.proof, _prove(self._key, _GIVES, nonce)):
                    raise OSError(f"{self._address[0]} does not know the key")
                count = min(have.count, len(asked))
                yield from self._blocks(connection, asked[: max(0, count)], left)
                if count <= 0:
                    return
                hashes = hashes[count:]

    def _blocks(
        self, connection: socket.socket, hashes: Sequence[bytes], left: _Left
    ) -> Iterator[bytes]:
        """Yield the blocks of one answer. Raises OSError at the first that is not as it was sent,
        behind those before it."""
        most = max(1, _PIECE // (self._block + 4))
        while hashes:
            wanted, hashes = hashes[:most], hashes[most:]
            piece = bytearray()
            broken = False
            frames = memoryview(_take(connection, len(wanted) * (self._block + 4), left))
            for index, block_hash in enumerate(wanted):
                frame = frames[index * (self._block + 4) :][: self._block + 4]
                (checksum,) = _LENGTH.unpack(frame[:4])
                broken = crc32(frame[4:], crc32(block_hash)) != checksum
                if broken:
                    break
                piece += frame[4:]
            if piece:
                yield bytes(piece)
            if broken:
                raise OSError("a block has a wrong checksum")


class BlockServer:
    """Answers peers at a port, each connection on a thread of its own.

    Args:
        ask: passes a question to the engine, see ``BlockKeeper.ask``.
        listener: bound already; owned from here on.
    """

    def __init__(
        self,
        listener: socket.socket,
        ask: Callable[[Asked], None],
        fingerprint: bytes,
        block_bytes: int,
        key: bytes,
    ) -> None:
        if not key:
            raise ConfigError("--kv-port needs a key: set PACELINE_KV_KEY")
        self._listener, self._ask, self._key = listener, ask, key
        self._fingerprint, self._block = fingerprint, block_bytes
        self._connections: set[socket.socket] = set()
        self._answers = threading.Semaphore(_MOST_ANSWERS)
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._accept, name="kv-port", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                _hang_up(connection)
        # wakes the accept
        _hang_up(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                with self._lock:
                    if self._closed:
                        return
                # out of descriptors, for a moment
                time.sleep(0.1)
                continue
            with self._lock:
                refuse = self._closed or len(self._connections) >= _MOST_PEERS
                if not refuse:
                    self._connections.add(connection)
            if refuse:
                connection.close()
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="kv-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(_NONCE)
            _send(connection, Hello(nonce), _within(_IDLE_S))
            while True:
                ask = _receive(connection, Ask, _within(_IDLE_S))
                proof = _prove(self._key, _ASKS, nonce, ask.fingerprint)
                if not hmac.compare_digest(ask.proof, proof):
                    _log.warning("kv_peer_refused: a wrong key")
                    return
                if not self._answers.acquire(timeout=_IDLE_S):
                    return
                try:
                    self._answer(connection, ask)
                finally:
                    self._answers.release()
        except (OSError, msgspec.MsgspecError):
            # it hung up, stood still or sent something else: it computes instead
            return
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, ask: Ask) -> None:
        hashes = ask.hashes[:_MOST_HASHES] if ask.fingerprint == self._fingerprint else []
        data = b""
        if hashes:
            reply: SimpleQueue[bytes] = SimpleQueue()
            self._ask(Asked(hashes, reply.put, time.monotonic() + _IDLE_S))
            try:
                data = reply.get(timeout=_IDLE_S)
            except Empty:
                # the engine is in a long step
                data = b""
        size = self._block
        count = len(data) // size
        _send(connection, Have(count, _prove(self._key, _GIVES, ask.nonce)), _within(_IDLE_S))
        view = memoryview(data)
        for index in range(count):
            block = view[index * size : (index + 1) * size]
            checksum = _LENGTH.pack(crc32(block, crc32(hashes[index])))
            _put(connection, checksum, _within(_IDLE_S))
            _put(connection, block, _within(_IDLE_S))


def _prove(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256")


def _within(seconds: float) -> _Left:
    until = time.monotonic() + seconds
    return lambda: until - time.monotonic()


def _send(connection: socket.socket, message: Hello | Ask | Have, left: _Left) -> None:
    data = msgspec.msgpack.encode(message)
    _put(connection, _LENGTH.pack(len(data)) + data, left)


def _put(connection: socket.socket, data: bytes | memoryview, left: _Left) -> None:
    connection.settimeout(max(0.001, left()))
    connection.sendall(data)


def _receive(connection: socket.socket, kind: type[_M], left: _Left) -> _M:
    """Return a message. Raises OSError or msgspec.MsgspecError."""
    (length,) = _LENGTH.unpack(_take(connection, _LENGTH.size, left))
    if length > _MOST_MESSAGE:
        raise OSError(f"a message of {length} bytes, at most {_MOST_MESSAGE}")
    return msgspec.msgpack.decode(_take(connection, length, left), type=kind)


def _take(connection: socket.socket, count: int, left: _Left) -> bytearray:
    """Return the next ``count`` bytes. Raises OSError at the end, or when none are wanted."""
    data, got = bytearray(count), 0
    view = memoryview(data)
    while got < count:
        rest = left()
        if rest <= 0.0:
            raise TimeoutError("the peer did not answer in time")
        connection.settimeout(min(rest, _LOOK_S))
        try:
            more = connection.recv_into(view[got:])
        except TimeoutError:
            continue
        if not more:
            raise ConnectionError("the peer hung up")
        got += more
    return data


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # not connected any more
        return
