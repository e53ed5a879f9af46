"""What the live part of ``make bench NAME=vllm`` counts."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.client import Timing
from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.unmeasured import Unmeasured
from benchmarks.vllm.live import (
    Contender,
    Load,
    Windows,
    Work,
    figures,
    measure,
    other_words,
    requests_at,
    served,
)

WORK = Work(vocabulary=1_000, short=(4, 8), long=(20, 30), outputs=(3, 3), ttft=(1.0, 5.0))


def test_requests_are_the_same_for_everybody() -> None:
    plan = requests_at(20.0, 10.0, WORK, seed=3)
    assert plan == requests_at(20.0, 10.0, WORK, seed=3) != requests_at(20.0, 10.0, WORK, seed=4)
    longer = requests_at(20.0, 30.0, WORK, seed=3)
    assert longer[: len(plan)] == plan, "the sustained rate begins with the same arrivals"
    assert 150 < len(plan) < 250 and all(0.0 < request.at < 10.0 for request in plan)
    long = [request for request in plan if len(request.prompt) >= 20]
    assert 0.05 < len(long) / len(plan) < 0.3
    assert {WORK.ttft_of(request) for request in long} == {5.0}


def test_kept_are_complete_and_within_both_targets() -> None:
    plan = requests_at(20.0, 10.0, WORK, seed=3)
    short = next(request for request in plan if len(request.prompt) <= 8)
    long = next(request for request in plan if len(request.prompt) >= 20)
    quick, late = Timing(0.0, (0.9, 1.0, 1.05), 3), Timing(0.0, (1.5, 1.6, 1.65), 3)
    slow, refused = Timing(0.0, (0.5, 0.8, 1.2), 3), Timing(0.0, (), 0, "status 429")
    found = figures(
        [short, short, long, short, short], [quick, late, late, slow, refused], WORK, 2.0
    )
    # the quick one, and the late one whose prompt is long
    assert (found["kept"], found["requests"], found["complete"]) == (0.4, 5, 4)
    assert (found["kept_ttft"], found["kept_tpot"]) == (0.6, 0.6)
    assert found["tokens_per_s"] == 6.0


class Peer:
    """Servers without a model; ``absent`` is a flag with which none starts."""

    def __init__(self, absent: str = "") -> None:
        self.absent = absent

    def server(self, port: int) -> Command:
        if self.absent:
            return Command((sys.executable, "-c", f"raise SystemExit({self.absent!r})"))
        return Command((sys.executable, "-m", "tests.benchmarks.vllm_server", str(port)))


def test_figures_of_all_contenders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed, found = Unmeasured(), dict[str, Any]()
    windows = Windows(capacity=0.1, rate=0.1, sustained=0.2, turns=2)
    work = Work(vocabulary=1_000, tuned=((256, 16), (1024, 16)), outstanding=4)
    measure(Peer(), work, tmp_path, (Load(0.2), Load(0.4)), windows, failed, found)
    assert failed.reasons.keys() == {"tuned-1024-16"}
    assert "no room for 1,024" in failed.reasons["tuned-1024-16"]
    assert failed.exit_code == 0
    assert found.keys() == {
        "capacity_per_s", "rates", "below_capacity", "identical_greedy", "sustained", "steps_live",
        "tpot_s",
    }  # fmt: skip
    # vLLM's capacity is measured before each load of each turn, and before the sustained one
    assert [len(each) for each in found["capacity_per_s"].values()] == [2, 7]
    assert found["tpot_s"]["target"] == pytest.approx(5 * found["tpot_s"]["alone"], abs=1e-3)
    for rate in (*found["rates"].values(), found["below_capacity"]):
        assert rate.keys() == {
            "possible", "plain", "plain, 0.1 s", "paced", "paced, 0.1 s", "tuned", "tuned, 0.1 s",
        }  # fmt: skip
        assert rate["plain"]["complete"] == rate["paced"]["complete"] == rate["plain"]["requests"]
        assert rate["tuned"]["flags"] == "--max-num-batched-tokens 256 --max-num-seqs 16"
        assert len(rate["paced"]["turns"]) == len(rate["paced, 0.1 s"]["turns"]) == 2
    assert found["sustained"]["requests"] > found["rates"]["0.4"]["paced"]["requests"] / 2
    assert found["identical_greedy"] == {"alone": 1.0, "together": 1.0}
    assert found["steps_live"] == {"amended_share": 0.25, "actual_over_predicted": 1.25}
    json.dumps(found)
    # every second turn is in the opposite order
    order = [
        line.split("capacity, ")[1].split("{")[0].strip()
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("   0.2 x")
    ]
    once = ["plain", "paced", "tuned-256-16", "paced, 0.1 s"]
    assert order == once + once[::-1]


def test_a_server_that_is_not_measured_is_frozen(tmp_path: Path) -> None:
    async def state() -> str:
        return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with served(Peer(), Contender("plain"), tmp_path) as server:
        # an idle vLLM spins
        assert server.measured(state()) in "RS"
        while asyncio.run(state()) != "T":  # a signal takes a moment
            time.sleep(0.01)
        server.process.send_signal(signal.SIGKILL)
        with pytest.raises(Unavailable, match="plain ended"):
            server.measured(asyncio.sleep(0.2))


def test_without_a_server_nothing_is_measured(tmp_path: Path) -> None:
    failed, found = Unmeasured(), dict[str, Any]()
    windows = Windows(capacity=0.1, rate=0.1, sustained=0.1)
    measure(Peer("no model"), WORK, tmp_path, (Load(1.5),), windows, failed, found)
    assert "no model" in failed.reasons["plain"] and found == {"rates": {}}


def test_no_load_finds_prompts_of_another_one_cached() -> None:
    plans = [Load(multiple).requests(10.0, 20.0, WORK) for multiple in (0.5, 1.2, 1.5)]
    prompts = [tuple(request.prompt) for plan in plans for request in plan]
    assert len(set(prompts)) == len(prompts) > 300


def test_other_words_are_the_same_work() -> None:
    plan = Load(1.2).requests(10.0, 20.0, WORK)
    other = other_words(plan, WORK, 1)
    assert [(r.at, len(r.prompt), r.output) for r in plan] == [
        (r.at, len(r.prompt), r.output) for r in other
    ]
    assert not {tuple(r.prompt) for r in plan} & {tuple(r.prompt) for r in other}


def test_bursts_arrive_together() -> None:
    plan = Load(2.0, burst=5).requests(10.0, 20.0, WORK)
    assert 200 < len(plan) < 600 and len({request.at for request in plan}) == len(plan) / 5
    assert Load(2.0, burst=5).name == "2 in bursts of 5"
