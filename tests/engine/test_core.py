"""When the engine's inner loop plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.backends.reference.simulated import SimulatedBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.engine.core import EngineCore
from paceline.errors import ConfigError
from tests.driving import make_request

CACHE = CacheConfig(block_size=4, num_blocks=64)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Watched(SimulatedBackend):
    """Steps of one second, and a note of when each was handed over and who is new in it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            NullBackend(num_blocks=64, block_size=4),
            lambda _: 1.0,
            clock=clock,
            sleep=clock.sleep,
        )
        self.time = clock
        self.handed: list[tuple[float, list[str]]] = []

    def execute(self, plan: SchedulerOutput):  # type: ignore[no-untyped-def]
        self.handed.append((self.time.now, [new.request_id for new in plan.new_requests]))
        return super().execute(plan)


def run(lead: float, depth: int = 2) -> list[tuple[float, list[str]]]:
    """One request runs; another arrives while its 31st step does."""
    clock = Clock()
    backend = Watched(clock)
    config = SchedulerConfig(
        max_num_batched_tokens=16, max_num_seqs=4, max_model_len=128, schedule_ahead_s=lead
    )
    core = EngineCore(backend, config, CACHE, pipeline_depth=depth, clock=clock)
    core.add_request(make_request("first", 4, 60))
    arrived = False

    def take_arrivals() -> None:
        nonlocal arrived
        if not arrived and clock.now >= 30.5:
            arrived = True
            core.add_request(make_request("second", 4, 2))

    while core.has_work:
        core.step(take_arrivals)
    core.close()
    assert arrived == (depth == 2), "others take arrivals between two calls only"
    return backend.handed


@pytest.mark.parametrize(("lead", "step"), [(0.002, 31), (0.2, 31), (99.0, 32)])
def test_a_step_is_planned_so_long_before_the_running_one_ends(lead: float, step: int) -> None:
    handed = run(lead)
    # once steps are known to take a second, and not at once
    planned = [at for at, _ in handed[20:50]]
    expected = [19.0 + n + max(0.0, 1.0 - lead) for n in range(30)]
    assert planned == pytest.approx(expected, abs=1e-3)
    # steps 0, 1, ... begin at 0, 1, ... s
    assert [number for number, (_, new) in enumerate(handed) if "second" in new] == [step]


def test_steps_follow_one_another_without_a_gap() -> None:
    times = [at for at, _ in run(0.002)]
    # the last step is handed over before the one before it has ended
    assert times[-1] < len(times) - 1.0


def test_deeper_pipelines_plan_as_soon_as_there_is_a_place() -> None:
    planned = [at for at, _ in run(0.002, depth=3)][20:50]
    assert planned == pytest.approx([18.0 + n for n in range(30)])


def test_a_scheduler_that_does_not_know_the_backends_windows_is_refused() -> None:
    backend = NullBackend(num_blocks=64, block_size=4, window=8, num_window_blocks=64)
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=128)
    with pytest.raises(
        ConfigError, match=r"wants 0 window blocks .* the backend has 64 for one of 8"
    ):
        EngineCore(backend, config, CACHE)
    cache = CacheConfig(block_size=4, num_blocks=64, window=8, num_window_blocks=64)
    EngineCore(backend, config, cache).close()


def test_too_few_window_blocks_are_refused_with_the_number() -> None:
    backend = NullBackend(num_blocks=400, block_size=4, window=9, num_window_blocks=119)
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1024)
    cache = CacheConfig(block_size=4, num_blocks=400, window=9, num_window_blocks=119)
    # 8 x (41 / 4 + 2) + 64 / 4
    with pytest.raises(ConfigError, match=r"num_window_blocks=119: 8 requests .* may need 120"):
        EngineCore(backend, config, cache)
    # all that there are blocks for are enough
    EngineCore(backend, config, replace(cache, num_blocks=119)).close()
