"""Frames survive the way through bytes, and no bytes break the reader."""

from __future__ import annotations

import math
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.queues.wait_clocks import REASONS
from paceline.timeline.codec import HEADER, MAX_FRAME, Decoder, encode, headers
from paceline.timeline.events import (
    Announce,
    Done,
    End,
    Event,
    Frame,
    FrameType,
    Keyframe,
    Kind,
    LaneState,
    Plan,
    Told,
)
from paceline.timeline.model import Model
from tests.driving import make_request
from tests.timeline.watching import Watched

u8, u16, u32 = st.integers(0, 255), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF)
f64 = st.floats(allow_nan=False)
f32 = st.floats(allow_nan=False, width=32)
text = st.text(max_size=30)
events = st.lists(st.builds(Event, u16, u8, u32), max_size=5).map(tuple)
frames = st.one_of(
    st.builds(
        Plan, u32, f64, f32, f32, u32, u32, u32, u32, u16, u16, u16, u8, u8, st.booleans(), events
    ),
    st.builds(Done, u32, f64, f32, events),
    st.builds(
        Announce, u32, u32, f64, f64, u32, u32, st.integers(-(2**31), 2**31 - 1), st.booleans(),
        st.booleans(), f32, f32, f32, f32, text, text, text,
    ),
    st.builds(
        End, u32, f64, u8, st.booleans(), st.tuples(*[f32] * len(REASONS)), u32, u32, u32, u32, u32,
        u32, f64, f64, f32,
    ),
    st.builds(
        Keyframe, u32, f64, st.booleans(),
        st.lists(
            st.builds(LaneState, u32, u16, u8, st.booleans(), u32, u32, f32, f64), max_size=4
        ).map(tuple),
    ),
    st.builds(
        Told,
        st.sampled_from(
            [
                FrameType.START, FrameType.HELLO, FrameType.GAUGES, FrameType.GAP, FrameType.NOTICE,
                FrameType.DOOR,
            ]
        ),
        st.dictionaries(text, st.integers() | text, max_size=3),
    ),
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 60), max_size=30))
def test_what_goes_in_comes_out_however_it_is_cut(told: list[Frame], cuts: list[int]) -> None:
    data = b"".join(map(encode, told))
    decoder = Decoder()
    found: list[Frame] = []
    for size in cuts:
        found += decoder.feed(data[:size])
        data = data[size:]
    assert found + decoder.feed(data) == told
    assert not decoder.num_broken and not decoder.num_unknown


def a_run() -> bytes:
    watched = Watched(num_blocks=12)
    watched.add(*(make_request(f"r{i}", 10, 8, arrival=100.0) for i in range(3)))
    watched.run()
    return watched.data


def test_cut_at_every_byte_it_says_the_same() -> None:
    data = a_run()
    # by what they look like: a time that never came is not equal to itself
    whole = repr(Decoder().feed(data))
    assert whole.count("Plan(") > 5
    for cut in range(len(data) + 1):
        decoder = Decoder()
        assert repr(decoder.feed(data[:cut]) + decoder.feed(data[cut:])) == whole, cut


@settings(max_examples=150)
@given(st.data())
def test_no_input_breaks_the_reader_or_the_model(data: st.DataObject) -> None:
    """Bytes lost, changed and repeated anywhere: fewer frames may come of it, and nothing else."""
    wire = bytearray(RUN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(wire) - 1))
        change = data.draw(st.sampled_from(("cut", "byte", "drop", "twice")))
        if change == "cut":
            del wire[at:]
        elif change == "byte":
            wire[at] = data.draw(st.integers(0, 255))
        elif change == "drop":
            del wire[at : at + data.draw(st.integers(1, 40))]
        else:
            wire[at:at] = wire[at : at + data.draw(st.integers(1, 60))]
        if not wire:
            break
    model, decoder = Model(), Decoder()
    for frame in decoder.feed(bytes(wire)):
        model.take(frame)
    list(model.waiting()), list(model.running())


RUN = a_run()


def test_what_is_not_known_is_passed_over() -> None:
    strange = HEADER.pack(200, 3, 0, 5) + b"later"
    done = Done(7, 1.5, 0.25, (Event(3, Kind.DEMOTE, 0),))
    decoder = Decoder()
    assert decoder.feed(strange + encode(done) + strange) == [done]
    assert decoder.num_unknown == 2
    # a later version may say more at the end of a frame
    grown = bytearray(encode(done)) + b"more"
    grown[4:8] = struct.pack("<I", len(grown) - HEADER.size)
    assert decoder.feed(bytes(grown)) == [done]
    # an unknown kind of event is handed on, and no lane changes by it
    odd = Done(8, 1.6, 0.25, (Event(0, 99, 1),))
    assert decoder.feed(encode(odd)) == [odd]
    Model().take(odd)


def test_a_header_that_cannot_be_one_ends_the_reading() -> None:
    decoder = Decoder()
    assert decoder.feed(HEADER.pack(3, 0, 0, MAX_FRAME + 1)) == []
    assert decoder.lost and decoder.feed(encode(Done(1, 1.0, 1.0, ()))) == []


def test_numbers_and_names_are_clipped_to_their_place() -> None:
    long = "é" * 100
    told: Any = Announce(
        1, 0, 0.0, 0.0, 2**40, 5, 2**40, False, False, *[math.inf] * 4, long, "", ""
    )
    (found,) = Decoder().feed(encode(told))
    assert isinstance(found, Announce)
    assert found.request_id == "é" * 64 and found.prompt_tokens == 0xFFFFFFFF
    assert found.priority == 2**31 - 1


def test_headers_stop_at_what_is_not_whole() -> None:
    data = encode(Done(1, 1.0, 1.0, ())) * 2
    assert [kind for kind, _, _ in headers(data)] == [FrameType.DONE] * 2
    assert [(start, end) for _, start, end in headers(data[:-1])] == [(0, len(data) // 2)]
