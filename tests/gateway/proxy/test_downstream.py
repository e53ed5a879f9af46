"""Answers reach a caller in order, even if it reads slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.gateway.proxy.downstream import Downstream
from paceline.gateway.proxy.wake import Wake
from paceline.gateway.requests.body import read_body


class Writer:
    """A connection that takes what it is offered, unless it is ``full``."""

    is_gone = False
    full = False

    def __init__(self, told: list[bytes]) -> None:
        self._told = told

    def offer(self, data: bytes) -> bool:
        if self.full:
            return False
        self._told.append(data)
        return True

    def finish(self, data: bytes) -> bool:
        if self.full:
            return False
        self._told.append(data + b" (the end)")
        return True


def downstream(told: list[bytes], reads: asyncio.Event, *, full: bool = False) -> Downstream:
    """Of a stream that has begun; what its connection does not take at once waits for ``reads``."""

    async def send(message: Any) -> None:
        await reads.wait()
        told.append(message["body"] if message["more_body"] else message["body"] + b"(no more)")

    writer = Writer(told)
    writer.full = full
    incoming: Any = type("AnyCall", (), {"writer": writer, "send": staticmethod(send)})()
    out = Downstream(incoming, stream=True, wake=Wake(), now=0.0)
    out.started = True
    return out


async def test_the_last_part_and_the_end_are_one_write() -> None:
    told: list[bytes] = []
    out = downstream(told, asyncio.Event())
    out.write(b"one")
    assert not out.ended
    out.write_last(b"two")
    assert out.ended and told == [b"one", b"two (the end)"]
    # there is nothing left to send and no reader, so it returns
    await out.end()
    assert told == [b"one", b"two (the end)"]


async def test_the_last_part_stays_behind_what_waits() -> None:
    told: list[bytes] = []
    reads = asyncio.Event()
    out = downstream(told, reads)
    out._backlog += b"one"
    out.write_last(b"two")
    assert not out.ended and told == []
    reads.set()
    await out.send_waiting()
    await out.end()
    assert told == [b"onetwo", b"(no more)"]


@pytest.mark.parametrize("holds", ["an earlier part", "no head", "a slow reader"])
async def test_the_last_part_that_cannot_go_out_waits_for_its_end(holds: str) -> None:
    told: list[bytes] = []
    reads = asyncio.Event()
    out = downstream(told, reads, full=holds == "a slow reader")
    wake = out._wake
    before: list[bytes] = []
    flushing = None
    if holds == "an earlier part":
        out._backlog += b"one"
        before.append(b"one")
        flushing = asyncio.ensure_future(out.send_waiting())
        await asyncio.sleep(0)
    out.started = holds != "no head"
    out.write_last(b"two")
    assert not out.ended and told == [] and out.num_waiting == 3 and wake.is_set
    reads.set()
    if flushing is not None:
        await flushing
    await out.send_waiting()
    await out.end()
    assert told == [*before, b"two", b"(no more)"] and out.ended


async def test_who_hangs_up_once_all_is_out_has_missed_nothing() -> None:
    out = downstream([], asyncio.Event())
    out.write(b"one")
    out.write_last(b"two")
    out.hung_up()
    assert out.ended and not out.gone
    other = downstream([], asyncio.Event())
    other.write(b"one")
    other.hung_up()
    assert other.gone


async def test_what_comes_while_an_earlier_part_waits_stays_behind_it() -> None:
    told: list[bytes] = []
    reads = asyncio.Event()
    out = downstream(told, reads)
    out._backlog += b"one"
    flushing = asyncio.ensure_future(out.send_waiting())
    await asyncio.sleep(0)
    out.write(b"two")
    out.write(b"three")
    reads.set()
    await flushing
    assert out.num_waiting and told == [b"one"]
    await out.send_waiting()
    assert told == [b"one", b"twothree"]
    out.write(b"four")
    assert told[-1] == b"four"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_limit_below_zero_does_not_count(name: str) -> None:
    usual = read_body(b'{"model": "m"}').max_tokens
    asked = read_body(b'{"model": "m", "%b": -100000}' % name.encode())
    assert asked.max_tokens == usual > 0
