"""Bounds on an answer's head."""

from __future__ import annotations

from paceline.wire.response import Fault, ResponseReader


def test_an_interim_head_hides_no_part_of_the_next_one() -> None:
    head = b"HTTP/1.1 200 OK\r\nserver: " + b"x" * 195 + b"\r\n\r\n"
    wire = b"HTTP/1.1 103 Early Hints\r\n\r\n" + head
    for cut in range(len(wire)):
        reader = ResponseReader(200)
        events = reader.feed(wire[:cut]) or reader.feed(wire[cut:])
        assert len(events) == 1 and isinstance(events[0], Fault), cut
