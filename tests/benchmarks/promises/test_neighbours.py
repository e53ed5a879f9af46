"""The benchmark of a server beside others: its figures, its groups and its neighbours."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.common.client import Timing
from benchmarks.common.processes import Unavailable
from benchmarks.promises.neighbours import ControlGroup, Neighbour, figures
from paceline.server.observability.snapshot.scrape import Scrape


def reading(now: float, steps: int, predicted: float, actual: float, missed: int) -> Scrape:
    return Scrape(
        now,
        {
            "vllm:num_requests_running": (({"model_name": "m"}, 1.0),),
            "paceline:steps_total": (({}, float(steps)),),
            "paceline:step_seconds_total": (
                ({"kind": "predicted"}, predicted),
                ({"kind": "actual"}, actual),
            ),
            "paceline:slo_violations_total": (
                ({"kind": "tpot", "slo_class": "standard"}, float(missed)),
                ({"kind": "ttft", "slo_class": "standard"}, 2.0),
            ),
            "vllm:generation_tokens_total": (({}, 8.0 * steps),),
        },
    )


def stream(end: float, pace: float, error: str = "") -> Timing:
    return Timing(end - 1.0, tuple(end - pace * i for i in range(10, -1, -1)), 11, error)


def test_figures_are_those_of_the_window() -> None:
    before, after = reading(10.0, 100, 1.0, 1.0, 1), reading(20.0, 1100, 10.0, 9.0, 4)
    # one that ended before it, two in it, one behind it
    timings = [stream(9.0, 1.0), stream(12.0, 0.009), stream(19.0, 0.011), stream(21.0, 1.0)]
    found = figures(before, after, timings)
    assert found["requests"] == 2
    assert found["tpot_ms"] == pytest.approx(10.0)
    assert found["step_ms"] == 8.0 and found["predicted_ms"] == 9.0
    assert found["predicted_by_measured_tpot"] == pytest.approx(0.9)
    assert found["predicted_by_measured_step"] == 1.125
    assert found["gap_max_ms"] == pytest.approx(11.0, abs=0.1)
    assert found["output_tokens_per_s"] == 800.0
    # the two that missed their first token had done so before
    assert found["missed"] == {"tpot": 3}


def test_a_window_in_which_nothing_went_well_has_no_figures() -> None:
    before, after = reading(10.0, 100, 1.0, 1.0, 1), reading(20.0, 1100, 10.0, 9.0, 4)
    with pytest.raises(Unavailable, match="1 requests failed: refused"):
        figures(before, after, [stream(12.0, 0.01), stream(12.0, 0.01, "refused")])
    with pytest.raises(Unavailable, match="no request ended"):
        figures(before, after, [stream(9.0, 0.01)])


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_says_how_many_processors_it_allows(tmp_path: Path, version: int) -> None:
    (tmp_path / "cpu").mkdir()
    if version == 2:
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    group = ControlGroup(1.5, tmp_path)
    folder = tmp_path if version == 2 else tmp_path / "cpu"
    assert group.folder.parent == folder
    files = {path.name: path.read_text() for path in group.folder.iterdir()}
    assert files == (
        {"cpu.max": "150000 100000"}
        if version == 2
        else {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    )
    assert str(group.folder) in group.around()[2]
    (group.folder / "cpu.stat").write_text(
        "nr_periods 9\nnr_throttled 4\n"
        + ("throttled_usec 1500000\n" if version == 2 else "throttled_time 1500000000\n")
    )
    assert group.throttled() == (4, 1.5)


def test_where_no_group_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="paceline-bench"):
        ControlGroup(1.5, tmp_path)


def used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_half_a_neighbour_is_stopped_now_and_then() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Neighbour(cpu, half=True) as neighbour:
        seen = set()
        deadline = time.monotonic() + 20
        while not {"R", "T"} <= seen and time.monotonic() < deadline:
            seen.add(state(neighbour.process.pid))
            time.sleep(0.005)
    assert {"R", "T"} <= seen
    assert neighbour.process.returncode is not None


def test_a_neighbour_keeps_to_its_processor() -> None:
    cpu = min(os.sched_getaffinity(0))
    with Neighbour(cpu) as neighbour:
        deadline = time.monotonic() + 20
        while used(neighbour.process.pid) < 0.1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.sched_getaffinity(neighbour.process.pid) == {cpu}
        assert used(neighbour.process.pid) >= 0.1
