"""What goes to a caller goes in order, whoever reads slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.gateway.bodies import read_body
from paceline.gateway.outgoing import BODY_WRITER, Outgoing

pytestmark = pytest.mark.anyio


class Writer:
    """A connection that takes what it is offered."""

    is_gone = False

    def __init__(self, told: list[bytes]) -> None:
        self._told = told

    def offer(self, data: bytes) -> bool:
        self._told.append(data)
        return True


async def test_what_comes_while_an_earlier_part_waits_stays_behind_it() -> None:
    told: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        if body := message.get("body"):
            await reads.wait()
            told.append(body)

    scope: Any = {"extensions": {BODY_WRITER: Writer(told)}, "headers": []}
    call: Any = type("AnyCall", (), {"scope": scope, "send": staticmethod(send)})()
    source: Any = type("Source", (), {"hold_back": lambda self: None, "head": lambda self: None})()
    wake = asyncio.Event()
    out = Outgoing(call, stream=True, wake=wake, source=source, now=0.0)
    out.started = True
    out._backlog += b"one"
    flushing = asyncio.ensure_future(out.flush())
    await asyncio.sleep(0)
    out.write(b"two")
    out.write(b"three")
    reads.set()
    await flushing
    assert out.num_waiting and told == [b"one"]
    await out.flush()
    assert told == [b"one", b"twothree"]
    out.write(b"four")
    assert told[-1] == b"four"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_limit_below_zero_is_none(name: str) -> None:
    usual = read_body(b'{"model": "m"}').max_tokens
    asked = read_body(b'{"model": "m", "%b": -100000}' % name.encode())
    assert asked.max_tokens == usual > 0
