"""vLLM's rules in simulation, the time beside the operators, and the recorded runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival, Served
from paceline.sim.step_times.profile import GraphPadding, Interconnect
from paceline.sim.vllm_runs.host import HostTime, for_run, measure
from paceline.sim.vllm_runs.prediction import predict, step_times
from paceline.sim.vllm_runs.runs import Measured, VllmRun, find_runs
from tests.sim.step_times.profiles import MODEL, write_profile
from tests.sim.step_times.test_experts import EXPERTS, write_experts

RUNS = Path(__file__).parents[3].parent / "shared" / "vllm-runs"
RECORDED = ("RTX4090-Llama-3.1-8B", "RTXPRO6000-Llama-3.1-8B", "RTXPRO6000-Qwen3-32B-tp2")


def toy_run(
    arrivals: list[Arrival], *, num_blocks: int = 10_000, max_num_seqs: int = 64
) -> VllmRun:
    """A run of these arrivals on the made-up profile; its stamps mean nothing yet."""
    return VllmRun(
        name="GPU-Toy-1B",
        model=MODEL,
        hardware="GPU",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=None,
        degree=1,
        num_engines=1,
        expert_parallel=False,
        link=Interconnect(),
        memory=None,
        block_size=16,
        num_gpu_blocks=num_blocks + 1,
        prefix_caching=True,
        async_scheduling=True,
        padding=GraphPadding((64,)),
        requests=tuple(Measured(arrival, 1.0, 2.0) for arrival in arrivals),
    )


def stamped(run: VllmRun, served: list[Served]) -> VllmRun:
    """The run as if the simulation had been the real thing."""
    requests = [
        Measured(s.arrival, s.first_token or 0.0, s.last_token or 0.0, s.first_scheduled)
        for s in served
    ]
    return replace(run, requests=tuple(requests))


def test_nobody_passes_a_request_that_does_not_fit(tmp_path: Path) -> None:
    write_profile(tmp_path)
    # 40 blocks: the first leaves no room for the second, though there is room for the third
    arrivals = [Arrival(0.0, 480, 100), Arrival(0.0, 400, 10), Arrival(0.0, 16, 10)]
    served = predict(toy_run(arrivals, num_blocks=40), tmp_path)
    first, second, third = (s.first_scheduled or 0.0 for s in served)
    assert first == 0.0
    assert second >= (served[0].last_token or 0.0) - 0.01
    assert third >= second


def test_the_last_one_in_is_preempted_however_little_another_would_lose(tmp_path: Path) -> None:
    write_profile(tmp_path)
    # the second holds one block and would lose nearly nothing; the third was let in after it
    arrivals = [Arrival(0.0, 160, 200), Arrival(0.0, 8, 200), Arrival(0.0, 200, 200)]
    served = predict(toy_run(arrivals, num_blocks=40), tmp_path)
    assert [s.preemptions > 0 for s in served] == [False, False, True]


def test_the_whole_pool_but_one_block_is_used(tmp_path: Path) -> None:
    write_profile(tmp_path)
    most = 0

    def look(_: int, plan: SchedulerOutput, *_times: float) -> None:
        nonlocal most
        most = max([most, *(block for new in plan.new_requests for block in new.block_ids)])

    arrivals = [Arrival(0.0, 16 * 38, 2), Arrival(0.0, 16, 2), Arrival(0.0, 16, 2)]
    predict(toy_run(arrivals, num_blocks=40), tmp_path, on_plan=look)
    assert most == 39


def test_data_parallel_engines_share_the_load(tmp_path: Path) -> None:
    write_profile(tmp_path)
    arrivals = [Arrival(0.01 * number, 300, 50) for number in range(20)]
    one = predict(toy_run(arrivals), tmp_path)
    two = predict(replace(toy_run(arrivals), num_engines=2), tmp_path)
    assert {s.replica for s in two} == {0, 1}
    assert mean(s.ttft or 0 for s in two) < mean(s.ttft or 0 for s in one)
    # nor is it known which engine a stamp is of
    assert (
        measure(replace(toy_run(arrivals), num_engines=2), step_times(toy_run(arrivals), tmp_path))
        is None
    )


def test_engines_that_share_experts_are_slower_than_those_that_do_not_wait(tmp_path: Path) -> None:
    write_experts(tmp_path)
    arrivals = [Arrival(0.01 * number, 300, 50) for number in range(20)]
    link = Interconnect(1, 16e9, 20e-6)
    run = replace(toy_run(arrivals), model=EXPERTS, num_engines=2, link=link)
    with pytest.raises(
        ConfigError, match=r"2 engine\(s\) of 1 GPU\(s\) without expert parallelism"
    ):
        predict(run, tmp_path)
    shared = predict(replace(run, expert_parallel=True), tmp_path)
    assert {s.replica for s in shared} == {0, 1}
    far = replace(run, expert_parallel=True, link=Interconnect(1, 1e9, 1e-3))
    assert mean(s.e2e or 0 for s in predict(far, tmp_path)) > mean(s.e2e or 0 for s in shared)


def test_time_beside_the_operators_is_found_again(tmp_path: Path) -> None:
    write_profile(tmp_path)
    rng = random.Random(1)
    at = 0.0
    arrivals = []
    for _ in range(60):
        at += rng.uniform(0.02, 0.06)
        arrivals.append(Arrival(at, rng.randint(200, 900), rng.randint(50, 200)))
    run = toy_run(arrivals)
    alone = step_times(run, tmp_path)
    for host in (0.0, 5e-3):
        real = stamped(run, predict(run, tmp_path, host_seconds=host))
        found = measure(real, alone)
        assert found is not None
        assert found.num_steps >= 8
        assert found.seconds_per_layer * MODEL.num_layers == pytest.approx(host, abs=2e-4)
    # nothing is known of too few
    assert measure(replace(real, requests=real.requests[:5]), alone) is None


def test_a_run_is_judged_by_the_others_on_its_hardware_alone() -> None:
    run = toy_run([Arrival(0.0, 10, 10)])
    own = HostTime(run.name, "GPU", 5.0, 9)
    elsewhere = HostTime("other", "GPU-2", 7.0, 9)
    assert for_run(run, [own, elsewhere]) == 0.0
    same = [HostTime("a", "GPU", 1e-3, 9), HostTime("b", "GPU", 3e-3, 9)]
    assert for_run(run, [own, elsewhere, *same]) == pytest.approx(2e-3 * MODEL.num_layers)


@pytest.mark.parametrize("name", RECORDED)
def test_real_runs_are_predicted_by_what_the_others_show(name: str) -> None:
    if not (RUNS / name).is_dir():
        pytest.skip(f"needs the recorded run {name} in {RUNS}")
    profiles = RUNS / "profiles"
    run = VllmRun.read(RUNS / name)
    others = [VllmRun.read(path) for path in find_runs(RUNS) if path.name != name]
    measured = [measure(other, step_times(other, profiles)) for other in others]
    host = for_run(run, [found for found in measured if found is not None])
    served = predict(run, profiles, host_seconds=host)
    assert [s.arrival for s in served] == [m.arrival for m in run.requests]
    errors = (
        mean(s.ttft or 0 for s in served) / mean(m.ttft for m in run.requests) - 1,
        mean(s.tpot or 0 for s in served) / mean(m.tpot or 0 for m in run.requests) - 1,
        mean(s.e2e or 0 for s in served) / mean(m.e2e for m in run.requests) - 1,
    )
    assert max(map(abs, errors)) <= 0.04, errors
