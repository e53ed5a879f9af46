"""Where one request ends and the next begins: as many answers as requests, and no byte of a body is
read as a head, however the bytes are cut into segments.

Both front doors take their connections by the class that is tried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http.wire import Answer, Wire

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
H2C = (
    (b"Connection", b"Upgrade, HTTP2-Settings"),
    (b"Upgrade", b"h2c"),
    (b"HTTP2-Settings", b"AAMAAABkAAQAAP__"),
)
WEBSOCKET = ((b"connection", b"keep-alive, upgrade"), (b"upgrade", b"websocket"))
UPGRADES = (
    H2C,
    WEBSOCKET,
    ((b"UPGRADE", b"TLS/1.0, h2c"), (b"Connection", b"close"), (b"Connection", b"upgrade")),
    ((b"Upgrade", b""), (b"Connection", b"upgrade")),
    ((b"Upgrade", b"h2c"), (b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")),
    # without the other one of the two nothing is asked for
    ((b"Upgrade", b"h2c"),),
    ((b"Connection", b"Upgrade"),),
)
TRAILERS = b"Host: elsewhere\r\nX-Trailer: 1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@dataclass(frozen=True)
class Sent:
    """One good request."""

    path: str
    body: bytes = b""
    # sizes of its chunks; None: one with a length, or without a body
    chunks: tuple[int, ...] | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    trailers: bytes = b""
    version: bytes = b"1.1"

    @property
    def method(self) -> str:
        return "POST" if self.body or self.chunks is not None else "GET"

    @property
    def closes(self) -> bool:
        return self.version == b"1.0" or (b"Connection", b"close") in self.headers

    @property
    def wire(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.method.encode(), self.path.encode(), self.version)]
        lines += [b"Host: x", *(b"%b: %b" % header for header in self.headers)]
        if self.chunks is None:
            lines += [b"Content-Length: %d" % len(self.body)] * bool(self.body)
            return b"\r\n".join([*lines, b"", self.body])
        out = [b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", b""])]
        rest, sizes = self.body, list(self.chunks)
        while rest:
            size = min(len(rest), sizes.pop() if sizes else len(rest))
            out.append(b"%x;%b=1\r\n%b\r\n" % (size, b"e" * (size % 3 + 1), rest[:size]))
            rest = rest[size:]
        return b"".join([*out, b"0\r\n", self.trailers, b"\r\n"])


def of_wire(loop: asyncio.AbstractEventLoop, *segments: bytes) -> tuple[Wire, list[Answer]]:
    async def run() -> tuple[Wire, list[Answer]]:
        wire = Wire()
        await wire.feed(*segments)
        return wire, await wire.settle()

    return loop.run_until_complete(run())


def check(wire: Wire, answers: list[Answer], sent: list[Sent], bad: bytes = b"") -> None:
    """As many answers as requests, in their order, and the application saw no others; ``bad`` stood
    behind them."""
    closed = next((i for i, request in enumerate(sent) if request.closes), None)
    if closed is not None:
        # nothing behind the last request of a connection is one
        sent, bad = sent[: closed + 1], b""
    good = [answer.body.decode().strip('"') for answer in answers if answer.status == 200]
    assert good[: len(sent)] == [request.path for request in sent]
    for request, (method, path, headers, body) in zip(sent, wire.seen, strict=False):
        assert (method, path, headers[b"host"]) == (request.method, request.path, b"x")
        assert body == request.body or path in wire.early
        assert b"x-trailer" not in headers
    paths = [path for _, path, _, _ in wire.seen]
    # a request whose head is good is seen, and has no body
    assert paths[: len(sent)] == good[: len(sent)] and set(paths[len(sent) :]) <= {"/bad"}
    assert all(body is None for _, path, _, body in wire.seen if path == "/bad")
    assert len(answers) == len(sent) + bool(bad), (answers, wire.transport.written)
    assert wire.closed == bool(bad or closed is not None)
    if bad:
        assert answers[-1].status in (400, 501) or wire.early
        assert answers[-1].headers.get(b"connection") == b"close" or wire.early


AHEAD = Sent("/ahead")
BEHIND = Sent("/behind", b'{"b": 1}')
TRICKS = {
    "a length": Sent("/a", HIDDEN, None, H2C),
    "chunks": Sent("/a", HIDDEN, (7, 1), H2C, TRAILERS),
    "no body": Sent("/a", headers=H2C),
    "no body, chunked": Sent("/a", chunks=(), headers=WEBSOCKET, trailers=TRAILERS),
    "a websocket": Sent("/a", b"\x81\x05hello" + HIDDEN, None, WEBSOCKET),
    "expecting": Sent("/a", HIDDEN, None, (*H2C, (b"Expect", b"100-continue"))),
    "an upgrade in trailers": Sent("/a", HIDDEN, (3,), (), TRAILERS),
}


@pytest.mark.parametrize("trick", TRICKS)
def test_an_upgrade_is_ignored(loop: asyncio.AbstractEventLoop, trick: str) -> None:
    """The request is answered as it stands, and so are its neighbours, cut in two anywhere and in
    single bytes."""
    sent = [AHEAD, TRICKS[trick], BEHIND]
    data = b"".join(request.wire for request in sent)
    cuts = [[data[:at], data[at:]] for at in range(len(data))]
    for segments in (*cuts, [data[at : at + 1] for at in range(len(data))]):
        wire, answers = of_wire(loop, *segments)
        check(wire, answers, sent)
        assert not any(b"upgrade" in headers for _, _, headers, _ in wire.seen[1:])


def test_many_upgrades_in_one_piece(loop: asyncio.AbstractEventLoop) -> None:
    sent = [Sent(f"/{i}", b"x" * (i % 3), None, H2C) for i in range(200)]
    check(*of_wire(loop, b"".join(request.wire for request in sent)), sent)


CHUNKED = b"POST /bad HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
LENGTH = b"POST /bad HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
BAD = {
    "both lengths": LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, upgraded": LENGTH
    + b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": LENGTH + b"Content-Length: 4\r\n\r\nbody",
    "a bare line feed": b"POST /bad HTTP/1.1\nHost: x\nContent-Length: 4\n\nbody",
    "a bare line feed in a head": b"GET /bad HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "a fold": b"GET /bad HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "a fold, upgraded": LENGTH + b"Connection: upgrade\r\nUpgrade: h2c\r\n c\r\n\r\nbody",
    "a chunk of another size": CHUNKED + b"\r\n3\r\nbody\r\n0\r\n\r\n",
    "a chunk size of nothing": CHUNKED + b"\r\n\r\n0\r\n\r\n",
    "a line feed behind a size": CHUNKED + b"\r\n4\nbody\r\n0\r\n\r\n",
    "chunks, upgraded": CHUNKED
    + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n5\r\nbody\r\n0\r\n\r\n",
    "a length as trailer": CHUNKED + b"\r\n4\r\nbody\r\n0\r\nContent-Length: 9\r\n\r\n",
    "a tunnel": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel to a path": b"CONNECT /bad HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a version": b"GET /bad HTTP/2.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
    "no host": b"GET /bad HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "what is no request": b"\x00\x01\x02\x03",
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_request_has_one_answer_and_is_the_last(
    loop: asyncio.AbstractEventLoop, fault: str
) -> None:
    """The answers before it are not lost, and come before."""
    sent = [Sent("/a", HIDDEN, None, H2C), AHEAD]
    data = b"".join(request.wire for request in sent) + BAD[fault] + HIDDEN
    size = len(data) - len(BAD[fault]) - len(HIDDEN)
    for segments in (
        [data],
        [data[:size], data[size:]],
        *([data[: size + at], data[size + at :]] for at in range(1, len(BAD[fault]), 5)),
        [data[at : at + 1] for at in range(len(data))],
    ):
        check(*of_wire(loop, *segments), sent, BAD[fault])


ENDLESS = {
    "trailers": (b"0\r\n", b"A: b\r\n" * 100),
    "one trailer": (b"0\r\nA: ", b"b" * 1000),
    "what a chunk says": (b"4;a=", b"b" * 1000),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_is_no_body_has_a_bound_too(loop: asyncio.AbstractEventLoop, what: str) -> None:
    start, more = ENDLESS[what]

    async def run() -> list[Answer]:
        wire = Wire(max_head_bytes=4096)
        await wire.feed(CHUNKED + b"\r\n4\r\nbody\r\n", start, *[more] * 10)
        assert wire.closed or wire.transport.closed
        return await wire.settle()

    (answer,) = loop.run_until_complete(run())
    assert answer.status == 431 and b"4096 bytes" in answer.body


def test_a_client_of_1_0_is_sent_no_interim_answer(loop: asyncio.AbstractEventLoop) -> None:
    wire, _ = of_wire(
        loop, Sent("/a", b"b", None, ((b"Expect", b"100-continue"),), b"", b"1.0").wire
    )
    assert bytes(wire.transport.written).startswith(b"HTTP/1.1 200 ")
    wire, _ = of_wire(loop, Sent("/a", b"b", None, ((b"Expect", b"100-continue"),)).wire)
    assert bytes(wire.transport.written).startswith(b"HTTP/1.1 100 ")


def test_a_caller_who_sent_ahead_and_left_is_waited_for_by_none(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """The request that is being answered hears of it, and the one behind never starts."""

    async def run() -> Wire:
        wire = Wire(stuck=True)
        await wire.feed(AHEAD.wire + BEHIND.wire)
        await asyncio.wait_for(wire.settle(), 5)
        return wire

    wire = loop.run_until_complete(run())
    assert [path for _, path, _, _ in wire.seen] == ["/ahead"]


TOKENS = st.sampled_from(
    (HIDDEN, b"\r\n", b"\n", b"0\r\n\r\n", b"{}", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"\x00")
)
HEADERS = st.sampled_from(
    (
        *UPGRADES,
        ((b"Expect", b"100-continue"),),
        ((b"Connection", b"keep-alive"),),
        ((b"Connection", b"close"),),
        ((b"X-A", b"b" * 300),),
    )
)


@st.composite
def requests(draw: st.DrawFn) -> list[Sent]:
    sent = []
    for index in range(draw(st.integers(1, 4))):
        found = dict.fromkeys(h for several in draw(st.lists(HEADERS, max_size=3)) for h in several)
        sizes = draw(st.none() | st.lists(st.integers(1, 40), max_size=4).map(tuple))
        body = b"".join(draw(st.lists(TOKENS | st.binary(max_size=20), max_size=4)))
        trailers = draw(st.sampled_from((b"", TRAILERS))) if sizes is not None else b""
        version = b"1.0" if draw(st.integers(0, 9)) == 0 else b"1.1"
        sent.append(Sent(f"/{index}", body, sizes, tuple(found), trailers, version))
    return sent


@pytest.mark.parametrize(
    ("path", "length", "rest"),
    [("/0", 0, b""), ("/0", 0, b"\r\n"), ("/early", 3, b"abc"), ("/early", 3, b"a")],
)
def test_data_that_begin_no_request_keep_no_connection_open(
    loop: asyncio.AbstractEventLoop, path: str, length: int, rest: bytes
) -> None:
    async def run() -> None:
        wire = Wire(frozenset({"/early"}), keep_alive_timeout=0.05)
        await wire.feed(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        while not wire.connection.cycle.response_complete:
            await asyncio.sleep(0)
        await wire.feed(*([rest] if rest else []))
        async with asyncio.timeout(10.0):
            while not wire.transport.closed:
                await asyncio.sleep(0.01)
        await wire.settle()

    loop.run_until_complete(run())


def fuzz(loop: asyncio.AbstractEventLoop, data: st.DataObject) -> None:
    sent = data.draw(requests())
    bad = data.draw(st.just(b"") | st.sampled_from(tuple(BAD.values())))
    raw = b"".join(request.wire for request in sent) + bad + (HIDDEN if bad else b"")
    cuts = sorted(set(data.draw(st.lists(st.integers(1, max(1, len(raw) - 1)), max_size=8))))
    early = data.draw(st.frozensets(st.sampled_from(("/0", "/1", "/2", "/3", "/bad")), max_size=2))

    async def run() -> tuple[Wire, list[Answer]]:
        wire = Wire(early)
        await wire.feed(*(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)))
        return wire, await wire.settle()

    check(*loop.run_until_complete(run()), sent, bad)


# it guards against request smuggling, so it has more examples than other properties have
@settings(max_examples=150)
@given(st.data())
def test_answers_are_as_many_as_requests(
    loop: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    fuzz(loop, data)


@pytest.mark.thorough
@settings(max_examples=3_000)
@given(st.data())
def test_answers_are_as_many_as_requests_in_many_more(
    loop: asyncio.AbstractEventLoop, data: st.DataObject
) -> None:
    fuzz(loop, data)
