"""Callers get the same bytes with every fast path and without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.http.exposition import Registry
from paceline.wire import fast_paths
from paceline.wire.response import ReadEvent, ResponseReader
from paceline.wire.sse import SseEvents
from tests.gateway.fault_server import Step, chat_chunks, scripted
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    WORDS,
    chat,
    configured,
    gateway_over,
    pieces,
    refused,
)
from tests.gateway.upstreams.dialects.samples import anthropic_events

LONG = tuple(f" word{number}" for number in range(60))
TEXTS = (
    *(
        b'data: {"id":"c","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % word
        for word in map(str.encode, LONG)
    ),
    b'data: {"id":"c","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
COMPLETION = {"model": "m", "prompt": "hi", "stream": True}
RESUMED = chat_chunks(LONG[20:], first_id=20)

# path, body, and the steps of two engines
EXCHANGES: dict[str, tuple[str, dict[str, Any], Sequence[Step], Sequence[Step]]] = {
    "chat": (CHAT, chat(stream=True), (Step(parts=chat_chunks(LONG)),), ()),
    "shown ids": (
        CHAT,
        chat(stream=True, return_token_ids=True, stream_options={"include_usage": True}),
        (Step(parts=chat_chunks(LONG)),),
        (),
    ),
    "no ids": (CHAT, chat(stream=True), (Step(parts=chat_chunks(LONG, ids=False)),), ()),
    "odd words": (
        CHAT,
        chat(stream=True),
        (Step(parts=chat_chunks(('"', "\\", "\n", "é", "\u2028", "😀", "", "a", "b"))),),
        (),
    ),
    "one by one": (CHAT, chat(stream=True), (Step(parts=chat_chunks(WORDS), gap=0.01),), ()),
    "resumed": (
        CHAT,
        chat(stream=True),
        (Step(parts=chat_chunks(LONG)[:21], then="cut"),),
        (Step(parts=RESUMED),),
    ),
    "broken": (CHAT, chat(stream=True), (pieces(3, ids=False),), (pieces(3, ids=False),)),
    "retried": (CHAT, chat(stream=True), (refused(503),), (GOOD,)),
    "texts": ("/v1/completions", COMPLETION, (Step(parts=TEXTS),), ()),
    "messages": (
        "/v1/messages",
        chat(stream=True, max_tokens=9),
        (Step(parts=tuple(anthropic_events(WORDS))),),
        (),
    ),
    "whole": (CHAT, chat(), (WHOLE,), ()),
    "refused": (CHAT, chat(), (refused(400),), ()),
}


async def told(name: str) -> tuple[int, list[tuple[str, str]], bytes, list[Any]]:
    """What the caller of an exchange gets, and what its engines are sent."""
    path, body, first, second = EXCHANGES[name]
    async with (
        scripted(*first, *(() if second else first)) as one,
        scripted(*(second or first)) as two,
        gateway_over(configured(one, two, kinds={"e1": "paceline", "e2": "paceline"})) as (
            gateway,
            client,
        ),
    ):
        gateway.upstreams.by_name["e2"].load.prefill_tokens += 1e6
        asked = {"json": body | {"seed": 1}, "headers": {"x-request-id": "r"}}
        answer = await client.post(path, **asked)
        sent = [*one.bodies, *two.bodies]
    return answer.status_code, sorted(answer.headers.items()), answer.content, sent


@pytest.mark.parametrize("name", EXCHANGES)
async def test_an_exchange_is_the_same_both_ways(name: str) -> None:
    fast = await told(name)
    with fast_paths.turned_off():
        slow = await told(name)
    assert fast == slow and fast[2]


CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=12)


def read(wire: bytes, cuts: Sequence[int]) -> list[ReadEvent]:
    """The events of an answer that comes in pieces; body parts in a row are joined."""
    reader = ResponseReader()
    found: list[ReadEvent] = []
    for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        part = reader.read_chunk(wire[begin:end])
        for event in reader.feed(wire[begin:end]) if part is None else [part]:
            if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += event
            else:
                found.append(event)
    return found


@given(CHUNKS, st.data())
def test_an_answer_is_read_the_same_both_ways(chunks: list[bytes], data: st.DataObject) -> None:
    heads = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = [heads, *(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks), b"0\r\n\r\n"]
    wire = b"".join(parts)
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts) - 1)]
    others = data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=3))
    cuts = sorted({*data.draw(st.permutations(ends)), *others})
    fast = read(wire, cuts)
    with fast_paths.turned_off():
        assert read(wire, cuts) == fast


LINES = (
    rb"content-type: application/json|Content-Type: text/plain|x-empty:|x:y|x-space: a b |x_y: z|"
    b"x-\xe9: \xe9|connection: close|proxy-connection: close|transfer-encoding: chunked|"
    b"content-length: 3|content-length: 03|upgrade: h2c| folded"
).split(b"|")
STATUS_LINES = (b"1.1 200 OK", b"1.1 404 Not Found", b"1.0 200 OK", b"1.1 200", b"1.1 204 x")
ANSWERS = st.tuples(
    st.sampled_from(STATUS_LINES),
    st.lists(st.sampled_from(LINES), max_size=3),
    st.sampled_from((b"abc", b"ab", b"")),
)


def read_answers(wires: Sequence[bytes]) -> list[Any]:
    """What a connection makes of answers that come in one read each, until it is of no more use."""
    reader = ResponseReader(90)
    found: list[Any] = []
    for wire in wires:
        reader.expect()
        found += [*reader.feed(wire), reader.is_complete, reader.is_unsolicited]
        if not reader.is_complete or reader.is_unsolicited:
            break
        found.append(reader.keeps_alive)
    return found


@given(st.lists(ANSWERS, max_size=3), st.booleans())
def test_whole_answers_are_read_the_same_both_ways(
    answers: list[tuple[bytes, list[bytes], bytes]], with_length: bool
) -> None:
    wires = [
        b"\r\n".join(
            [b"HTTP/" + line, *lines, *[b"content-length: %d" % len(body)] * with_length, b"", body]
        )
        for line, lines, body in answers
    ]
    fast = read_answers(wires)
    with fast_paths.turned_off():
        assert read_answers(wires) == fast


@given(st.lists(st.sampled_from((b"data: a\n\n", b"\n", b": c\n\n", b"a\r\n", b"\r", b"x"))))
def test_events_are_read_the_same_both_ways(parts: list[bytes]) -> None:
    fast = SseEvents(12)
    with fast_paths.turned_off():
        slow = SseEvents(12)
    for part in parts:
        assert fast.feed(part) == slow.feed(part)
        assert fast.too_long == slow.too_long


def test_metrics_are_rendered_the_same_both_ways() -> None:
    registry = Registry({"model": 'a "name"\n'})
    registry.number("gauge", "one", "A number.").value = 0.1
    for value in (1.0, 1e21, float("inf"), float("nan")):
        registry.numbers("counter", f"n{value}".replace("+", ""), "Numbers.", "of").at(
            "x"
        ).value = value
    registry.histogram("seconds", "Times.", (0.1, 1.0)).observe(0.5)
    registry.histograms("sizes", "Sizes.", (), "of").at("x").observe(2.0)
    fast = registry.render()
    with fast_paths.turned_off():
        assert registry.render() == fast
