"""The one reader of server-sent events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.wire.sse import SseEvents, name_of, names_error, payload_of

STREAM = (
    b"\xef\xbb\xbf: a comment\n\n"
    b"data: one\r\rdata:two\r\ndata:  three\r\n\r\n"
    b"event: x\nid: 7\nretry: 9\ndata\n\n"
    b"data:\n\n"
    b"data:   \r\n\r\n"
    b"event: ping\ndata: {}\n\n"
    b"event: without data\n\n\n"
    b"data: caf\xc3\xa9\n: between\ndata: 4 \n\n"
    b"data: cut off\n"
)
EVENTS = [
    (b"", None), (b"", b"one"), (b"", b"two\n three"), (b"x", None), (b"", None), (b"", None),
    (b"ping", b"{}"), (b"without data", None), (b"", b"caf\xc3\xa9\n4"),
]  # fmt: skip


def parsed(*pieces: bytes, most: int = 100) -> list[tuple[bytes, bytes | None]]:
    """Names and data; the last one is ``too long`` where an event was."""
    events = SseEvents(most)
    found = [event for piece in pieces for event in events.feed(piece)]
    told = [(name_of(event), payload_of(event)) for event in found]
    return [*told, (b"too long", None)] if events.too_long else told


def test_lines_comments_fields() -> None:
    assert parsed(STREAM) == EVENTS


# between CR and LF, and within the byte order mark
@example([36, 36])
@example([1, 2])
@given(st.lists(st.integers(0, len(STREAM))))
def test_cut_anywhere(places: list[int]) -> None:
    edges = [0, *sorted(places), len(STREAM)]
    assert parsed(*(STREAM[a:b] for a, b in pairwise(edges))) == EVENTS


@given(st.sampled_from([b"\n", b"\r", b"\r\n"]), st.integers(1, 9))
def test_each_line_end_is_one(line_end: bytes, piece: int) -> None:
    data = b"data: a\n\ndata: b\ndata: c\n\n".replace(b"\n", line_end)
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    assert parsed(*pieces) == [(b"", b"a"), (b"", b"b\nc")]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30)))
def test_what_is_written_is_read(lines: list[str]) -> None:
    data = "".join(f"data: {line}\n" for line in ["x", *lines, "y"]).encode() + b"\n"
    assert parsed(data, most=10_000) == [(b"", "\n".join(["x", *lines, "y"]).encode())]


@pytest.mark.parametrize("data", [b"data: " + b"x" * 95, b"data: x\n" * 13, b": xx\n" * 30])
def test_an_event_that_is_too_long_is_the_last(data: bytes) -> None:
    """Whether it comes whole or byte by byte; many short ones are no long one."""
    good = b"data: " + b"x" * 90 + b"\n\n" + b"data: y\n\n" * 50
    for pieces in ([good + data + b"\n\ndata: z\n\n"], [b"%c" % byte for byte in good + data]):
        assert parsed(*pieces)[-2:] == [(b"", b"y"), (b"too long", None)]
    assert len(parsed(good)) == 51


def test_names() -> None:
    assert name_of(b"event: a\ndata: event: b\nevent:c ") == b"c"
    assert names_error(b"error") and names_error(b"stream.error") and not names_error(b"errors.x")
