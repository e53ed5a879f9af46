"""``paceline simulate``: every flag changes what it says, and the table matches the JSON."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.flags.options import engine_settings
from paceline.cli.flags.scheduling_options import ADMISSION, SCHEDULING
from paceline.cli.main import build_parser, main
from paceline.cli.simulation.simulated_pool import pool_of
from paceline.core.config import SchedulerConfig
from paceline.core.policies import POLICIES, FcfsPolicy
from paceline.sim.step_times.spec import open_step_times
from tests.cli.recordings import record_with_policy
from tests.engine.test_recorder import run as record
from tests.sim.report.test_page import parse

WORKLOAD = "synthetic:rate=20,prompt=lognormal(200,1),output=lognormal(30,1),n=60"
BASE = ("simulate", "--workload", WORKLOAD)
FIXED = (*BASE, "--step-times", "fixed:0.02,0.0001")


def runs(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main([*flags, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return found


# what was simulated before, for comparisons with one that many make
_PLAIN: dict[tuple[str, ...], list[dict[str, Any]]] = {}


def plain_runs(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    if flags not in _PLAIN:
        _PLAIN[flags] = runs(capsys, *flags)
    return _PLAIN[flags]


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*FIXED, "--policy", "fcfs,sjf", "--max-num-seqs", "2")
    flags += ("--max-predicted-ttft", "0", "--queue-timeout", "0")
    first, second = runs(capsys, *flags)
    assert (first["policy"], second["policy"]) == ("fcfs", "sjf")
    assert first["finished"] == second["finished"] == 60
    assert second["ttft"]["mean"] < 0.9 * first["ttft"]["mean"]
    assert main(list(flags)) == 0
    table = capsys.readouterr().out
    assert f"{1e3 * first['ttft']['mean']:.1f}" in table
    assert "sjf: backends busy" in table


def test_first_come_first_served_has_the_name_of_tutorials(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fifo, static = runs(capsys, *FIXED, "--policy", "fifo,static", "--max-num-seqs", "8")
    assert (fifo["policy"], static["policy"]) == ("fcfs", "static")
    assert static["ttft"]["mean"] > fifo["ttft"]["mean"]


def test_policies_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*FIXED, "--policy", "fcfs,sjf")
    assert runs(capsys, *flags, "--jobs", "2") == runs(capsys, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--replicas", "3"),
        ("--replicas", "3", "--router", "round-robin"),
        ("--max-num-seqs", "2"),
        ("--max-num-batched-tokens", "512"),
        ("--max-model-len", "300"),
        ("--num-blocks", "60"),
        ("--block-size", "64", "--num-blocks", "15"),
        ("--pipeline-depth", "1"),
        ("--seed", "7"),
        ("--policy", "sjf", "--max-num-seqs", "2", "--max-tokens", "2000"),
    ],
    ids=" ".join,
)
def test_flags_change_the_outcome(capsys: pytest.CaptureFixture[str], flags: tuple[str]) -> None:
    (plain,) = plain_runs(capsys, *FIXED)
    (other,) = runs(capsys, *FIXED, *flags)
    assert other["ttft"] != plain["ttft"]


TIGHT = ("--num-blocks", "60", "--max-num-seqs", "8")
LATE = (
    "synthetic:rate=60,prompt=lognormal(200,1),output=lognormal(60,1),n=40,"
    "classes=chat(1,ttft=1,tpot=30ms)"
)
MIXED = (
    "synthetic:rate=30,prompt=lognormal(200,1),output=lognormal(60,1),n=40,"
    "classes=chat(1,priority=1)+night(1)+batch(2)"
)
# drafts are made while no request waits
SPARSE = "synthetic:rate=0.5,prompt=lognormal(200,1),output=lognormal(60,1),n=30"
# ten tokens a step, and no request with 30 ms a token has time for one more
STEEP = ("--step-times", "fixed:0.02,0.001")
SWAPS = ("--step-times", "roofline:L4,Qwen3-0.6B", "--num-blocks", "160", "--swap-space", "1GiB")


# what makes each flag of the scheduler matter, and another value of it
@pytest.mark.parametrize(
    ("workload", "setting", "flags"),
    [
        (WORKLOAD, TIGHT, ("--watermark", "0.6")),
        (WORKLOAD, TIGHT, ("--max-skip-ahead", "0")),
        (WORKLOAD, TIGHT, ("--max-skips", "0")),
        (WORKLOAD, TIGHT, ("--no-future-memory-check",)),
        (WORKLOAD, TIGHT, ("--pressure-threshold", "0.3")),
        (LATE, STEEP, ("--no-adaptive-token-budget",)),
        (WORKLOAD, (), ("--schedule-ahead-ms", "15")),
        (WORKLOAD, ("--policy", "phase-aligned"), ("--coalesce-window-ms", "500")),
        (WORKLOAD, ("--policy", "phase-aligned"), ("--coalesce-size", "1")),
        (WORKLOAD, ("--max-num-seqs", "2"), ("--max-num-waiting", "3")),
        (WORKLOAD, ("--max-num-seqs", "2"), ("--max-predicted-ttft", "0.5")),
        (
            WORKLOAD,
            ("--max-num-seqs", "2"),
            ("--max-predicted-ttft", "0", "--queue-timeout", "0.5"),
        ),
        (LATE, (), ("--no-demote-late",)),
        (LATE, (*STEEP, "--no-demote-late"), ("--no-pace-admission",)),
        (MIXED, ("--policy", "priority", "--max-num-seqs", "2"), ("--priority-ageing", "0.1")),
        (MIXED, ("--max-num-seqs", "4"), ("--best-effort-share", "0.5")),
        (MIXED, (), ("--best-effort-step-ms", "500")),
        (SPARSE, (), ("--acceptance", "0.9,0.8")),
        (
            SPARSE,
            ("--acceptance", "0.9,0.8"),
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 1}'),
        ),
        (WORKLOAD, SWAPS, ("--preemption", "recompute")),
        (WORKLOAD, SWAPS, ("--swap-space", "1MiB")),
        (WORKLOAD, SWAPS, ("--kv-bandwidth", "0.01")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_flags_of_the_scheduler_change_the_outcome(
    capsys: pytest.CaptureFixture[str],
    workload: str,
    setting: tuple[str, ...],
    flags: tuple[str, ...],
) -> None:
    base = ("simulate", "--workload", workload, "--step-times", "fixed:0.02,0.0001", *setting)
    (plain,) = plain_runs(capsys, *base)
    (other,) = runs(capsys, *base, *flags)
    assert (other["e2e"], other["ttft"]) != (plain["e2e"], plain["ttft"])


@pytest.mark.parametrize("ending", [(), ("--max-tokens", "2000")])
def test_guesses_save_time_and_change_no_count(
    capsys: pytest.CaptureFixture[str], ending: tuple[str, ...]
) -> None:
    few = ("simulate", "--workload", SPARSE, "--step-times", "fixed:0.02,0.0001", *ending)
    plain, wrong, right = (
        runs(capsys, *few, *flags)[0]
        for flags in ((), ("--acceptance", "0"), ("--acceptance", "0.95,0.9,0.9"))
    )
    assert plain["output_tokens"] == wrong["output_tokens"] == right["output_tokens"]
    assert right["tpot"]["mean"] < 0.7 * plain["tpot"]["mean"]
    assert wrong["tpot"]["mean"] < 1.05 * plain["tpot"]["mean"]


@pytest.mark.parametrize("value", ["1.5", "0.5,-1", "x"])
def test_chances_are_chances(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*FIXED, "--acceptance", value])
    assert "--acceptance" in capsys.readouterr().err
    assert main([*FIXED, "--acceptance", ",".join(["0.5"] * 33)]) == 2
    assert "up to 32 chances" in capsys.readouterr().err


def flags_by_group(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, set[str]]:
    """As its help shows them."""
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help=all" if command == "serve" else "--help"])
    groups: dict[str, set[str]] = {}
    title = ""
    for line in capsys.readouterr().out.splitlines():
        if heading := re.fullmatch(r"(\w[\w ]*):", line):
            title = heading[1]
        elif flag := re.match(r"  (?:-\w[^,]*, )?(--[\w-]+)", line):
            groups.setdefault(title, set()).add(flag[1])
    return groups


def test_it_has_every_flag_of_a_server_that_changes_what_is_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups = flags_by_group(capsys, "serve")
    served = groups["scheduling"] | groups["admission"]
    assert served == {flag.name for flag in (*SCHEDULING, *ADMISSION)}
    here = set().union(*flags_by_group(capsys, "simulate").values())
    assert served - here == {"--scheduling-policy"}, "several are compared with --policy"
    fields_set = {flag.field for flag in (*SCHEDULING, *ADMISSION)}
    # the model's length follows from its files, and adapters have a flag of their own
    unflagged = {"max_model_len", "max_adapters"}
    assert {field.name for field in fields(SchedulerConfig)} - fields_set == unflagged


def test_without_a_recording_it_is_what_serve_would_start() -> None:
    args = build_parser().parse_args([*FIXED])
    config = pool_of(args, None).replicas[0].config
    serve = build_parser().parse_args(["serve", "--backend", "null"])
    settings = engine_settings(serve)
    for name in (field.name for field in fields(SchedulerConfig)):
        if name != "max_model_len":
            assert getattr(config.scheduler, name) == getattr(settings.scheduler, name), name
    assert config.cache.watermark == settings.watermark
    assert config.pipeline_depth == settings.pipeline_depth


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A policy of another package, by that name; not loaded yet."""

    class Entry:
        name, value = "theirs", "theirs:Policy"

        def load(self) -> type[FcfsPolicy]:
            return FcfsPolicy

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()])
    assert "theirs" not in POLICIES
    yield
    POLICIES.pop("theirs", None)


@pytest.mark.usefixtures("theirs")
def test_policies_of_other_packages_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = runs(capsys, *FIXED, "--policy", "fcfs,theirs")
    assert second["policy"] == "theirs" and first["ttft"] == second["ttft"]


@pytest.mark.usefixtures("theirs")
def test_an_engine_recorded_with_such_a_policy_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    record_with_policy(path, "theirs")
    (found,) = runs(capsys, "simulate", "--workload", str(path), "--step-times", f"recorded:{path}")
    assert found["policy"] == "theirs" and found["finished"] > 0


def test_routers_differ(capsys: pytest.CaptureFixture[str]) -> None:
    means = {
        router: runs(capsys, *FIXED, "--replicas", "3", "--router", router)[0]["e2e"]["mean"]
        for router in ("round-robin", "least-outstanding")
    }
    assert len(set(means.values())) == 2


def test_prefix_caching(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}
    trace.write_text("".join(json.dumps(row | {"timestamp": 500 * n}) + "\n" for n in range(6)))
    flags = ("simulate", "--workload", str(trace), "--step-times", "fixed:0.01")
    (cached,) = runs(capsys, *flags)
    (plain,) = runs(capsys, *flags, "--no-enable-prefix-caching")
    assert cached["cached_tokens"] == 5 * 1088
    assert plain["cached_tokens"] == 0


def test_disaggregation(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (*BASE, "--step-times", "roofline:L4,Qwen3-0.6B", "--decode-replicas", "1")
    (fast,) = runs(capsys, *flags)
    (slow,) = runs(capsys, *flags, "--kv-bandwidth", "0.01")
    assert len(fast["utilisation"]) == 2
    assert slow["e2e"]["mean"] > fast["e2e"]["mean"] + 1.0
    assert slow["ttft"]["mean"] == pytest.approx(fast["ttft"]["mean"])


def test_a_recording_brings_its_engine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, repeat=12)
    source = open_step_times(f"recorded:{path}")
    assert source.config is not None and source.config.scheduler.max_num_seqs == 4
    workload = "synthetic:rate=0.01,prompt=fixed(20),output=fixed(4),n=5"
    flags = ("simulate", "--workload", workload, "--step-times", f"recorded:{path}")
    (found,) = runs(capsys, *flags)
    assert found["finished"] == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--step-times", "magic"), "step times 'magic' are none of"),
        (("--step-times", "fixed:x"), "'x' is not a number"),
        (("--step-times", "fixed:0"), "more than 0 seconds"),
        (("--step-times", "recorded:missing"), "cannot read the recording"),
        (("--step-times", "roofline:H100-SXM,none"), "no shape is known for model 'none'"),
        (("--step-times", "fixed:1", "--policy", "fcfs,magic"), "unknown policy 'magic'"),
        (("--step-times", "fixed:1", "--router", "magic"), "unknown router 'magic'"),
        (("--step-times", "fixed:1", "--decode-replicas", "1"), "does not say how many bytes"),
        (("--step-times", "fixed:1", "--swap-space", "1GiB"), "does not say how many bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str], message: str
) -> None:
    assert main([*BASE, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["", "0.5,10,0\n1.5,0,10\n"])
def test_a_trace_without_requests_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str
) -> None:
    trace = tmp_path / "empty.csv"
    trace.write_text(f"arrived_at_s,prompt_tokens,output_tokens\n{rows}")
    assert main(["simulate", "--workload", str(trace), "--step-times", "fixed:0.01"]) == 2
    captured = capsys.readouterr()
    assert f"--workload {trace}: no request has prompt" in captured.err and not captured.out


def test_loads_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = runs(capsys, *FIXED, "--speedup", "1,4")
    assert (slow["name"], fast["name"]) == ("deadline", "deadline x4")
    assert fast["offered_rate"] == pytest.approx(4 * slow["offered_rate"])
    assert fast["ttft"]["mean"] > slow["ttft"]["mean"]
    assert main([*FIXED, "--speedup", "0"]) == 2
    assert "--speedup: must be at least" in capsys.readouterr().err


def test_gaps_and_prices_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = runs(capsys, *FIXED)
    assert plain["itl"] is None and plain["cost"] is None
    (full,) = runs(capsys, *FIXED, "--itl", "--price-per-hour", "2", "--replicas", "3")
    tokens = full["output_tokens"] - full["finished"]
    assert full["itl"]["count"] == tokens and full["itl"]["mean"] > 0.02
    assert full["cost"] == pytest.approx(6 / 3600 / full["token_rate"] * 1e6)


def test_plots_and_timelines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, flags in (("cdf.svg", ()), ("goodput.svg", ("--speedup", "1,2"))):
        path = tmp_path / name
        runs(capsys, *FIXED, *flags, "--plot", str(path))
        assert "<svg" in path.read_text()
    path = tmp_path / "steps.json"
    (run,) = runs(capsys, *FIXED, "--timeline", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == run["steps"]
    # compressed, it has the requests too
    (run,) = runs(capsys, *FIXED, "--timeline", str(tmp_path / "all.json.gz"))
    trace = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))
    kinds = Counter((event["ph"], event["pid"]) for event in trace["traceEvents"])
    assert kinds["X", 1] == run["steps"] and kinds["X", 2] > 0 and kinds["C", 3] > 0
    assert main([*FIXED, "--replicas", "2", "--timeline", str(tmp_path / "two.json.gz")]) == 2
    assert "leave .gz out" in capsys.readouterr().err
    assert main([*FIXED, "--policy", "fcfs,sjf", "--timeline", str(path)]) == 2
    assert "--timeline shows one simulation, but there are 2" in capsys.readouterr().err


def test_a_model_of_a_file_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "_name_or_path": "Unheard-of-1B",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "intermediate_size": 8192,
                "vocab_size": 32000,
            }
        )
    )
    flags = (*BASE, "--step-times", "roofline:H100-SXM,Unheard-of-1B")
    assert main([*flags]) == 2
    assert "--model-shape FILE" in capsys.readouterr().err
    (found,) = runs(capsys, *flags, "--model-shape", str(path))
    assert found["finished"] == 60


def test_refusals_are_told_by_reason_beside_the_limit_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    limits = ("--max-model-len", "300", "--num-blocks", "12", "--block-size", "16")
    (found,) = runs(capsys, *FIXED, *limits)
    assert found["max_model_len"] == 300
    assert set(found["refusals"]) == {"context limit", "larger than the KV cache"}
    assert sum(found["refusals"].values()) == found["refused"] > 0
    assert main([*FIXED, *limits]) == 0
    printed = capsys.readouterr().out
    assert "| refused: context limit" in printed
    assert "requests of up to 300 tokens" in printed
    (full,) = runs(capsys, *FIXED, "--max-num-seqs", "1", "--max-num-waiting", "2")
    assert set(full["refusals"]) == {"queue-full"}


def test_tenants_have_figures_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("simulate", "--workload", f"{WORKLOAD},tenants=a(9)+b(1)", *FIXED[3:])
    (found,) = runs(capsys, *flags)
    assert set(found["by_tenant"]) == {"a", "b"}
    assert main(list(flags)) == 0
    assert "TTFT mean of tenant b ms" in capsys.readouterr().out


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table's cells and a chart for each latency of each load, and one for the loads."""
    path = tmp_path / "page.html"
    flags = (*FIXED, "--policy", "fcfs,sjf", "--html", str(path))
    assert main(list(flags)) == 0
    tree = parse(path.read_text())
    cells = {cell.text for cell in tree.iter("td")}
    table = capsys.readouterr().out.partition("\n\n")[0]
    (row,) = (line for line in table.splitlines() if "TTFT mean" in line)
    assert {cell.strip() for cell in row.split("|")[2:4]} <= cells
    assert len(list(tree.iter("svg"))) == 3
    assert path.stat().st_mode & 0o077 == 0
    assert main([*flags, "--speedup", "1,2"]) == 0
    tree = parse(path.read_text())
    assert len(list(tree.iter("svg"))) == 2 + 2 * 3
    assert "Latencies at 2 times the load" in "".join(tree.itertext())
    assert main([*FIXED, "--html", str(tmp_path / "no" / "page.html")]) == 2


@pytest.mark.parametrize(
    ("command", "flags", "wait", "timeout"),
    [
        (("serve", "--backend", "null"), ("--queue-timeout", "10"), 30, 10),
        (("serve", "--backend", "null"), ("--max-predicted-ttft", "61.5"), 61.5, 60),
        (
            ("serve", "--backend", "null"),
            ("--max-predicted-ttft", "2", "--queue-timeout", "1"),
            2,
            1,
        ),
        # before the model is looked for
        (("serve", "nothing/of-this-name"), ("--queue-timeout", "10"), 30, 10),
        (FIXED, ("--queue-timeout", "10"), 30, 10),
    ],
)
def test_a_timeout_below_the_wait_is_refused_with_both_numbers(
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    flags: tuple[str, ...],
    wait: float,
    timeout: float,
) -> None:
    assert main([*command, *flags]) == 2
    said = capsys.readouterr().err.strip()
    assert f"--queue-timeout {timeout:g} must be at least --max-predicted-ttft {wait:g}" in said
    assert len(said.splitlines()) == 1


def test_without_one_of_the_two_bounds_any_timeout_goes(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--max-predicted-ttft", "0", "--queue-timeout", "10"), ("--queue-timeout", "0")):
        (run,) = runs(capsys, *FIXED, *flags)
        assert run["finished"] == 60
