"""``paceline plan``: every flag changes the answer, and a wrong one says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from paceline.backends.loading.memory_estimate import served_memory
from paceline.checkpoints.gguf.container import read_gguf
from paceline.cli.flags.plugins import GROUP
from paceline.cli.main import main
from paceline.core.policies import POLICIES
from paceline.sim.plan.apart import ApartLoad, Comparison, Way
from paceline.sim.plan.models import find_model
from paceline.sim.plan.search import Found
from paceline.sim.pool import Pool
from paceline.sim.report.metrics import Metrics
from paceline.sim.step_times.models import ModelShape
from paceline.sim.step_times.roofline import HardwareCard, RooflineStepTimes
from tests.backends.torch.heads import save_eagle3
from tests.backends.torch.models import save_model
from tests.checkpoints.builders import write_gguf
from tests.cli.recordings import record_with_policy
from tests.engine.test_recorder import run as record


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """A plan's answer; the exit code is 0 unless it is that none of the fleets will do."""
    code = main(["plan", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    answers = found.get("answers", [])
    assert code == int(bool(answers) and all(a["replicas"] is None for a in answers))
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


MEMORY = ("memory", "--model", "llama-3.1-8b", "--memory", "80GB", "--max-len", "8192")
MEMORY = (*MEMORY, "--mean-len", "1000")


@pytest.mark.parametrize(
    "change",
    [
        ("--model", "qwen3-32b"),
        ("--memory", "40GB"),
        ("--gpus", "2"),
        ("--weight-dtype", "int8"),
        ("--kv-dtype", "fp8"),
        ("--weights", "30GB"),
        ("--kv-per-token", "1MB"),
        ("--mean-len", "2000"),
        ("--utilization", "0.8"),
        ("--reserve", "5GB"),
        ("--block-size", "256"),
    ],
)
def test_memory_flags_change_what_fits(
    capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    assert plan(capsys, *MEMORY)["paged"] != plan(capsys, *MEMORY, *change)["paged"]


def test_memory_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "memory", "--preset", "80gb-40gb")
    assert (found["preallocated"], found["paged"]) == (18, 71)
    assert main(["plan", "memory", "--preset", "80gb-40gb"]) == 0
    printed = capsys.readouterr().out
    assert "18 sequences of 2048 tokens at once, 75.0 % never written" in printed
    assert "paged is         3.9x" in printed
    longer = plan(capsys, "memory", "--preset", "80gb-40gb", "--max-len", "4096")
    assert longer["preallocated"] == 9, "flags change a preset's numbers"
    card = plan(capsys, *MEMORY[:3], "--hardware", "h200-sxm", *MEMORY[5:])
    assert card["memory_bytes"] == 141e9


def test_memory_without_enough_to_go_by(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "memory", "--memory", "80GB", "--max-len", "10")
    assert "needs --weights, --kv-per-token, --mean-len" in said
    assert "known are" in refused(capsys, *MEMORY, "--model", "nothing")
    assert "nothing is left for keys and values" in refused(capsys, *MEMORY, "--weights", "90GB")


BATCHING = ("batching", "--outputs", "bimodal(uniform(1,9),uniform(501,519),0.5)")


@pytest.mark.parametrize(
    "change",
    [
        ("--slots", "4"),
        ("--fixed-ms", "1"),
        ("--row-ms", "1"),
        ("--samples", "50"),
        ("--seed", "9"),
    ],
)
def test_batching_flags_change_the_estimate(
    capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    base = (*BATCHING, "--samples", "500")
    assert plan(capsys, *base) != plan(capsys, *base, *change)


def test_batching_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BATCHING, "--slots", "16"]) == 0
    assert "textbook gain, equal steps     1.9" in capsys.readouterr().out
    assert "is not a length; known are" in refused(capsys, "batching", "--outputs", "pareto(1)")


SPLIT = ("split", "--model", "llama-3.1-8b", "--hardware", "h100-sxm")
SPLIT = (*SPLIT, "--prompt", "2000", "--output", "200", "--tpot", "20ms")


@pytest.mark.parametrize(
    "change",
    [
        ("--model", "llama-2-13b"),
        ("--hardware", "h200-sxm"),
        ("--gpus", "2"),
        ("--prompt", "500"),
        ("--output", "900"),
        ("--tpot", "30ms"),
        ("--replicas", "9"),
        ("--max-num-seqs", "10"),
        ("--max-num-batched-tokens", "64"),
    ],
)
def test_split_flags_change_the_balance(
    capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    assert plan(capsys, *SPLIT) != plan(capsys, *SPLIT, *change)


def test_split_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SPLIT]) == 0
    assert "prefill : decode" in capsys.readouterr().out
    assert "are too few for a request" in refused(capsys, *SPLIT, "--prompt", "9000000")
    assert "no card for hardware 'abacus'" in refused(capsys, *SPLIT, "--hardware", "abacus")


APART = ("split", "--step-times", "fixed:0.01,0.001", "--prompt", "64", "--output", "5")
APART = (*APART, "--ttft", "500ms", "--replicas", "2", "--requests", "50", "--tpot")
TIGHT = (*APART, "15ms", "--output", "10", "--requests", "30")


def test_split_says_whether_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    loose = plan(capsys, *APART, "59.5ms", "--seeds", "1")["simulated"]
    assert set(loose["rates"]) == {"2 together", "1 : 1"} and loose["best"] == "1 : 1"
    # 50 tokens take 60 ms
    assert loose["split_above"] == 50 and not loose["pays"]
    assert loose["rates"]["1 : 1"] < loose["rates"]["2 together"]
    # a prompt of 64 takes 74 ms, which streams at 15 ms a token cannot wait for
    tight = plan(capsys, *TIGHT)["simulated"]
    assert tight["split_above"] == 6 and tight["pays"]
    assert tight["rates"]["1 : 1"] > tight["rates"]["2 together"]
    assert tight["seeds"] == tight["pays_with"] == 3 and loose["pays_with"] == 0


def test_a_split_whose_gain_depends_on_the_arrivals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def ways(make: object, load: ApartLoad, replicas: int, **_: object) -> list[Way]:
        asked.append(load.seed)
        rates = {(0, 2): 3.0, (1, 1): 2.5 + load.seed}
        found = Metrics().summary("")
        return [Way(*split, Found(rate, found, ())) for split, rate in rates.items()]

    monkeypatch.setattr("paceline.sim.plan.apart.best_ways", ways)
    words = (*APART, "29.5ms", "--seeds", "2")
    told = plan(capsys, *words)["simulated"]
    assert asked == [0, 1] and told["rates"] == {"2 together": 3.0, "1 : 1": 3.0}
    assert (told["pays"], told["pays_with"], told["seeds"]) == (False, 1, 2)
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "it depends on the arrivals: 1 : 1 carries more with 1 of 2 seeds" in printed
    assert "3.00 requests/s (2.50 to 3.50)" in printed


def test_prompts_of_a_recorded_server_leave_between_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[bool] = []

    def compare(make: Callable[[int, int], Pool], *_: object, **__: object) -> Comparison:
        apart = make(1, 1).disaggregation
        assert apart is not None
        found.append(apart.transfer.between_steps)
        return Comparison({"2 together": [1.0] * 3, "1 : 1": [1.0] * 3})

    monkeypatch.setattr("paceline.sim.plan.apart.compare_ways", compare)
    path = tmp_path / "run.jsonl"
    _record(path)
    for spec in ("fixed:0.01,0.001", f"recorded:{path},noise=off"):
        words = (spec if word.startswith("fixed:") else word for word in APART)
        assert not plan(capsys, *words, "29.5ms")["simulated"]["pays"]
    assert found == [False, True]


def test_a_rate_far_below_that_without_queues_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    # a prompt takes 74 ms alone, so hardly any may wait
    once = (*APART, "59.5ms", "--ttft", "90ms", "--seeds", "1")
    rates = plan(capsys, *once)["simulated"]["rates"]
    assert all(0.5 < rate < 12.0 for rate in rates.values())


@pytest.mark.thorough
def test_a_split_needs_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    # keys and values of a prompt, 8 MB, take a link of 10 Mbit/s 6.7 s
    link = (*TIGHT, "--link", "0.01")
    assert main(["plan", *link]) == 0
    assert "no: let all replicas do both" in capsys.readouterr().out
    assert main(["plan", *link, "--kv-bytes-per-token", "1"]) == 0
    assert "yes: 1 : 1, split_above = 6" in capsys.readouterr().out


def test_split_of_other_step_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("split", "--prompt", "100", "--output", "20", "--tpot", "50ms")
    assert plan(capsys, *words, "--step-times", "fixed:0.01,0.001")["prefill_rate"] == 1 / 0.11
    assert "needs either --step-times, or --model" in refused(capsys, *words)
    assert "needs either" in refused(capsys, *SPLIT, "--step-times", "fixed:0.01")
    fixed = ("--step-times", "fixed:0.01,0.001")
    # it would have no effect
    assert "needs either" in refused(capsys, *words, *fixed, "--model", "llama-3.1-8b")
    without = words[:-2]
    assert "--ttft needs --tpot" in refused(capsys, *without, *fixed, "--ttft", "1s")


LOAD = "synthetic:rate=40,prompt=fixed(1500),output=uniform(5,20),n=40"
FLEET = ("fleet", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--ttft", "500ms")
FLEET = (*FLEET, "--workload", LOAD)
# the answer without a change, which is found once
_PLAIN: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize(
    "change",
    [
        ("--workload", LOAD + ",speedup=3"),
        ("--hardware", "h200-sxm"),
        ("--ttft", "40ms"),
        ("--tpot", "1ms"),
        ("--deadline", "50ms"),
        ("--attainment", "0.3"),
        ("--gpus", "1,2"),
        ("--policy", "fcfs,sjf"),
        ("--max-num-batched-tokens", "512,2048"),
        ("--price-per-hour", "2"),
        ("--seed", "5"),
    ],
)
def test_fleet_flags_change_the_answer(
    capsys: pytest.CaptureFixture[str], change: tuple[str, str]
) -> None:
    if "plain" not in _PLAIN:
        _PLAIN["plain"] = plan(capsys, *FLEET)
    assert plan(capsys, *FLEET, *change) != _PLAIN["plain"]


def test_fleet_limits_and_routers(capsys: pytest.CaptureFixture[str]) -> None:
    busy = (*FLEET, "--workload", LOAD + ",speedup=8", "--most")
    assert plan(capsys, *busy, "64")["answers"][0]["replicas"] > 1
    assert plan(capsys, *busy, "1")["answers"][0]["replicas"] is None
    turns = plan(capsys, *busy, "64", "--router", "round-robin")
    assert turns["answers"][0]["tried"][-1] != [1.0, 1.0]


def test_fleet_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--hardware", "l4,h100-sxm", "--price-per-hour", "0.8,3", "--tpot", "50ms")
    assert main(["plan", *FLEET, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 1 x H100-SXM |")
    assert "no fleet suffices" in lines[3]
    assert lines[4].startswith("1 x L4: no fleet suffices: alone on a replica, 0.0% of requests")
    said = refused(capsys, *FLEET, "--price-per-hour", "1,2")
    assert "2 prices for 1 kinds of hardware" in said
    assert "must be at least 1, got 0" in refused(capsys, *FLEET, "--gpus", "0")
    without = [flag for flag in FLEET if flag not in ("--ttft", "500ms")]
    assert "no request of the workload has a target" in refused(capsys, *without)


def _record(path: Path) -> None:
    with path.open("w") as file:
        # what a server that takes 10 ms and 0.1 ms a token would have written
        file.write(json.dumps(_head(path)) + "\n")
        for step in range(64):
            rows, tokens = ([[0, 16]], 16) if step % 2 else ([], 1)
            done = step + 0.01 + 0.0001 * tokens
            record = {"step": step, "planned": step, "done": done, "seconds": done - step}
            narrow = [0, 0, 0] if rows else [1, 16, 16]
            file.write(json.dumps(record | {"rows": rows, "narrow": narrow, "samples": 1}) + "\n")


def test_fleets_of_a_recorded_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    _record(path)
    load = "synthetic:rate=300,prompt=fixed(16),output=fixed(4),n=100"
    flags = ("fleet", "--step-times", f"recorded:{path},noise=off", "--workload", load)
    found = plan(capsys, *flags, "--ttft", "50ms")["answers"][0]
    assert found["replicas"] > 1
    assert plan(capsys, *flags, "--ttft", "20s")["answers"][0]["replicas"] == 1


def test_fleets_with_a_policy_of_another_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Named, or the recorded engine's."""
    entry = EntryPoint("theirs", "paceline.core.policies:FcfsPolicy", GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (entry,))
    path = tmp_path / "run.jsonl"
    record_with_policy(path, "theirs")
    load = "synthetic:rate=0.01,prompt=fixed(16),output=fixed(4),n=5"
    recorded = ("fleet", "--step-times", f"recorded:{path}", "--workload", load, "--ttft", "20s")
    for flags in ((*FLEET, "--policy", "theirs"), recorded):
        try:
            assert plan(capsys, *flags)["answers"][0]["replicas"] >= 1
        finally:
            POLICIES.pop("theirs", None)


def _head(path: Path) -> dict[str, Any]:
    """The first line of a recording."""
    record(path)
    head: dict[str, Any] = json.loads(path.read_text().splitlines()[0])
    head["scheduler"] |= {"max_num_seqs": 8, "max_model_len": 64}
    return head


def test_a_fleet_is_of_one_thing_or_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *FLEET, "--step-times", "fixed:0.01")
    assert "needs either --step-times, or --model and --hardware" in said
    alone = ("fleet", "--workload", LOAD, "--ttft", "1", "--step-times", "fixed:0.01")
    assert "says nothing about memory" in refused(capsys, *alone)
    assert "--gpus: --step-times" in refused(capsys, *alone, "--gpus", "2")


def test_none_will_do_says_why_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *FLEET, "--tpot", "1ms"]) == 1
    said = capsys.readouterr().out
    assert "TPOT reaches" in said and "1 ms are asked for" in said
    assert "take faster ones (--hardware, --gpus) or other targets" in said
    busy = (*FLEET, "--workload", LOAD + ",speedup=8", "--most", "1")
    assert main(["plan", *busy]) == 1
    assert "with up to 1 replicas, 99% are asked for: allow more with --most" in (
        capsys.readouterr().out
    )


def test_hardware_that_a_model_does_not_fit_on_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (*FLEET, "--hardware", "t4,h100-sxm")
    assert main(["plan", *flags]) == 0
    assert "1 x T4: left out: meta-llama/Llama-3.1-8B needs" in capsys.readouterr().out
    assert plan(capsys, *flags)["left_out"][0]["option"] == "1 x T4"


@pytest.mark.parametrize(
    ("model", "card"), [("LLAMA-3.1-8B", "H100-sxm"), ("Llama-3.1-8b", "h100sxm")]
)
def test_names_are_case_blind(model: str, card: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed = [model if x == "llama-3.1-8b" else card if x == "h100-sxm" else x for x in SPLIT]
    assert plan(capsys, *changed) == plan(capsys, *SPLIT)
    typed = ("memory", "--preset", "80GB-40GB")
    assert plan(capsys, *typed)["paged"] == 71
    int8 = plan(capsys, *MEMORY, "--weight-dtype", "INT8")
    assert int8 == plan(capsys, *MEMORY, "--weight-dtype", "int8")


def test_a_gguf_file_takes_what_it_takes_as_it_is_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", quantise=GGMLQuantizationType.Q4_0)
    stored = sum(tensor.num_bytes for tensor in read_gguf(path).tensors.values())
    flags = ("memory", "--model", str(path), "--hardware", "h100-sxm", "--max-len", "64")
    flags = (*flags, "--mean-len", "32")
    assert plan(capsys, *flags)["weight_bytes"] == pytest.approx(stored)
    asked = plan(capsys, *flags, "--weight-dtype", "int4")["weight_bytes"]
    assert asked != pytest.approx(stored, rel=0.01)
    # and a step reads as much
    shape = find_model(str(path))
    card = HardwareCard.named("h100-sxm")
    room = RooflineStepTimes(card, shape).kv_capacity_bytes
    assert room == pytest.approx(0.9 * card.memory - stored)


def test_a_checkpoint_takes_here_what_serve_takes_for_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    served = served_memory(path)
    flags = ("memory", "--model", str(path), "--memory", "1GB", "--max-len", "64")
    flags = (*flags, "--mean-len", "32")
    found = plan(capsys, *flags)
    assert found["weight_bytes"] == served.weight_bytes
    assert found["kv_bytes_per_token"] == served.kv_bytes_per_token
    assert found["reserve_bytes"] == served.process_bytes > 50e6
    rest = 0.9e9 - found["weight_bytes"] - found["reserve_bytes"]
    assert found["kv_bytes"] == pytest.approx(rest)
    assert plan(capsys, *flags, "--reserve", "0.5GB")["reserve_bytes"] == 0.5e9
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert f" GB in {served.dtype}, as serve chooses here" in said
    assert f"{served.process_bytes / 1e9:.2f} GB for the rest of the processes" in said
    assert f" KiB in {served.kv_dtype}, as serve chooses here" in said
    assert main(["plan", *flags, "--weights", "1MB", "--kv-per-token", "1KB"]) == 0
    assert "as serve chooses" not in capsys.readouterr().out
    # flags name formats of any machine, by the shape alone; the one that serve takes here, too
    shape = find_model(str(path))
    by_shape = {
        "weight_bytes": shape.num_parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token(1.0),
    }
    for flag, name in (("--weight-dtype", "weight_bytes"), ("--kv-dtype", "kv_bytes_per_token")):
        same = (by_shape.keys() - {name}).pop()
        for dtype, size in (("float32", 4.0), ("bfloat16", 2.0), ("int4", 0.5)):
            other = plan(capsys, *flags, flag, dtype)
            assert other[name] == size * by_shape[name]
            assert other[same] == found[same]


def test_a_checkpoint_is_planned_for_another_device(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    there = served_memory(path, device="cuda")
    flags = ("memory", "--model", str(path), "--memory", "1GB", "--max-len", "64")
    flags = (*flags, "--mean-len", "32", "--device", "cuda")
    found = plan(capsys, *flags)
    assert found["weight_bytes"] == there.weight_bytes
    assert found["kv_bytes_per_token"] == there.kv_bytes_per_token
    assert found["reserve_bytes"] == 0
    assert main(["plan", *flags]) == 0
    assert " GB in bfloat16, as serve chooses on cuda" in capsys.readouterr().out
    assert "needs --model FILE" in refused(capsys, *MEMORY, "--device", "cuda")
    assert "excludes --hardware" in refused(capsys, *flags, "--hardware", "h100-sxm")
    assert "device 'tpu'" in refused(capsys, *flags[:-1], "tpu")


def test_windows_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3", sliding_window=40, max_position_embeddings=4096)
    served = served_memory(tmp_path)
    flags = ("memory", "--model", str(tmp_path), "--memory", "1GB", "--max-len", "4096")
    flags = (*flags, "--mean-len", "1000")
    found = plan(capsys, *flags)
    # windows and 32 guesses, a block's rest and one to begin with; a step of 2,048
    each = -(-(served.window + 32) // 16) + 2
    assert found["num_window_blocks"] == 256 * each + 128
    size = found["num_window_blocks"] * 16 * served.window_bytes_per_token
    assert found["window_bytes"] == pytest.approx(size)
    others = served.kv_bytes_per_token - served.window_bytes_per_token
    assert others == pytest.approx(served.kv_bytes_per_token / 7)
    left = (found["kv_bytes"] - size) / (16 * others)
    assert found["num_blocks"] == pytest.approx(left, abs=1)
    few = plan(capsys, *flags, "--max-num-seqs", "16")
    assert few["num_window_blocks"] == 16 * each + 128
    assert (
        few["num_blocks"]
        > found["num_blocks"]
        > 5 * found["kv_bytes"] / (16 * served.kv_bytes_per_token)
    )
    assert (few["paged"], found["paged"]) == (16, 256)
    assert main(["plan", *flags]) == 0
    assert "GB for sliding-window layers" in capsys.readouterr().out
    # it is not known which part of other bytes is theirs
    for change in (("--kv-per-token", "1KB"), ("--kv-dtype", "float32")):
        assert plan(capsys, *flags, *change)["num_window_blocks"] == 0


def test_a_draft_model_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    flags = ("memory", "--model", str(path), "--memory", "1GB", "--max-len", "64")
    flags = (*flags, "--mean-len", "32")
    alone = plan(capsys, *flags)
    config = '{"method": "self", "quantization": "bfloat16"}'
    both = plan(capsys, *flags, "--speculative-config", config)
    draft = served_memory(path, dtype="bfloat16").weight_bytes
    assert (alone["draft_weight_bytes"], both["draft_weight_bytes"]) == (0, draft)
    assert both["weight_bytes"] == alone["weight_bytes"] + draft
    # its blocks are copies of the others
    assert both["kv_bytes_per_token"] == 2 * alone["kv_bytes_per_token"]
    assert both["num_blocks"] < alone["num_blocks"]
    assert main(["plan", *flags, "--speculative-config", config]) == 0
    assert "  draft model" in (said := capsys.readouterr().out) and "GB in bfloat16, " in said
    # without a draft model nothing is added
    assert plan(capsys, *flags, "--speculative-config", '{"method": "auto"}') == alone
    said = refused(capsys, *MEMORY, "--speculative-config", config)
    assert "is counted with a checkpoint only, and --model llama-3.1-8b is not one" in said
    # it is computed where the served model is
    self_there = ("--device", "cuda", "--speculative-config", '{"method": "self"}')
    assert "q4 needs --compute native" in refused(capsys, *flags, *self_there)
    save_eagle3(tmp_path / "head", served_hidden=32)
    head = json.dumps({"method": "eagle3", "model": str(tmp_path / "head")})
    said = refused(capsys, *flags, "--speculative-config", head)
    assert "is not counted here: add its bytes to --weights" in said
    said = refused(capsys, *flags, "--speculative-config", '{"method": "mtp"}')
    assert "are not counted here: add their bytes to --weights" in said


def test_a_model_of_a_file_is_planned_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(asdict(ModelShape.named("llama-3.1-8b")) | {"name": "Mine-8B"}))
    changed = ["mine-8b" if x == "llama-3.1-8b" else x for x in (*MEMORY, *SPLIT)]
    memory, split = changed[: len(MEMORY)], changed[len(MEMORY) :]
    assert "known are" in refused(capsys, *memory)
    for given, known in ((memory, MEMORY), (split, SPLIT)):
        assert plan(capsys, *given, "--model-shape", str(path)) == plan(capsys, *known)
    fleet = ["mine-8b" if x == "llama-3.1-8b" else x for x in FLEET]
    found = plan(capsys, *fleet, "--model-shape", str(path))
    assert found["answers"][0]["replicas"] == plan(capsys, *FLEET)["answers"][0]["replicas"]
