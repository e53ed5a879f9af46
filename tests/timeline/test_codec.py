"""Frames survive the way through bytes, and no bytes break the reader."""

from __future__ import annotations

import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.queues.wait_clocks import REASONS
from paceline.timeline.codec import HEADER, MAX_FRAME, Decoder, clipped, encode, headers
from paceline.timeline.events import (
    NO_LANE,
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

count, lane = st.integers(0, 2**63 - 1), st.integers(0, NO_LANE)
time = st.floats(allow_nan=False)
maybe = st.none() | time
text = st.text(max_size=30)
events = st.lists(st.builds(Event, lane, count, count), max_size=5).map(tuple)
flag = st.booleans()
frames = st.one_of(
    st.builds(Plan, count, *[time] * 3, *[count] * 9, flag, events),
    st.builds(Done, count, time, time, events),
    st.builds(
        Announce, count, count, time, time, count, count, st.integers(-(2**63), 2**63 - 1),
        flag, flag, *[maybe] * 4, text, text, text,
    ),
    st.builds(
        End, count, time, count, flag, st.tuples(*[time] * len(REASONS)), *[count] * 6, *[maybe] * 3
    ),
    st.builds(
        Keyframe, count, time, flag,
        st.lists(
            st.builds(LaneState, count, lane, count, flag, count, count, time, time), max_size=4
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
    grown = bytearray(encode(done)) + msgspec.msgpack.encode("more")
    grown[4:8] = struct.pack("<I", len(grown) - HEADER.size)
    # one field more
    grown[HEADER.size] += 1
    assert decoder.feed(bytes(grown)) == [done]
    # an unknown kind of event is handed on, and no lane changes by it
    odd = Done(8, 1.6, 0.25, (Event(0, 99, 1),))
    assert decoder.feed(encode(odd)) == [odd]
    Model().take(odd)


def test_a_header_that_cannot_be_one_ends_the_reading() -> None:
    decoder = Decoder()
    assert decoder.feed(HEADER.pack(3, 0, 0, MAX_FRAME + 1)) == []
    assert decoder.lost and decoder.feed(encode(Done(1, 1.0, 1.0, ()))) == []


def test_names_are_clipped() -> None:
    assert clipped("é" * 100) == "é" * 64
    assert clipped("a" * 127 + "é") == "a" * 127
    # half of a pair of surrogates, which has no bytes
    assert clipped("a\ud800") == "a?"


def test_headers_stop_at_what_is_not_whole() -> None:
    data = encode(Done(1, 1.0, 1.0, ())) * 2
    assert [kind for kind, _, _ in headers(data)] == [FrameType.DONE] * 2
    assert [(start, end) for _, start, end in headers(data[:-1])] == [(0, len(data) // 2)]
