"""Recorded vLLM runs: reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.sim.step_times.models import ModelShape
from paceline.sim.vllm_runs.prediction import predict
from paceline.sim.vllm_runs.runs import VllmRun, find_runs
from tests.sim.vllm_runs.folders import write_run


def test_clocks_are_aligned_by_the_quickest_request(tmp_path: Path) -> None:
    run = VllmRun.read(write_run(tmp_path))
    first, second = run.requests
    assert (first.arrival.at, second.arrival.at) == (0.0, 1.0)
    assert (first.ttft, first.e2e, first.tpot) == (1.0, 3.0, 0.5)
    assert second.ttft == 1.0
    # 24 GiB at 0.9 less 16.06 GB of weights, in blocks of 16 tokens of 128 KiB
    assert run.num_blocks == pytest.approx((24 * 0.9 * 2**30 - 16.06e9) / 2**21, rel=0.01)
    assert find_runs(tmp_path) == (tmp_path / "GPU-Llama-3.1-8B",)


def test_what_vllm_resolved_comes_before_what_is_assumed(tmp_path: Path) -> None:
    assumed = VllmRun.read(write_run(tmp_path))
    assert (assumed.prefix_caching, assumed.async_scheduling) == (True, True)
    assert assumed.padding.sizes == (1, 2, 4, 8)
    run = VllmRun.read(
        write_run(
            tmp_path,
            kv_cache={"num_gpu_blocks": 2588, "block_size": 32, "enable_prefix_caching": False},
            resolved_config={
                "scheduler_config": {"async_scheduling": False},
                "compilation_config": {"cudagraph_capture_sizes": [16, 8, 1]},
            },
        )
    )
    # one block is a placeholder
    assert (run.num_blocks, run.block_size, run.prefix_caching) == (2587, 32, False)
    assert (run.async_scheduling, run.padding.sizes) == (False, (1, 8, 16))
    eager = write_run(tmp_path, resolved_config={"model_config": {"enforce_eager": True}})
    assert VllmRun.read(eager).padding.sizes == ()


def test_an_unknown_model_says_so_and_a_shape_helps(tmp_path: Path) -> None:
    path = write_run(tmp_path, model="theirs/Unheard-of-1B")
    with pytest.raises(ConfigError, match="no shape is known for model 'theirs/Unheard-of-1B'"):
        VllmRun.read(path)
    shape = ModelShape(
        name="Unheard-of-1B",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100,
    )
    found = VllmRun.read(write_run(tmp_path, model="Unheard-of-1B"), (shape,))
    assert found.model is shape


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    run = VllmRun.read(path)
    with pytest.raises(ConfigError, match=r"one profile of Llama-3\.1-8B on GPU for 1"):
        predict(run, tmp_path)
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match="neither how many KV blocks"):
        _ = VllmRun.read(path).num_blocks
    write_run(tmp_path, kv_cache={"num_gpu_blocks": 100})
    (path / "config.json").unlink()
    assert VllmRun.read(path).num_blocks == 99
    (path / "requests.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"requests\.jsonl has no request that ended"):
        VllmRun.read(path)
    (path / "meta.json").unlink()
    with pytest.raises(ConfigError, match="not a recorded vLLM run"):
        VllmRun.read(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_toks": None}, "requests.jsonl:2: input_toks is None, expected a number"),
        ({"output_toks": -5}, "requests.jsonl:2: output_toks is -5, expected tokens, 1 or more"),
        ({"input_toks": 1.5}, "requests.jsonl:2: input_toks is 1.5, expected tokens"),
        ({"arrival_time": "noon"}, "requests.jsonl:2: arrival_time is 'noon', expected a number"),
        ({"queued_ts": float("nan")}, "requests.jsonl:2: queued_ts is nan, expected a number"),
        ({"scheduled_ts": True}, "requests.jsonl:2: scheduled_ts is True, expected a number"),
        ({"first_token_ts": 1.0}, "requests.jsonl:2: stamps are out of order: queued_ts 1001.5"),
        ({"last_token_ts": 1001.9}, "first_token_ts 1002.0, last_token_ts 1001.9"),
    ],
)
def test_rows_of_no_use_are_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VllmRun.read(changed(write_run(tmp_path), **fields))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields", [{"output_toks": 0}, {"first_token_ts": None, "last_token_ts": None}]
)
def test_requests_that_failed_are_left_out(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = VllmRun.read(changed(write_run(tmp_path), **fields))
    assert [measured.arrival.prompt_tokens for measured in run.requests] == [100]


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_settings_of_no_engine_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number above 0, got -1"):
        VllmRun.read(write_run(tmp_path, engine={name: -1}))


def changed(run: Path, **fields: Any) -> Path:
    """The run with these fields of its second request."""
    path = run / "requests.jsonl"
    first, second = path.read_text().splitlines()
    # with the mark that some editors begin a file with
    path.write_text(f"\ufeff{first}\n{json.dumps({**json.loads(second), **fields})}")
    return run
