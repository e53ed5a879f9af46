"""The parser of server-sent events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.client.sse import SseError, SseParser

STREAM = (
    b"\xef\xbb\xbf: a comment\n\n"
    b"data: one\r\rdata:two\r\ndata:  three\r\n\r\n"
    b"event: x\nid: 7\nretry: 9\ndata\n\n"
    b"event: without data\n\n\n"
    b"data: caf\xc3\xa9\n: between\ndata\n\n"
    b"data: cut off\n"
)
EVENTS = ["one", "two\n three", "", "caf\u00e9\n"]


def parsed(*pieces: bytes) -> list[str]:
    parser = SseParser(100)
    return [event for piece in pieces for event in parser.feed(piece)]


def test_lines_comments_fields() -> None:
    assert parsed(STREAM) == EVENTS


# nothing comes between CR and LF
@example([36, 36])
@given(st.lists(st.integers(0, len(STREAM))))
def test_cut_anywhere(places: list[int]) -> None:
    edges = [0, *sorted(places), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(edges)]
    assert parsed(*pieces) == EVENTS


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30), min_size=1
    )
)
def test_what_is_written_is_read(lines: list[str]) -> None:
    data = "".join(f"data: {line}\n" for line in lines).encode() + b"\n"
    assert SseParser(10_000).feed(data) == ["\n".join(lines)]


@pytest.mark.parametrize(
    "data", [b"data: " + b"x" * 100, b"data: x\n" * 20, b": x\n" * 30, b"data: \xff\n\n"]
)
def test_bounds_and_bytes_that_are_no_text(data: bytes) -> None:
    with pytest.raises(SseError):
        parsed(*(data[i : i + 1] for i in range(len(data))))
    # many short events are no long one
    assert parsed(b"data: " + b"x" * 90 + b"\n\n", b"data: y\n\n" * 50)[1:] == ["y"] * 50
