"""Simulated adapters: the engine's own store on a virtual clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.common.statistics import percentile
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.engine.recorder import FileRecorder
from paceline.errors import ConfigError
from paceline.sim.adapters import AdapterSettings
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Pool
from paceline.sim.recording import Recording
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes
from paceline.sim.step_times.recorded import RecordedStepTimes
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.spec import open_workload

ONE = 10 << 20
WORKLOAD = "synthetic:rate=20,prompt=fixed(50),output=fixed(20),n=300,adapters=64,zipf=1.1"


def config(places: int = 1000, **scheduler: object) -> ReplicaConfig:
    settings = {"max_model_len": 4096, "max_num_seqs": 16} | scheduler
    return ReplicaConfig(
        scheduler=SchedulerConfig(**settings),  # type: ignore[arg-type]
        cache=CacheConfig(block_size=16, num_blocks=4000),
        adapters=AdapterSettings(ONE, places * ONE),
    )


def run(
    arrivals: list[Arrival], settings: ReplicaConfig, recording: Path | None = None
) -> tuple[list[Served], int]:
    """Requests by arrival, and adapters that left memory."""
    served: list[Served] = []
    made: list[FileRecorder] = []

    def record(number: int, of: ReplicaConfig) -> FileRecorder:
        assert recording is not None
        made.append(FileRecorder(recording, of.scheduler, of.cache, of.pipeline_depth))
        return made[-1]

    simulator = Simulator(
        Pool.single(settings, FixedStepTimes(0.01)),
        served.append,
        recorder=None if recording is None else record,
    )
    totals = simulator.run(arrivals)
    for recorder in made:
        recorder.close()
    assert len(served) == len(arrivals)
    return sorted(served, key=lambda each: each.arrival.at), totals.num_evicted_adapters


def test_adapters_of_a_workload_are_drawn_by_zipf() -> None:
    arrivals = list(open_workload(WORKLOAD.replace("n=300", "n=20000")))
    counts = Counter(each.adapter for each in arrivals)
    assert len(counts) == 64
    assert counts["adapter-1"] / counts["adapter-2"] == pytest.approx(2**1.1, rel=0.1)
    assert arrivals == list(open_workload(WORKLOAD.replace("n=300", "n=20000")))
    assert {
        each.adapter for each in open_workload(WORKLOAD.replace(",adapters=64,zipf=1.1", ""))
    } == {""}
    for wrong, said in (
        ("adapters=0", "adapters must be at least 1"),
        ("adapters=2,zipf=-1", "zipf must be 0 or more"),
        ("zipf=1", "unknown option zipf"),
    ):
        with pytest.raises(WorkloadError, match=said):
            open_workload(WORKLOAD.replace("adapters=64,zipf=1.1", wrong))


def test_a_request_waits_for_the_load_of_its_adapter_alone() -> None:
    def at(second: float, adapter: str) -> Arrival:
        return Arrival(second, 50, 2, adapter=adapter)

    load = ONE * AdapterSettings().load_byte

    def began(*arrivals: Arrival) -> list[float]:
        served, _ = run(list(arrivals), config())
        return [(each.first_scheduled or math.inf) - each.arrival.at for each in served]

    cold, base, warm = began(at(0.0, "a"), at(0.001, ""), at(5.0, "a"))
    assert load <= cold < load + 0.011
    assert base < load
    assert warm < 1e-6
    # of two that are loaded, the second waits for both
    one, two = began(at(0.0, "a"), at(0.0, "b"))
    assert two >= 2 * load > one


def test_steps_take_longer_by_bytes_and_rows() -> None:
    each = AdapterSettings()
    (plain,), _ = run([Arrival(0.0, 50, 101)], config())
    (adapted,), _ = run([Arrival(0.0, 50, 101, adapter="a")], config())
    assert plain.tpot == pytest.approx(0.01)
    assert adapted.tpot == pytest.approx(0.01 + ONE * (each.read_byte + each.row_byte))


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_few_places_serve_all_and_none_waits_for_ever(policy: str) -> None:
    arrivals = list(open_workload(WORKLOAD))
    some, evicted = run(arrivals, config(12, policy=policy))
    rich, none = run(arrivals, config(policy=policy))
    assert none == 0 < evicted
    assert all(each.output_tokens == 20 for each in [*some, *rich])
    # a cold one waits for a second, those under way, and loads: longer only behind other cold ones
    longest = max(each.ttft or 0.0 for each in some)
    assert max(each.ttft or 0.0 for each in rich) < longest < 15.0


def test_twice_as_many_adapters_as_places_cost_loads_and_no_more() -> None:
    """16 adapters asked for in turn, of which 8 fit, so that each request needs a load."""
    arrivals = [Arrival(0.1 * i, 50, 10, adapter=f"a{i % 16}") for i in range(160)]
    served, evicted = run(arrivals, config(8))
    assert evicted >= 160 - 16 - 8
    load = ONE * AdapterSettings().load_byte
    assert max(each.ttft or math.inf for each in served) < 2 * load + 0.05


def test_a_cold_adapter_does_not_starve_behind_floods() -> None:
    """A B A A A ... with one place, then a third one: each waits for those before it."""
    times = {"a": [0.05 * i for i in range(400)], "b": [1.0], "c": [1.2]}
    arrivals = [Arrival(at, 50, 20, adapter=name) for name, each in times.items() for at in each]
    served, _ = run(sorted(arrivals, key=lambda each: each.at), config(1))
    first = {
        name: max(each.ttft or math.inf for each in served if each.arrival.adapter == name)
        for name in "abc"
    }
    # a second of patience, the requests under way, the load
    turn = 1.0 + 21 * 0.02 + ONE * AdapterSettings().load_byte
    assert first["b"] < turn
    assert first["c"] < 2 * turn
    assert first["a"] < 3 * turn


class SlowSteps:
    """10 ms a step, 0.9 ms a prompt token and 1.1 ms a row."""

    def another(self, seed: int) -> SlowSteps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        tokens = [row.num_tokens for row in plan.rows]
        wide = sum(count for count in tokens if count > 1)
        return 0.010 + 0.0009 * wide + 0.0011 * tokens.count(1)


def first_tokens(callers: int, seed: int = 2, seconds: float = 112.0) -> list[float]:
    """Of requests for eight adapters, four a second, next to ``callers`` of a ninth that each ask
    again as soon as they are answered."""
    rng, own, at = random.Random(seed), random.Random(seed + 1000), 0.0
    arrivals: list[Arrival] = []
    while (at := at + rng.expovariate(4.0)) < seconds:
        tokens = rng.randint(16, 160)
        arrivals.append(Arrival(at + 3.0, tokens, 16, adapter=f"a{rng.randrange(8)}"))

    def flood(at: float) -> Arrival:
        return Arrival(at, own.randint(16, 160), 16, adapter="flood")

    def served(each: Served) -> None:
        now = each.last_token or each.arrival.at
        if each.arrival.adapter != "flood":
            assert each.ttft is not None
            found.append(each.ttft)
        elif now < seconds + 5.0:
            simulator._arrivals.add(flood(now + (0.5 if each.refused else 0.003)))

    found: list[float] = []
    settings = config(64, policy="fair", max_num_seqs=256)
    simulator = Simulator(Pool.single(settings, SlowSteps()), served)
    arrivals += [flood(0.01 * caller) for caller in range(callers)]
    simulator.run(sorted(arrivals, key=lambda each: each.at))
    return sorted(found)


def test_a_flood_of_one_adapter_does_not_come_before_others_that_were_served_less() -> None:
    """The load of ``make bench NAME=adapters``; it was 2.6 times at p99 and 1.7 times at p90."""
    alone, both = first_tokens(0), first_tokens(48)
    assert len(alone) == len(both) > 400
    assert percentile(both, 0.99) <= 1.5 * percentile(alone, 0.99)
    assert percentile(both, 0.9) <= 1.4 * percentile(alone, 0.9)


def test_a_wait_that_is_predicted_too_long_is_refused_with_a_time_to_come_back() -> None:
    flood = [Arrival(0.01 * i, 50, 400, adapter=f"a{i % 2}") for i in range(8)]
    served, _ = run(
        [*flood, Arrival(0.2, 50, 2, adapter="cold")], config(2, max_predicted_ttft_s=0.5)
    )
    last = served[-1]
    assert (last.refused, last.reason) == (True, "predicted-ttft")
    assert last.retry_after is not None
    assert last.retry_after >= 1.0


def test_a_recording_tells_adapters_and_what_they_cost(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    arrivals = list(open_workload(WORKLOAD.replace("64", "5")))
    arrivals += [Arrival(100.0 + 0.01 * i, 50, 20) for i in range(50)]
    run(arrivals, config(), path)
    recording = Recording.read(path)
    again = list(recording.workload())
    # names are those of contents
    names = dict(zip((a.adapter for a in arrivals), (a.adapter for a in again), strict=True))
    assert len(set(names.values())) == len(names) == 6
    assert [names[each.adapter] for each in arrivals] == [each.adapter for each in again]
    assert names[""] == ""
    most = max(step.adapters[0] for step in recording.steps)
    assert most > ONE
    assert most % ONE == 0
    read_byte, product = RecordedStepTimes(recording).adapter_rates
    assert read_byte == pytest.approx(AdapterSettings().read_byte, rel=0.2)
    assert 0 <= product < 10 * AdapterSettings().row_byte


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="an adapter of 10 bytes must fit into the 5 for all"):
        AdapterSettings(10, 5)
    with pytest.raises(ConfigError, match="no less than 0 s"):
        AdapterSettings(read_byte=-1.0)
