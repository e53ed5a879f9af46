"""Mixture-of-experts layers: the table, how many experts tokens reach, engines that share them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.step_times.experts import ExpertGroup, ExpertTable
from paceline.sim.step_times.profile import ProfileStepTimes
from tests.sim.step_times.profiles import MODEL, write_profile

PREFIX = "GPU-Toy-1B-bf16-tp1"
# each token goes to every expert, so that all are reached
EXPERTS = replace(MODEL, num_experts=4, experts_per_token=4, expert_intermediate_size=8)


def plan(*rows: tuple[int, int]) -> SchedulerOutput:
    made = tuple(ScheduledRow(str(i), s, n, (), True) for i, (s, n) in enumerate(rows))
    return SchedulerOutput(0, made, (), (), (), sum(n for _, n in rows))


def write_experts(folder: Path) -> None:
    """One layer: 30 us for each expert that is reached, and 1 us a token."""
    write_profile(folder)
    lines = ["tokens,activated_experts,time_us"]
    lines += [f"{t},{e},{t + 30 * e}" for t in (1, 1000) for e in (1, 4)]
    (folder / f"{PREFIX}-moe.csv").write_text("\n".join(lines) + "\n")


def test_the_table_is_linear_in_tokens_and_experts() -> None:
    table = ExpertTable([(1, 8, 10.0), (101, 8, 110.0), (1, 16, 30.0), (101, 16, 130.0)])
    assert table.at(51, 8) == pytest.approx(60.0)
    assert table.at(51, 12) == pytest.approx(70.0)
    # fewer than measured cost no less
    assert table.at(51, 2) == pytest.approx(60.0)
    with pytest.raises(ConfigError, match="empty"):
        ExpertTable([])


def test_tokens_reach_experts_by_chance() -> None:
    shape = replace(EXPERTS, num_experts=128, experts_per_token=8)
    assert shape.experts_reached(1) == pytest.approx(8)
    # 128 * (1 - (15/16)^16)
    assert shape.experts_reached(16) == pytest.approx(82.4, abs=0.1)
    assert shape.experts_reached(4096) == pytest.approx(128)


def test_experts_take_their_time_in_every_layer(tmp_path: Path) -> None:
    write_experts(tmp_path)
    without = ProfileStepTimes(tmp_path, model=MODEL).seconds(plan((0, 100)))
    with_them = ProfileStepTimes(tmp_path, model=EXPERTS).seconds(plan((0, 100)))
    # two layers of 100 tokens and 4 experts
    assert with_them - without == pytest.approx(2 * (100 + 120) * 1e-6)


def test_a_profile_without_its_experts_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"moe\.csv"):
        ProfileStepTimes(tmp_path, model=EXPERTS)


def test_engines_that_share_experts_wait_for_each_other(tmp_path: Path) -> None:
    write_experts(tmp_path)
    group = ExpertGroup(2, bandwidth=1e9, latency=1e-5)
    first, second = (ProfileStepTimes(tmp_path, model=EXPERTS, experts=group) for _ in range(2))
    dense = ProfileStepTimes(tmp_path, model=MODEL)
    alone = first.seconds(plan((0, 100)))
    # half the tokens and half the experts, gathered and scattered: 50 tokens of 2000 bytes at
    # 1 byte/ns, and 10 us, each
    moved = 2 * (10 + 100)
    assert alone == pytest.approx(dense.seconds(plan((0, 100))) + 2e-6 * (50 + 60 + moved))
    # the second one's single token waits for the first one's hundred
    beside = second.seconds(plan((99, 1)))
    moved = 2 * (10 + 101)
    assert beside == pytest.approx(dense.seconds(plan((0, 100))) + 2e-6 * (50.5 + 60 + moved))
    with pytest.raises(ConfigError, match="2 engines is full"):
        ProfileStepTimes(tmp_path, model=EXPERTS, experts=group)
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        ExpertGroup(2)
