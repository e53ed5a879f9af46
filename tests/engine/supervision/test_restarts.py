"""How often, and how soon: by times that are given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container

import pytest

from paceline.engine.process.frontend import happens_within
from paceline.engine.supervision import restarts
from paceline.engine.supervision.restarts import Restarts
from paceline.errors import EngineDeadError


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


async def test_an_event_is_waited_for_so_long() -> None:
    event = asyncio.Event()
    assert not await happens_within(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await happens_within(event, 10.0)
    assert await happens_within(event, 0.0)


class Engine:
    """Of which a test says how it is; looked at so often."""

    def __init__(self, *, stopped_at: Container[int] = (), stalled_from: int = 1_000) -> None:
        self.looks = 0
        self.forgiven = 0.0
        self._stopped_at = stopped_at
        self._stalled_from = stalled_from

    @property
    def is_stopped(self) -> bool:
        return self.looks in self._stopped_at

    def check_health(self) -> None:
        self.looks += 1
        if self.looks >= self._stalled_from:
            raise EngineDeadError("no step has completed")

    def forgive(self, seconds: float) -> None:
        self.forgiven += seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_LOOK", 0.01)
    monkeypatch.setattr(restarts, "_HALTED", 0.03)


async def ended(*engines: Engine | None, looks: int = 5) -> list[tuple[Engine, str, str]]:
    """Who is ended, each engine being replaced by the next once it is; the last one stays for so
    many looks."""
    line = list(engines)
    ends: list[tuple[Engine, str, str]] = []

    def end(engine: Engine, kind: str, reason: str) -> None:
        assert engine is line.pop(0)
        ends.append((engine, kind, reason))

    watching = asyncio.create_task(restarts.watch(lambda: line[0], end))
    await until(lambda: len(line) == 1 and (line[0] is None or line[0].looks >= looks), watching)
    watching.cancel()
    return ends


async def until(condition: Callable[[], bool], watching: asyncio.Task[None]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            if watching.done():
                # with the error that ended it
                await watching
            await asyncio.sleep(0.001)


def test_what_stands_still_is_ended_and_why() -> None:
    stalled, stopped, sound = Engine(stalled_from=2), Engine(stopped_at=range(1_000)), Engine()
    ends = asyncio.run(ended(stalled, stopped, sound))
    assert [(engine, kind) for engine, kind, _ in ends] == [
        (stalled, "stalled"),
        (stopped, "stopped"),
    ]
    assert ends[0][2] == "no step has completed"
    assert "stopped for 0.03 s" in ends[1][2]


def test_an_engine_that_runs_again_in_time_is_not_ended() -> None:
    # stopped at two looks of three: much longer than it takes, and never for so long at a time
    engine = Engine(stopped_at=[look for look in range(30) if look % 3])
    assert asyncio.run(ended(engine, looks=15)) == []


def test_an_engine_is_not_blamed_for_time_in_which_this_process_stood_still() -> None:
    async def stand_still() -> None:
        engine = Engine(stopped_at=range(1_000))
        ends: list[str] = []
        watching = asyncio.create_task(
            restarts.watch(lambda: engine, lambda _, kind, reason: ends.append(kind))
        )
        await until(lambda: engine.looks > 0, watching)
        before = engine.forgiven
        # nothing else runs on this loop meanwhile
        time.sleep(0.05)  # noqa: ASYNC251
        await until(lambda: engine.forgiven > before, watching)
        assert not ends
        assert engine.forgiven >= 0.01
        # it is blamed for what comes after
        await until(lambda: bool(ends), watching)
        assert ends[0] == "stopped"
        watching.cancel()

    asyncio.run(stand_still())
