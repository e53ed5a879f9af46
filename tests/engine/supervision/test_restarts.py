"""How often, and how soon: by times that are given."""

from __future__ import annotations

import asyncio

import pytest

from paceline.engine.process.waiting import happens_within
from paceline.engine.supervision.restarts import Restarts


def test_pauses_grow_within_a_window_and_are_bounded() -> None:
    restarts = Restarts(8, 100.0)
    pauses = [restarts.take(float(second)) for second in range(8)]
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.take(8.0) is None
    assert restarts.spent("it ended") == (
        "it ended; 8 restarts within 100 s are all that are allowed"
    )


def test_what_is_long_ago_is_forgotten() -> None:
    restarts = Restarts(2, 10.0)
    assert [restarts.take(0.0), restarts.take(6.0), restarts.take(9.0)] == [0.0, 0.25, None]
    # what was refused does not count
    assert len(restarts) == 2
    assert restarts.take(10.0) is None
    assert restarts.take(10.5) == 0.25
    assert restarts.take(30.0) == 0.0


def test_none_may_be_allowed() -> None:
    restarts = Restarts(0, 10.0)
    assert restarts.take(0.0) is None
    assert restarts.spent("it ended") == "it ended"


@pytest.mark.anyio
async def test_an_event_is_waited_for_so_long() -> None:
    event = asyncio.Event()
    assert not await happens_within(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await happens_within(event, 10.0)
    assert await happens_within(event, 0.0)
