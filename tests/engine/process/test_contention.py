"""Contended cores are told, once a minute, and only where there is something to lose."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.process.contention import Contention, ContentionMeter, Sample, read_sample
from paceline.engine.testing import ByteTokenizer

START = Sample(now=100.0, ran=50.0, waited=5.0, busy=1000.0, own=60.0)


def after(before: Sample, seconds: float = 10.0, **more: float) -> Sample:
    values = {name: getattr(before, name) + value for name, value in more.items()}
    return replace(before, now=before.now + seconds, **values)


def looked(*samples: Sample) -> list[Contention | None]:
    meter = ContentionMeter()
    return [meter.look(sample) for sample in samples]


def test_two_busy_loops_beside_two_threads() -> None:
    then = after(START, ran=10.0, waited=10.0, busy=20.0, own=11.0)
    assert looked(START, then) == [None, Contention(waited=0.5, others=0.9)]


def test_an_engine_that_hardly_runs_for_others_is_the_worst_case() -> None:
    then = after(START, ran=0.1, waited=19.9, busy=20.0, own=0.2)
    (_, found) = looked(START, then)
    assert found is not None and found.waited > 0.99 and found.others == pytest.approx(1.98)


@pytest.mark.parametrize(
    "more",
    [
        # alone: the threads wait a little for one another's processors and the server's
        {"ran": 19.0, "waited": 1.0, "busy": 20.0, "own": 20.0},
        # crowded by its own server alone
        {"ran": 10.0, "waited": 10.0, "busy": 20.0, "own": 19.0},
        # others are busy, and it hardly has work
        {"ran": 0.5, "waited": 1.0, "busy": 20.0, "own": 0.5},
        # others are busy on processors of their own
        {"ran": 19.0, "waited": 0.5, "busy": 200.0, "own": 20.0},
        # a thread ended, and its counts are gone
        {"ran": -5.0, "waited": 10.0, "busy": 20.0, "own": 1.0},
    ],
)
def test_what_is_no_contention(more: dict[str, float]) -> None:
    assert looked(START, after(START, **more)) == [None, None]


def test_it_is_told_once_a_minute() -> None:
    samples = [START]
    for _ in range(13):
        samples.append(after(samples[-1], ran=10.0, waited=10.0, busy=20.0, own=11.0))
    told = [i for i, found in enumerate(looked(*samples)) if found is not None]
    assert told == [1, 7, 13]


def test_counters_are_read(tmp_path: Path) -> None:
    for task, text in (("1", "2000000000 500000000 9"), ("2", "1000000000 250000000 3")):
        (tmp_path / "self" / "task" / task).mkdir(parents=True)
        (tmp_path / "self" / "task" / task / "schedstat").write_text(text)
    (tmp_path / "7").mkdir()
    rest = " ".join(["0"] * 11 + ["200", "100"] + ["0"] * 20)
    (tmp_path / "self" / "stat").write_text(f"3 (an (odd) name) {rest}")
    (tmp_path / "7" / "stat").write_text(f"7 (server) {rest}")
    (tmp_path / "stat").write_text("cpu 100 200 300 4000 50 10 20 70 5 5\ncpu0 1\n")
    found = read_sample(1.0, tmp_path, parent=7)
    assert found == Sample(now=1.0, ran=3.0, waited=0.75, busy=7.0, own=6.0)
    assert read_sample(1.0, tmp_path / "none") is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_this_machines_counters_are_read() -> None:
    first = read_sample(1.0)
    assert first is not None and first.ran > 0 and first.busy > first.own > 0
    sum(range(1_000_000))
    second = read_sample(2.0)
    assert second is not None and second.ran > first.ran


_CONTENDED = """
import sys
from paceline.engine.process import contention

contention._LOOK = 0.01
samples = iter(range(10**9))


def sample(now, parent):
    i = next(samples)
    return contention.Sample(10.0 * i, 10.0 * i, 10.0 * i, 20.0 * i, 11.0 * i)


contention.read_sample = sample
sys.path.insert(0, {root!r})
from paceline.engine.process.process import engine_main
from tests.engine.null_engine import build

sys.exit(engine_main(build))
"""


async def test_an_engine_process_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    source = _CONTENDED.format(root=str(Path(__file__).parents[3]))
    client = await ProcessEngineClient.start((sys.executable, "-c", source), b"{}", ByteTokenizer)
    said = ""
    while "cores_contended" not in said:
        said += capfd.readouterr().err
    await client.close()
    assert "cores_contended waited=0.50 others=0.9 " in said
