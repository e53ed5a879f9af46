"""Recorded vLLM runs: reading them, and predicting them as well as published."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest

from paceline.core.errors import ConfigError
from paceline.sim.vllm_runs import VllmRun, find_runs, predict

RUNS = Path(__file__).parents[2].parent / "shared" / "vllm-runs"
# (TTFT mean, TTFT median, TPOT mean, E2E mean): the errors that another simulator publishes
PUBLISHED = {
    "RTXPRO6000-Llama-3.1-8B": (0.040, 0.086, 0.010, 0.018),
    "RTXPRO6000-Qwen3-32B-tp2": (0.013, 0.017, 0.008, 0.010),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_real_runs_are_predicted(name: str) -> None:
    if not (RUNS / name).is_dir():
        pytest.skip(f"needs the recorded run {name} in {RUNS}")
    run = VllmRun.read(RUNS / name)
    served = predict(run, RUNS / "profiles")
    assert [s.arrival for s in served] == [m.arrival for m in run.requests]
    errors = (
        mean(s.ttft or 0 for s in served) / mean(m.ttft for m in run.requests) - 1,
        median(s.ttft or 0 for s in served) / median(m.ttft for m in run.requests) - 1,
        mean(s.tpot or 0 for s in served) / mean(m.tpot or 0 for m in run.requests) - 1,
        mean(s.e2e or 0 for s in served) / mean(m.e2e for m in run.requests) - 1,
    )
    for error, bound in zip(errors, PUBLISHED[name], strict=True):
        assert abs(error) <= bound, errors


def write_run(folder: Path) -> Path:
    path = folder / "GPU-Llama-3.1-8B"
    path.mkdir()
    meta = {
        "model": "meta-llama/Llama-3.1-8B",
        "engine_kwargs": {
            "tensor_parallel_size": 1,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
        },
    }
    config = {
        "link_bw": 16,
        "link_latency": 20000,
        "nodes": [{"instances": [{"npu_mem": {"mem_size": 24, "mem_util": 0.9}}]}],
    }
    # the engine's clock is 1000 s behind; the second request waits 0.5 s to be read
    requests = [
        (2000.0, 1000.0, 1001.0, 1003.0, 100, 5),
        (2001.0, 1001.5, 1002.0, 1004.0, 50, 9),
    ]
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")
    lines = [
        json.dumps(dict(zip((*names, "input_toks", "output_toks"), row, strict=True)))
        for row in requests
    ]
    (path / "meta.json").write_text(json.dumps(meta))
    (path / "config.json").write_text(json.dumps(config))
    (path / "requests.jsonl").write_text("\n".join(lines))
    return path


def test_clocks_are_aligned_by_the_quickest_request(tmp_path: Path) -> None:
    run = VllmRun.read(write_run(tmp_path))
    first, second = run.requests
    assert (first.arrival.at, second.arrival.at) == (0.0, 1.0)
    assert (first.ttft, first.e2e, first.tpot) == (1.0, 3.0, 0.5)
    assert second.ttft == 1.0
    # 24 GiB at 0.9 less 16.06 GB of weights, in blocks of 16 tokens of 128 KiB
    assert run.num_blocks == pytest.approx((24 * 0.9 * 2**30 - 16.06e9) / 2**21, rel=0.01)
    assert find_runs(tmp_path) == (tmp_path / "GPU-Llama-3.1-8B",)


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run = VllmRun.read(path)
    with pytest.raises(ConfigError, match=r"one profile of Llama-3\.1-8B on GPU for 1"):
        predict(run, tmp_path)
    (path / "requests.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"requests\.jsonl is empty"):
        VllmRun.read(path)
    (path / "meta.json").unlink()
    with pytest.raises(ConfigError, match="not a recorded vLLM run"):
        VllmRun.read(path)
