"""Every option of a workload's description changes the workload, and nothing else is accepted."""

from __future__ import annotations

import itertools
import json
import statistics
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from paceline.sim.arrival import Arrival
from paceline.sim.workload.base import WorkloadError
from paceline.sim.workload.spec import open_workload, parse_seconds

BASE = "synthetic:rate=10,prompt=fixed(1000),output=fixed(100),n=400"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    rows = [f"{3 * (i // 5)},{100 + i},{10 + i}" for i in range(50)]
    path.write_text("arrived_at_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return path


def read(spec: str, seed: int = 0) -> list[Arrival]:
    return list(open_workload(spec, seed=seed))


def test_reading_twice_gives_the_same_and_seeds_differ() -> None:
    spec = BASE + ",classes=a(1)+b(1),tenants=x(1)+y(2)"
    workload = open_workload(spec, seed=1)
    assert list(workload) == list(workload) == read(spec, 1)
    assert read(spec, 1) != read(spec, 2)
    assert workload.name == spec


def test_rate_n_and_seconds() -> None:
    arrivals = read(BASE)
    assert len(arrivals) == 400
    assert arrivals[-1].at == pytest.approx(40, rel=0.15)
    assert all(a.at < 7 for a in read(BASE + ",seconds=7s"))
    assert len(read(BASE.replace("rate=10", "rate=20") + ",seconds=10")) == pytest.approx(
        200, rel=0.2
    )


def test_cv_and_swing() -> None:
    def cv(extra: str) -> float:
        times = [a.at for a in read(BASE.replace("n=400", "n=5000") + extra)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return statistics.pstdev(gaps) / statistics.mean(gaps)

    assert cv("") == pytest.approx(1, abs=0.1)
    assert cv(",cv=3") == pytest.approx(3, abs=0.4)
    early = sum(a.at < 50 for a in read(BASE + ",swing=0.9,period=400"))
    assert early < 150 < sum(a.at < 50 for a in read(BASE))


def test_lengths_of_every_kind(trace: Path) -> None:
    def prompts(text: str) -> set[int]:
        return {a.prompt_tokens for a in read(f"synthetic:rate=1,n=300,output=1,prompt={text}")}

    assert prompts("7") == prompts("fixed(7)") == {7}
    assert prompts("uniform(3,5)") == {3, 4, 5}
    assert prompts("bimodal(fixed(1),uniform(8,9),0.5)") == {1, 8, 9}
    assert prompts(f"empirical({trace},output)") <= set(range(10, 60))
    assert len(prompts("lognormal(1020,1.2)")) > 200


def test_trace_options(trace: Path) -> None:
    plain = read(str(trace))
    assert plain == read(f"azure:{trace}") == read(f"trace:{trace}")
    quarter = read(f"azure:{trace}?speedup=2&scale=0.25&output_scale=4")
    assert [a.at for a in quarter] == [a.at / 2 for a in plain]
    assert [a.prompt_tokens for a in quarter] == [round(a.prompt_tokens / 4) for a in plain]
    assert [a.output_tokens for a in quarter] == [a.output_tokens for a in plain]
    assert [a.prompt_tokens for a in read(f"{trace}?prompt_scale=2")] == [
        2 * a.prompt_tokens for a in plain
    ]
    assert len(read(f"{trace}?n=7")) == 7


def test_jitter_spreads_rounded_stamps_in_order(trace: Path) -> None:
    plain, moved = read(str(trace)), read(f"{trace}?jitter=3s")
    assert len({a.at for a in plain}) == 10
    assert len({a.at for a in moved}) == 50
    assert [a.at for a in moved] == sorted(a.at for a in moved)
    by_prompt = {a.prompt_tokens: a.at for a in plain}
    assert all(0 <= a.at - by_prompt[a.prompt_tokens] < 3 for a in moved)
    # wider than the gaps of the stamps: still in order, nothing lost
    wide = read(f"{trace}?jitter=10")
    assert [a.at for a in wide] == sorted(a.at for a in wide)
    assert sorted(a.prompt_tokens for a in wide) == sorted(a.prompt_tokens for a in plain)


def test_scaling_prompts_scales_prefix_pieces(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp":0,"input_length":1024,"output_length":8,"hash_ids":[1,2]}\n')
    workload = open_workload(f"mooncake:{path}?scale=0.25")
    assert workload.prefix_block == 128
    assert list(workload) == [Arrival(0.0, 256, 2, prefix=(1, 2))]


def test_lengths_are_drawn_by_row(trace: Path) -> None:
    arrivals = read(f"lengths:{trace}?rate=5&cv=2&n=200")
    assert len(arrivals) == 200
    assert all(a.prompt_tokens - a.output_tokens == 90 for a in arrivals)
    assert len({a.prompt_tokens for a in arrivals}) > 40


def test_classes_and_tenants() -> None:
    arrivals = read(
        BASE
        + ",classes=chat(3,ttft=0.5,tpot=50ms)+batch(1,deadline=60,priority=2),tenants=a(9)+b(1)"
    )
    classes = Counter((a.slo_class, a.ttft, a.tpot, a.deadline, a.priority) for a in arrivals)
    assert set(classes) == {("chat", 0.5, 0.05, None, 0), ("batch", None, None, 60.0, 2)}
    assert classes["chat", 0.5, 0.05, None, 0] == pytest.approx(300, rel=0.1)
    assert Counter(a.tenant for a in arrivals)["b"] == pytest.approx(40, rel=0.5)


def test_clients() -> None:
    base = "clients:rate=20,n=2000,prompt=fixed(500),output=fixed(50)"
    assert len({a.tenant for a in read(base)}) == 10
    many = read(base + ",clients=30,skew=0,spread=0,cv=1,cv_spread=0")
    counts = Counter(a.tenant for a in many)
    assert len(counts) == 30 and max(counts.values()) < 3 * min(counts.values())
    assert {a.prompt_tokens for a in many} == {500}
    skewed = Counter(a.tenant for a in read(base + ",clients=30,skew=1.5,cv=1,cv_spread=0"))
    assert skewed["client-0"] > 0.3 * 2000


def test_a_long_workload_streams() -> None:
    workload = open_workload("synthetic:rate=100,prompt=fixed(9),output=fixed(9),n=1000000,cv=2")
    tracemalloc.start()
    try:
        for number, _ in enumerate(workload):
            if number == 30_000:
                break
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nothing-here.csv", "is neither a file nor one of azure:..."),
        ("synthetic:rate=1,prompt=1,output=1", "would never end; say n="),
        ("synthetic:prompt=1,output=1,n=1", "rate= is missing"),
        ("synthetic:rate=0,prompt=1,output=1,n=1", "rate must be positive, got 0"),
        ("synthetic:rate=x,prompt=1,output=1,n=1", "rate: 'x' is not a number"),
        ("synthetic:rate=inf,prompt=1,output=1,n=1", "rate: 'inf' is not finite"),
        ("synthetic:rate=1,prompt=1,n=1", "output= is missing, for example output=fixed(128)"),
        (BASE + ",burst=2", "unknown option burst; known here are"),
        (BASE + ",n=4", "n is given twice"),
        (BASE + ",cv", "'cv' is not an option; write NAME=VALUE"),
        (BASE.replace("n=400", "n=0"), "n must be at least 1, got 0"),
        (BASE.replace("n=400", "n=1.5"), "n: '1.5' is not a whole number"),
        (BASE + ",speedup=0", "speedup must be positive, got 0"),
        (BASE + ",scale=-1", "scale must be positive, got -1"),
        (BASE + ",period=7", "period= needs swing= above 0"),
        (BASE + ",seconds=5h", "'5h' is not a time; write 0.5, 0.5s, 500ms or 20us"),
        (BASE + ",jitter=0", "jitter must be positive, got 0"),
        (BASE + ",cv=-1", "cv must be in [0, 100], got -1"),
        (BASE.replace("fixed(100)", "gamma(1)"), "'gamma(1)' is not a length; known are"),
        (BASE.replace("fixed(100)", "fixed(0)"), "fixed length must be at least 1 token, got 0"),
        (BASE + ",classes=chat", "'chat' is not NAME(...)"),
        (BASE + ",classes=chat(1,e2e=3)", "class 'chat': unknown e2e"),
        (BASE + ",classes=chat(0)", "class 'chat': weight must be positive, got 0"),
        (BASE + ",classes=chat(1,ttft=0)", "class 'chat': ttft must be positive"),
        (BASE + ",classes=chat(1,ttft=1,ttft=2)", "class 'chat': one of ttft is given twice"),
        (BASE + ",classes=chat(1)+chat(2,ttft=1)", "'chat' is given twice in 'chat(1)+chat(2,"),
        (BASE + ",classes=chat(1,priority=1.5)", "priority of class 'chat': '1.5' is not a whole"),
        (BASE + ",tenants=a(1)+a(2)", "'a' is given twice in 'a(1)+a(2)'"),
        (BASE + ",tenants=a(1,2)", "tenant 'a': write NAME(WEIGHT)"),
        (BASE + ",tenants=a(-1)", "tenant 'a': weight must be positive, got -1"),
        ("clients:rate=1,clients=0,prompt=1,output=1,n=1", "clients must be between 1 and"),
    ],
)
def test_bad_descriptions_are_refused(spec: str, said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        open_workload(spec)
    assert said in str(caught.value)


def test_the_named_format_must_be_the_files(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="is in azure format, not mooncake"):
        open_workload(f"mooncake:{trace}")
    lengths = tmp_path / "l.csv"
    lengths.write_text("prompt_tokens,output_tokens\n1,2\n")
    with pytest.raises(WorkloadError, match="has lengths only; say lengths:"):
        open_workload(str(lengths))


def test_traces_of_another_unit_and_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    row = {"input_length": 32, "output_length": 4, "hash_ids": [5, 6]}
    path.write_text("".join(json.dumps(row | {"timestamp": 60 * n}) + "\n" for n in range(9)))
    workload = open_workload(f"mooncake:{path}?unit=s&block=16&scale=0.5")
    assert workload.prefix_block == 8
    assert [arrival.at for arrival in workload] == [60 * n for n in range(9)]
    assert not caplog.text
    # where the unit is the format's, the numbers are said
    open_workload(f"mooncake:{path}?block=16")
    assert "9 requests come in 0.48 s, 16.6667 a second" in caplog.text
    assert "they may be seconds: unit= says which" in caplog.text
    for options, said in (
        ("block=0", "block must be at least 1 token, got 0"),
        ("unit=h", "unit is 'h'; known are s, ms, us, ns"),
    ):
        with pytest.raises(WorkloadError, match=said):
            open_workload(f"{path}?{options}")
    with pytest.raises(WorkloadError, match="unknown option unit"):
        open_workload(f"lengths:{path}?rate=1&n=1&unit=s")
    with pytest.raises(WorkloadError, match="mooncake format, not bailian"):
        open_workload(f"bailian:{path}")


def test_seconds() -> None:
    assert parse_seconds("500ms") == parse_seconds("0.5") == parse_seconds("0.5s") == 0.5
    assert parse_seconds("1e-3") == 1e-3
