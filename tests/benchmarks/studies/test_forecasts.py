"""The study of forecasts: its runs are the simulator's, and futures go on from where a run is."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from benchmarks.studies.ablation import CPU, LENGTHS, Noisy
from benchmarks.studies.forecasts import ARRIVALS, EVERY, SEEDS, WORKLOAD, _errors, run_of
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.arrival import Served
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.workload.spec import open_workload

JUDGED = range(40, 90)


def test_a_run_is_what_the_simulator_makes_of_the_same_arrivals() -> None:
    promises = run_of("sjf", "poisson", 3, judged=JUDGED)
    config = ReplicaConfig(
        scheduler=SchedulerConfig(policy="sjf", max_num_seqs=16, max_model_len=4096),
        cache=CacheConfig(block_size=16, num_blocks=8000, enable_prefix_caching=False),
        max_tokens=512,
    )
    served: list[Served] = []
    # those that were still to come when the last of these had its token make no difference to it
    last = max(promise.request.first_token_time or 0.0 for promise in promises)
    workload = open_workload(WORKLOAD.format(ARRIVALS["poisson"], LENGTHS), seed=3)
    arrivals = [arrival for arrival in islice(workload, 2000) if arrival.at <= last]
    Simulator(Pool.single(config, Noisy(CPU, random.Random(3))), served.append).run(arrivals)
    came = {each.arrival.at: each.ttft for each in served}
    assert len(promises) == len(JUDGED)
    for promise in promises:
        assert promise.actual == pytest.approx(came[promise.request.asked.arrival_time])


@pytest.mark.thorough
def test_what_priorities_are_told_is_calibrated() -> None:
    """The runs of the study, with some margin on what it shows (``docs/studies/forecasts.md``)."""
    runs = [run_of("priority", "poisson", seed) for seed in SEEDS]
    pairs = np.array([(p.predicted, p.actual) for promises in runs for p in promises])
    median, most, bias = map(float, _errors(*pairs.T))
    assert median <= 15.0 and most <= 60.0 and abs(bias) <= 12.0


@pytest.mark.thorough
def test_futures_differ_and_leave_the_run_as_it_is() -> None:
    plain = run_of("sjf", "poisson", 3, judged=JUDGED)
    drawn = run_of("sjf", "poisson", 3, judged=JUDGED, num_futures=3)
    assert [(p.predicted, p.actual) for p in plain] == [(p.predicted, p.actual) for p in drawn]
    asked = [p for p in drawn if p.futures]
    assert len(asked) == len(JUDGED) // EVERY
    for promise in asked:
        assert len(set(promise.futures)) == 3
        # under light load little is left to chance
        assert min(promise.futures) < 3.0 * promise.actual
        assert max(promise.futures) > promise.actual / 3.0
    again = run_of("sjf", "poisson", 3, judged=JUDGED, num_futures=3)
    assert [p.futures for p in again] == [p.futures for p in drawn], "a run is its arguments'"
