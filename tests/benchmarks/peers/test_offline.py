from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.common.processes import Command, Unavailable
from benchmarks.peers.__main__ import number
from benchmarks.peers.offline import Contender, Measured, Team, by_variant, run_rows, summary
from benchmarks.peers.quality import failing, headline, headline_table, qualities
from benchmarks.peers.report import equal_table, format_table, offline_table
from benchmarks.peers.rows import ROWS, make_job, parse_row
from paceline.backends.native import unavailable_reason
from paceline.quantize import check
from paceline.quantize.check import REFERENCE, build, forward_of
from tests.quantize.test_folder import folder_of

VOCAB = 1000


class FakePeer:
    """Workers of tests.benchmarks.peers.fake_worker; with prefix caching another one."""

    def __init__(
        self, name: str, record: Path, modes: tuple[str, ...] = ("ok",), *, worker: str = ""
    ) -> None:
        self.name = name
        self._worker = worker or name
        self.variants = modes
        self.served = ""
        self._record = record

    def setup(self) -> None:
        pass

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        return Command(
            (sys.executable, "-m", "tests.benchmarks.peers.fake_worker", variant,
             str(self._record)),
            (("FAKE", f"{self._worker} {prefix_caching}"),),
        )  # fmt: skip

    def server(self, port: int) -> Command:
        raise Unavailable("no server")


def test_rows_say_what_they_are() -> None:
    row = parse_row("64x128x32")
    assert (row.count, row.shared, row.own, row.output) == (64, 0, 128, 32)
    assert row.prompt_tokens == 64 * 128 and row.total_tokens == 64 * 160
    row = parse_row("prefix-64x1024+32x64")
    assert (row.count, row.shared, row.own, row.output) == (64, 1024, 32, 64)
    assert row.total_tokens == 64 * (1056 + 64)
    assert [parse_row(name).name for name in ROWS] == list(ROWS)
    for bad in ("64x128", "0x1x1", "64x1024+32x64", "prefix-64x32x64", "axbxc", "1x1x1 "):
        with pytest.raises(ValueError, match="row"):
            parse_row(bad)


def test_prompts_share_exactly_the_prefix_and_differ_between_rounds() -> None:
    row = parse_row("prefix-4x64+32x8")
    job = make_job(row, VOCAB, seed=0)
    assert job.max_tokens == 8 and job.shared == 64
    assert {len(prompt) for prompt in job.prompts} == {96}
    assert len({tuple(prompt[:64]) for prompt in job.prompts}) == 1
    assert len({tuple(prompt[64:]) for prompt in job.prompts}) == 4
    assert all(100 <= token < VOCAB for prompt in job.prompts for token in prompt)
    assert make_job(row, VOCAB, seed=0) == job
    assert make_job(row, VOCAB, seed=1).prompts[0][:64] != job.prompts[0][:64]


def test_contenders_take_turns_and_the_best_variant_counts(tmp_path: Path) -> None:
    record = tmp_path / "record"
    peers = [FakePeer("a", record, ("ok", "fail")), FakePeer("b", record)]
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    lines: list[str] = []
    try:
        rows = [parse_row("2x7x3"), parse_row("3x13x1")]
        first, second = run_rows(rows, peers, team, rounds=2, report=lines.append)
        assert set(team.startup) == set(team.idle) == {"a ok", "a fail", "b ok"}
        assert set(team.peak_rss_mb()) == {"a ok", "b ok"}, "the one that failed was ended"
    finally:
        team.close()
    timed = [line for line in record.read_text().splitlines() if line.endswith(" 2")]
    pids = [line.split()[0] for line in timed]
    assert len(set(pids)) == 3 and pids[3:] == [*pids[1:3], pids[0]], "A B C, then B C A"
    assert len(lines) == 2 * 3 + 2 * 2

    values = summary(first)
    assert values["a"] == {
        "output_tps": 3.0, "total_tps": 10.0, "seconds": 2.0, "variant": "ok",
        "best_of": 2, "rounds": 2,
    }  # fmt: skip
    assert set(values) == {"a", "b"}
    assert by_variant(first) == {"a ok": [2.0, 2.0], "a fail": [2.0, 2.0], "b ok": [2.0, 2.0]}
    # in the second row one variant broke: the other stands for the peer
    assert "13 is too many" in second.failed[Contender("a", "fail")]
    assert summary(second)["a"]["variant"] == "ok"


def test_two_names_of_one_worker_never_have_it_answer_the_same_prompts(tmp_path: Path) -> None:
    """It would find them in its prefix cache. Other workers have the same prompts as its first."""
    record = tmp_path / "record"
    twice = FakePeer("a", record)
    alias = FakePeer("another name of a", record, worker="a")
    peers = [twice, alias, FakePeer("b", record)]
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    try:
        # the same row by name a second time is no better
        rows = [parse_row("3x7x3"), parse_row("3x7x3")]
        (first, second) = run_rows(rows, peers, team, rounds=2)
    finally:
        team.close()
    for measured in (first, second):
        assert {len(seconds) for seconds in measured.seconds.values()} == {2}
        assert set(summary(measured)) == {"a", "another name of a", "b"}
    jobs: dict[str, list[str]] = {}
    for line in record.read_text().splitlines():
        pid, prompts, count = line.split()
        if count == "3":
            jobs.setdefault(pid, []).append(prompts)
    of_a, of_b = jobs.values()
    assert (len(of_a), len(of_b)) == (8, 4)
    assert len(set(of_a)) == 8 and len(set(of_b)) == 4
    assert of_b == of_a[:4]


def test_a_worker_that_fails_fails_under_all_its_names(tmp_path: Path) -> None:
    record = tmp_path / "record"
    peers = [FakePeer("a", record, ("fail",)), FakePeer("b", record, ("fail",), worker="a")]
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    try:
        (measured,) = run_rows([parse_row("3x13x1")], peers, team, rounds=2)
    finally:
        team.close()
    values = summary(measured)
    assert set(values) == {"a", "b"}
    for value in values.values():
        assert "13 is too many" in value["absent"]


def test_rows_that_take_no_time_run_again(tmp_path: Path) -> None:
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    try:
        # a second each, and three
        rows = [parse_row("1x7x3"), parse_row("3x7x3")]
        peers = [FakePeer("a", tmp_path / "r"), FakePeer("b", tmp_path / "r")]
        short, long = run_rows(rows, peers, team, rounds=1)
    finally:
        team.close()
    assert by_variant(short) == {"a ok": [1.0] * 3, "b ok": [1.0] * 3}
    assert by_variant(long) == {"a ok": [3.0], "b ok": [3.0]}


def test_prefix_rows_have_workers_of_their_own_where_that_is_another_command(
    tmp_path: Path,
) -> None:
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    try:
        rows = [parse_row("1x4x1"), parse_row("prefix-2x4+4x1")]
        run_rows(rows, [FakePeer("a", tmp_path / "r")], team, rounds=1)
        assert set(team.startup) == {"a ok", "a ok prefix"}
    finally:
        team.close()


def test_a_peer_that_does_not_run_is_absent_with_the_reason(tmp_path: Path) -> None:
    peers = [FakePeer("a", tmp_path / "r", ("refuse",)), FakePeer("b", tmp_path / "r")]
    team = Team(tmp_path, VOCAB, idle_seconds=0.02)
    try:
        (measured,) = run_rows(
            [parse_row("1x4x1")],
            peers,
            team,
            rounds=1,
            skip=lambda contender, row: "too slow" if contender.peer == "b" else None,
        )
    finally:
        team.close()
    values = summary(measured)
    assert "no such model: 42" in values["a"]["absent"]
    assert values["b"] == {"absent": "too slow"}


def test_the_table_compares_with_the_best_other_engine() -> None:
    measured = Measured(parse_row("4x10x10"))
    measured.seconds[Contender("paceline", "q4")] = [1.0, 9.0, 2.0]
    measured.seconds[Contender("paceline-bf16", "bfloat16")] = [1.0]
    measured.seconds[Contender("slow", "x")] = [8.0]
    measured.seconds[Contender("fast", "x")] = [5.0]
    measured.seconds[Contender("fast", "y")] = [4.0]
    measured.failed[Contender("gone", "x")] = "not here"
    single = Measured(parse_row("1x9x1"))
    single.seconds[Contender("paceline", "q4")] = [0.1]
    names = ["paceline", "paceline-bf16", "slow", "fast", "gone"]
    precisions = {
        "paceline q4": "q4/int8", "paceline-bf16 bfloat16": "bfloat16/bfloat16",
        "slow x": "bfloat16/bfloat16", "fast x": "Q4_0/float16", "fast y": "Q8_0/float16",
    }  # fmt: skip
    table = offline_table({m.row.name: summary(m) for m in (measured, single)}, names, precisions)
    head, best, more, first, second = table.splitlines()
    assert head.split() == ["tokens/s", *names, "ratio"]
    assert best.split() == [
        "best", "of", "q4/int8", "bfloat16/bfloat16", "bfloat16/bfloat16", "Q4_0/float16"
    ]  # fmt: skip
    assert more.split() == ["Q8_0/float16"]
    assert first.split() == ["4x10x10", "20", "40", "5", "10", "-", "2.00x", "fast"]
    assert second.split() == ["1x9x1", "(all)", "100", "-", "-", "-", "-", "-"]

    seconds = {m.row.name: by_variant(m) for m in (measured, single)}
    lines = [line.split() for line in format_table(seconds, precisions).splitlines()]
    assert lines[0] == ["engine", "and", "variant", "weights/KV", "4x10x10", "1x9x1"]
    assert lines[1] == ["paceline", "q4", "q4/int8", "20", "100"]
    assert lines[-1] == ["fast", "y", "Q8_0/float16", "10", "-"]
    assert len(lines) == 6
    # q4 is the faster one of ours, and what has no bfloat16 is not compared with
    (_, equal) = equal_table(seconds, precisions).splitlines()
    assert equal.split() == ["4x10x10", "40", "8.00x", "slow"]
    assert equal_table(seconds, {"paceline q4": "q4/int8"}) == ""


def test_the_headline_is_over_what_passes_the_gate() -> None:
    seconds = {
        "4x10x10": {"paceline q4/int8": [2.0], "paceline-bf16 bfloat16/bfloat16": [1.0],
                    "fast Q4_0": [1.0], "fast Q8_0": [4.0], "slow x": [8.0]},
        "1x9x1": {"paceline q4/int8": [0.1], "fast Q4_0": [0.2]},
        "2x9x1": {"fast Q4_0": [0.2]},
    }  # fmt: skip
    quality = {
        "paceline q4/int8": {"kl": 0.004, "top1": 0.96, "passes": True},
        "fast Q4_0": {"kl": 0.25, "top1": 0.74, "passes": False},
        "fast Q8_0": {"kl": 0.003, "top1": 0.97, "passes": True},
    }
    found = headline(seconds, failing(quality))
    assert found == {
        "4x10x10": {"equal": {"ratio": 2.0, "against": "fast Q8_0"},
                    "all": {"ratio": 0.5, "against": "fast Q4_0"}},
        "1x9x1": {"all": {"ratio": 2.0, "against": "fast Q4_0"}},
    }  # fmt: skip
    # what was not measured counts as passing
    del seconds["4x10x10"]["fast Q8_0"]
    assert headline(seconds, failing(quality))["4x10x10"]["equal"]["against"] == "slow x"
    _, first, second = headline_table(found, quality).splitlines()
    assert "2.00x fast Q8_0 (KL 0.0030, top-1 97.0%)" in first
    assert first.endswith("0.50x fast Q4_0 (KL 0.2500, top-1 74.0%)")
    assert second.split()[:2] == ["1x9x1", "-"]


class Telling(FakePeer):
    """A peer that tells logits of one variant: ours in float32."""

    def __init__(self, model: Path, logs: Path) -> None:
        super().__init__("tells", logs, ("one", "other"))
        self._model = model

    def variant_logits(self, variant: str, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        if variant == "other":
            raise Unavailable("it does not load")
        shape = (windows.shape[0], windows.shape[1])
        exact = build(self._model, REFERENCE, 1, shape)
        logits = forward_of(exact, shape)(windows, 0).copy()
        exact.close()
        return logits


@pytest.mark.skipif(unavailable_reason() is not None, reason="native kernels are lacking")
def test_peers_that_tell_their_logits_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, threads = folder_of(tmp_path / "model"), torch.get_num_threads()
    monkeypatch.setattr(check, "WINDOWS", 4)
    ours = {"q4/int8": {"prompts": {"kl": 0.004, "top1": 0.96}, "passes": True}}
    silent = FakePeer("silent", tmp_path)
    found = qualities([silent, Telling(folder, tmp_path)], folder, ours, 1)
    torch.set_num_threads(threads)
    assert set(found) == {"paceline q4/int8", "tells one"}
    assert found["tells one"] == {"kl": 0.0, "top1": 1.0, "passes": True}
    assert qualities([silent], folder, ours, 1) == {"paceline q4/int8": found["paceline q4/int8"]}


def test_numbers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROUNDS", raising=False)
    assert number("ROUNDS", 99) is None
    for value, expected in (("", None), ("5", 5)):
        monkeypatch.setenv("ROUNDS", value)
        assert number("ROUNDS", 99) == expected
    for value in ("0", "-1", "100", "x", "²"):
        monkeypatch.setenv("ROUNDS", value)
        with pytest.raises(ValueError, match=re.escape(f"ROUNDS={value}")):
            number("ROUNDS", 99)
