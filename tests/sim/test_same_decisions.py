"""The live engine (real loop, real core, an executor that sleeps) and the simulator decide alike.

Both see one trace; the digest covers every plan: when it was made, its rows, block tables, copies,
releases and prompts. Policies, memory pressures, depths and prefix caching vary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.policies import POLICIES
from paceline.engine.recorder import Recorders
from paceline.sim.live import DecisionLog, run_live
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes
from paceline.timeline.codec import Decoder
from paceline.timeline.collect import Collector, Frames
from paceline.timeline.events import Kind, Plan
from tests.sim.workloads import bursty

TIMES = FixedStepTimes(0.004, 0.0001)
COUNT = 50


@pytest.fixture(autouse=True, params=[COUNT, pytest.param(150, marks=pytest.mark.thorough)])
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many requests there are."""
    monkeypatch.setitem(globals(), "COUNT", request.param)


def config(policy: str, num_blocks: int, *, depth: int = 2, caching: bool = True) -> ReplicaConfig:
    return ReplicaConfig(
        scheduler=SchedulerConfig(
            max_num_batched_tokens=128, max_num_seqs=16, max_model_len=512, policy=policy
        ),
        cache=CacheConfig(
            block_size=16, num_blocks=num_blocks, enable_prefix_caching=caching, watermark=0.02
        ),
        pipeline_depth=depth,
    )


def swapping(depth: int = 2) -> ReplicaConfig:
    """Preempted requests go to host memory."""
    settings = config("priority", 40, depth=depth)
    return replace(
        settings,
        scheduler=replace(settings.scheduler, preemption="swap", max_num_seqs=4),
        # half a step for each
        cache=replace(settings.cache, num_host_blocks=60, swap_block_seconds=0.002),
    )


def simulated(settings: ReplicaConfig) -> tuple[DecisionLog, int]:
    log = DecisionLog()

    def on_plan(_: int, plan: SchedulerOutput, now: float, start: float, end: float) -> None:
        log.add(plan, now)

    simulator = Simulator(
        Pool.single(settings, TIMES), lambda _: None, prefix_block=32, on_plan=on_plan
    )
    return log, simulator.run(bursty(COUNT)).num_preemptions


@pytest.mark.parametrize("num_blocks", [400, 40, 16], ids=["roomy", "tight", "starved"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_identical_decisions(policy: str, num_blocks: int) -> None:
    settings = config(policy, num_blocks)
    live = run_live(bursty(COUNT), settings, TIMES, prefix_block=32)
    simulation, preemptions = simulated(settings)
    assert live.num_plans > 100
    assert (simulation.num_plans, simulation.digest()) == (live.num_plans, live.digest())
    # the pressure is real
    assert preemptions > 0 or num_blocks > 16


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_identical_decisions_at_other_depths(depth: int, caching: bool) -> None:
    settings = config("fcfs", 40, depth=depth, caching=caching)
    live = run_live(bursty(COUNT), settings, TIMES, prefix_block=32)
    simulation, _ = simulated(settings)
    assert simulation.digest() == live.digest()


@pytest.mark.parametrize("depth", [1, 2])
def test_identical_decisions_where_blocks_are_moved_to_host_memory_and_back(depth: int) -> None:
    settings = swapping(depth)
    live = run_live(bursty(COUNT), settings, TIMES, prefix_block=32)
    moved = Moved()
    simulator = Simulator(
        Pool.single(settings, TIMES), lambda _: None, prefix_block=32, on_plan=moved
    )
    simulator.run(bursty(COUNT))
    assert moved.num_swaps > 0
    assert (moved.log.num_plans, moved.log.digest()) == (live.num_plans, live.digest())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [400, 16], ids=["roomy", "starved"])
@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_identical_decisions_where_tokens_are_drafted(
    policy: str, num_blocks: int, depth: int
) -> None:
    settings = replace(config(policy, num_blocks, depth=depth), acceptance=(0.9, 0.8, 0.7, 0.6))
    # few enough at a time for drafts
    settings = replace(settings, scheduler=replace(settings.scheduler, max_num_seqs=4))
    live = run_live(bursty(COUNT), settings, TIMES, prefix_block=32)
    drafted = Drafted()
    simulator = Simulator(
        Pool.single(settings, TIMES), lambda _: None, prefix_block=32, on_plan=drafted
    )
    simulator.run(bursty(COUNT))
    assert drafted.num_drafts > 50
    assert (drafted.log.num_plans, drafted.log.digest()) == (live.num_plans, live.digest())


class Drafted:
    """Decisions, and drafts in them."""

    def __init__(self) -> None:
        self.log = DecisionLog()
        self.num_drafts = 0

    def __call__(self, _: int, plan: SchedulerOutput, now: float, start: float, end: float) -> None:
        self.log.add(plan, now)
        self.num_drafts += sum(len(draft.token_ids) for draft in plan.drafts)


class Moved:
    """Decisions, and blocks that they move."""

    def __init__(self) -> None:
        self.log = DecisionLog()
        self.num_swaps = 0

    def __call__(self, _: int, plan: SchedulerOutput, now: float, start: float, end: float) -> None:
        self.log.add(plan, now)
        self.num_swaps += len(plan.swaps)


def test_the_digest_sees_a_difference() -> None:
    first, _ = simulated(config("fcfs", 40))
    other, _ = simulated(config("sjf", 40))
    deeper, _ = simulated(config("fcfs", 40, depth=1))
    assert len({first.digest(), other.digest(), deeper.digest()}) == 3


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (config("fcfs", 400), Kind.ADMIT),
        (config("deadline", 16), Kind.PREEMPT),
        (config("fair", 16), Kind.PREEMPT),
        (swapping(), Kind.SWAP),
    ],
    ids=["fcfs", "deadline", "fair", "swap"],
)
def test_identical_timelines(settings: ReplicaConfig, kind: Kind) -> None:
    """Byte by byte: so a page that shows one shows the other."""
    told = [Collector(settings.scheduler, settings.cache) for _ in range(2)]
    kept = [bytearray(), bytearray()]
    frames = [Frames(settings.scheduler, settings.cache, each.extend) for each in kept]
    both = [Recorders(*pair) for pair in zip(told, frames, strict=True)]
    run_live(bursty(COUNT), settings, TIMES, prefix_block=32, recorder=both[0])
    Simulator(
        Pool.single(settings, TIMES),
        lambda _: None,
        prefix_block=32,
        recorder=lambda number, config: both[1],
    ).run(bursty(COUNT))
    for each in both:
        each.close()
    for each in told:
        assert not each.model.requests and each.model.num_doubts == 0
    live, simulated_ = (list(Decoder().feed(bytes(each))) for each in kept)
    for one, other in zip(live, simulated_, strict=True):
        assert repr(one) == repr(other)
    # what it is about does happen
    assert any(e.kind == kind for f in live if isinstance(f, Plan) for e in f.events)
    assert len(told[0].trace()["traceEvents"]) > 1000
