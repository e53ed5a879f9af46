"""Which engines are ended: those that are stopped for long or unhealthy, and no others."""

from __future__ import annotations

import asyncio
import time

import pytest

from paceline.core.errors import EngineDeadError
from paceline.engine import watchdog


class Engine:
    """Of which a test says how it is; looked at so often."""

    def __init__(self, *, is_stopped: bool = False, stalled_from: int = 1_000) -> None:
        self.is_stopped = is_stopped
        self.looks = 0
        self.forgiven = 0.0
        self._stalled_from = stalled_from

    def check_health(self) -> None:
        self.looks += 1
        if self.looks >= self._stalled_from:
            raise EngineDeadError("no step has completed")

    def forgive(self, seconds: float) -> None:
        self.forgiven += seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LOOK", 0.01)
    monkeypatch.setattr(watchdog, "_HALTED", 0.03)


async def ended(*engines: Engine | None) -> list[tuple[Engine, str, str]]:
    """Who is ended, each engine being replaced by the next once it is; the last one stays for five
    looks."""
    line = list(engines)
    ends: list[tuple[Engine, str, str]] = []

    def end(engine: Engine, kind: str, reason: str) -> None:
        assert engine is line.pop(0)
        ends.append((engine, kind, reason))

    watching = asyncio.create_task(watchdog.watch(lambda: line[0], end))
    while len(line) > 1 or (line[0] is not None and line[0].looks < 5):
        await asyncio.sleep(0.001)
    watching.cancel()
    return ends


def test_what_stands_still_is_ended_and_why() -> None:
    stalled, stopped, sound = Engine(stalled_from=2), Engine(is_stopped=True), Engine()
    ends = asyncio.run(ended(stalled, stopped, sound))
    assert [(engine, kind) for engine, kind, _ in ends] == [
        (stalled, "stalled"),
        (stopped, "stopped"),
    ]
    assert ends[0][2] == "no step has completed"
    assert "stopped for 0.03 s" in ends[1][2]


def test_an_engine_is_not_blamed_for_time_in_which_this_process_stood_still() -> None:
    async def stand_still() -> Engine:
        engine = Engine()
        watching = asyncio.create_task(watchdog.watch(lambda: engine, lambda *_: None))
        while not engine.looks:
            await asyncio.sleep(0.001)
        before = engine.forgiven
        # nothing else runs on this loop meanwhile
        time.sleep(0.05)
        while engine.forgiven == before:
            await asyncio.sleep(0.001)
        watching.cancel()
        return engine

    assert asyncio.run(stand_still()).forgiven >= 0.01
