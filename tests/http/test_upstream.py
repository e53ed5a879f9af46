"""Connections to other servers: how an answer is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.http.listening import bind
from paceline.http.upstream import ConnectError, Connection, Headers, Origin, Pool

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Sink:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.headers: Headers = []
        self.end = ""

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def on_head(self, status: int, headers: Headers) -> None:
        assert status == 200
        self.headers = headers

    def on_data(self, data: bytes) -> None:
        assert data and not self.end
        self.parts.append(data)

    def on_end(self) -> None:
        assert not self.end
        self.end = "whole"

    def on_lost(self, why: str) -> None:
        assert not self.end
        self.end = why


class Transport:
    """One that leads nowhere."""

    def __init__(self) -> None:
        self.aborted = False
        self.reads = True

    def write(self, data: bytes) -> None:
        return

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.aborted = True

    close = abort


class Parser:
    """Notes what the real one is fed."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.fed: list[bytes] = []

    def feed_data(self, data: bytes) -> None:
        self.fed.append(data)
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def asked() -> tuple[Connection, Sink, Parser]:
    pool = Pool(Origin.of("http://h"), connect_timeout=1.0, idle=1.0)
    connection: Any = Connection(pool)
    reader = connection._reader
    parser = reader._parser = Parser(reader._parser)
    connection.connection_made(Transport())
    sink = Sink()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", sink)
    return connection, sink, parser


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_a_chunk_that_comes_alone_is_read_without_the_parser() -> None:
    connection, sink, parser = asked()
    parts = [b"data: %d\r\n\r\n" % number for number in range(20)]
    connection.data_received(HEAD + chunk(b"first"))
    for part in parts:
        connection.data_received(chunk(part))
    assert len(parser.fed) == 1 and sink.parts == [b"first", *parts] and not sink.end
    connection.data_received(b"0\r\n\r\n")
    assert sink.body == b"first" + b"".join(parts) and sink.end == "whole"
    # and the next answer on it is read from its head on
    again = Sink()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", again)
    connection.data_received(HEAD)
    connection.data_received(chunk(b"second") + b"0\r\n\r\n")
    assert (again.body, again.end) == (b"second", "whole")


def test_what_one_read_brings_goes_on_in_one_piece() -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD + chunk(b"1") + chunk(b"2") + chunk(b"3")[:4])
    assert sink.parts == [b"123"]
    connection.data_received(chunk(b"3")[4:] + chunk(b"4") + chunk(b"5") + b"0\r\n\r\n")
    assert sink.parts == [b"123", b"45"] and sink.end == "whole"


def test_what_came_before_a_fault_is_not_lost() -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD + chunk(b"1") + chunk(b"2") + b"no size\r\n")
    assert sink.parts == [b"12"] and "not HTTP" in sink.end


def test_a_sink_that_has_enough_is_given_no_more() -> None:
    """And the connection does not go back to the pool with what is left."""
    connection, sink, _ = asked()
    sink.on_data = lambda data: connection.drop()  # type: ignore[method-assign]
    connection.data_received(HEAD + chunk(b"1") + b"0\r\n\r\n")
    assert not sink.end and not connection.is_open and connection._pool.free() is None


def test_a_sink_that_cannot_take_more_pauses_the_connection() -> None:
    connection, sink, _ = asked()
    transport: Any = connection._transport
    sink.on_data = lambda data: connection.pause()  # type: ignore[method-assign]
    connection.data_received(HEAD + chunk(b"1"))
    assert connection.is_paused and not transport.reads
    connection.resume()
    assert not connection.is_paused and transport.reads
    # the end that came with the last part leaves nothing paused for the next request
    connection.data_received(chunk(b"2") + b"0\r\n\r\n")
    assert sink.end == "whole" and not connection.is_paused and transport.reads


@pytest.mark.parametrize(
    "behind",
    [
        b"H",
        HEAD,
        HEAD + chunk(b"stolen"),
        HEAD + chunk(b"stolen") + b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nretry-after: 60\r\nx-begun: ",
        b"no answer at all\r\n",
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_what_nobody_asked_for_is_nobodys_answer(behind: bytes, later: bool) -> None:
    """A second answer, or its beginning, behind the first: in the same read, or in one that comes
    while no request is under way."""
    connection, sink, _ = asked()
    pool = connection._pool
    end = chunk(b"mine") + b"0\r\n\r\n"
    if later:
        connection.data_received(HEAD + end)
        assert pool.free() is connection and not pool.num_unsolicited
        connection.data_received(behind)
    else:
        connection.data_received(HEAD + end + behind)
    assert (sink.body, sink.end) == (b"mine", "whole")
    # the list of headers, which its sink was given, is left as it was
    assert [name for name, _ in sink.headers] == [b"content-type", b"transfer-encoding"]
    assert not connection.is_open and pool.free() is None and pool.num_unsolicited == 1


def test_trailers_are_no_headers() -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD + chunk(b"1") + b"0\r\nretry-after: 60\r\n\r\n")
    assert sink.end == "whole" and connection._pool.free() is connection
    assert [name for name, _ in sink.headers] == [b"content-type", b"transfer-encoding"]


INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (HEAD + b"0\r\nx: ", b"y" * 1000),
        (HEAD + b"0\r\n", b"x: y\r\n" * 100),
        (HEAD + chunk(b"1") + b"3;x=", b"y" * 1000),
        (HEAD, b"0" * 1000),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 1000),
        (INTERIM, INTERIM * 20),
    ],
)
def test_lines_without_end_are_bounded(begun: bytes, more: bytes) -> None:
    connection, sink, parser = asked()
    connection.data_received(begun)
    while not sink.end and len(parser.fed) < 200:
        connection.data_received(more)
    assert sink.end != "whole" and sum(map(len, parser.fed)) < 40_000


def test_an_interim_head_hides_no_part_of_the_final_one() -> None:
    connection, sink, _ = asked()
    lines = b"x: %b\r\n" % (b"y" * 95) * 400
    connection.data_received(INTERIM + b"HTTP/1.1 200 OK\r\n" + lines[:24_000])
    connection.data_received(lines[24_000:] + b"content-length: 0\r\n\r\n")
    assert "too long a head" in sink.end


@pytest.mark.parametrize(
    ("coding", "end"),
    [
        (b"Chunked", "whole"),
        (b"gzip, chunked", "not chunked alone"),
        (b"identity", "not chunked alone"),
        (b"chunked\r\ntransfer-encoding: chunked", "not chunked alone"),
    ],
)
def test_a_transfer_encoding_is_chunked_alone(coding: bytes, end: str) -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD.replace(b"chunked", coding) + chunk(b"1") + b"0\r\n\r\n")
    assert end in sink.end and bool(sink.parts) == (end == "whole")


def test_line_breaks_behind_an_answer_are_nothing() -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD + chunk(b"1") + b"0\r\n\r\n\r\n")
    assert sink.end == "whole" and connection._pool.free() is connection
    again = Sink()
    connection.send(b"GET / HTTP/1.1\r\n\r\n", again)
    connection.data_received(HEAD + chunk(b"2") + b"0\r\n\r\n")
    assert again.body == b"2" and not connection._pool.num_unsolicited


@given(
    st.lists(
        st.sampled_from([b"a", b"\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n", b"x" * 300]), max_size=8
    ),
    st.data(),
)
def test_wherever_it_is_cut_it_says_the_same(parts: list[bytes], data: st.DataObject) -> None:
    """Also where a part looks like a chunk of its own."""
    whole = HEAD + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
    # at the ends of chunks, too, which is where it is read without the parser
    ends = [len(HEAD)]
    for part in parts:
        ends.append(ends[-1] + len(chunk(part)))
    places = st.integers(1, len(whole) - 1) | st.sampled_from(ends)
    cuts = sorted(data.draw(st.sets(places, max_size=12)))
    connection, sink, _ = asked()
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        connection.data_received(whole[start:end])
    assert (sink.body, sink.end) == (b"".join(parts), "whole")


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        # what is written otherwise is the parser's
        (b"A\r\n0123456789\r\n", b"0123456789"),
        (b"003\r\nabc\r\n", b"abc"),
        (b"3;x=y\r\nabc\r\n", b"abc"),
        (b"3\r\nabc\r\n2\r\nde\r\n", b"abcde"),
        # and what is wrong is an end
        (b"4\r\nabc\r\n", None),
        (b"+3\r\nabc\r\n", None),
        (b"0x3\r\nabc\r\n", None),
        (b"-1\r\n\r\n", None),
    ],
)
def test_odd_chunks(odd: bytes, found: bytes | None) -> None:
    connection, sink, _ = asked()
    connection.data_received(HEAD + chunk(b"1"))
    connection.data_received(odd)
    connection.data_received(b"\r\n0\r\n\r\n" if found is None else b"0\r\n\r\n")
    if found is None:
        assert sink.end not in ("", "whole")
    else:
        assert (sink.body, sink.end) == (b"1" + found, "whole")


@pytest.mark.parametrize("alone", [True, False])
def test_a_fault_of_ours_ends_this_answer_alone(
    caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    connection, sink, _ = asked()

    def fails(data: bytes) -> None:
        raise RuntimeError("a fault of ours")

    if alone:
        connection.data_received(HEAD + chunk(b"1"))
    sink.on_data = fails  # type: ignore[method-assign]
    connection.data_received(chunk(b"2") if alone else HEAD + chunk(b"2") + b"0\r\n\r\n")
    assert sink.end == "the gateway failed on this answer" and "a fault of ours" in caplog.text
    assert not connection.is_open


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
UNFRAMED = b"HTTP/1.1 200 OK\r\n\r\nhi"


@pytest.mark.parametrize(
    ("answer", "unused", "lost"),
    [
        # it lay unused, for less than the time in which it may be used again, and for more
        (WHOLE, 0.9, True),
        (WHOLE, 1.1, False),
        # as announced; and as the end of a body
        (LAST, 0.0, False),
        (UNFRAMED, 0.0, False),
        # in the middle of an answer, of its head, and before it
        (HEAD + chunk(b"1"), 0.0, True),
        (HEAD[:20], 0.0, True),
        (b"", 0.0, True),
        # bytes that no request has asked for: closed by this side
        (WHOLE + WHOLE, 0.0, False),
    ],
)
def test_which_ends_of_a_connection_show_that_the_other_side_may_have_ended(
    answer: bytes, unused: float, lost: bool
) -> None:
    connection, _, _ = asked()
    pool = connection._pool
    connection.data_received(answer)
    connection.idle_since -= unused
    connection.connection_lost(None)
    assert pool.num_lost == lost and len(pool) == 0


def test_a_connection_that_this_side_drops_is_not_lost() -> None:
    for answer in (WHOLE, HEAD + chunk(b"1"), b""):
        connection, _, _ = asked()
        connection.data_received(answer)
        connection.drop()
        connection.connection_lost(None)
        assert not connection._pool.num_lost


async def test_who_takes_no_connection_may_have_ended() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    pool = Pool(Origin.of(f"http://127.0.0.1:{port}"), connect_timeout=1.0, idle=1.0)
    with pytest.raises(ConnectError, match="no connection"):
        await pool.connect()
    assert pool.num_lost == 1
