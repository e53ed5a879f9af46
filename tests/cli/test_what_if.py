"""The process that simulates for the page: it ends with whoever started it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.settings import WHAT_IF_PROCESS, EngineSettings


def job(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    (tmp_path / "trace").write_text(
        "arrived_at_s,prompt_tokens,output_tokens\n"
        + "".join(f"{i / 10:.1f},900,2000\n" for i in range(5000))
    )
    return {
        "settings": EngineSettings.of().to_json().decode(),
        "engine": {
            "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048,
            "policy": "deadline", "block_size": 16, "num_blocks": 4096,
            "enable_prefix_caching": True,
        },
        "workload": {"kind": "trace", "path": str(tmp_path / "trace")},
        "frames": None,
        "step_times": {"kind": "roofline", "hardware": "H100-SXM",
                       "model": "meta-llama/Llama-3.1-8B"},
        "policies": ["fcfs"], "budgets": [2048], "loads": [1.0], "max_num_seqs": None,
        "targets": {"ttft": None, "tpot": None}, "most_requests": 20_000,
        "folder": str(tmp_path), "memory": 2**30, "seconds": 60,
    } | changed  # fmt: skip


def start(job: dict[str, Any]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(WHAT_IF_PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(json.dumps(job).encode() + b"\n")
    child.stdin.flush()
    return child


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    with start(job(tmp_path)) as child:
        assert child.stdin is not None and child.stdout is not None
        told = [json.loads(child.stdout.readline()) for _ in range(4)]
        assert [each.get("doing") for each in told[:3]] == ["reading", "fitting", "simulating"]
        assert told[3] == {"run": 0, "done": 0.0}
        # it would go on for many seconds
        child.stdin.close()
        assert child.wait(20) == 1
        assert not any(b"result" in line for line in child.stdout)
    # nobody else is left to do that
    assert not tmp_path.exists()


def test_settings_decide(tmp_path: Path) -> None:
    """What is asked of the engine is what is simulated."""
    few = job(tmp_path, most_requests=20, budgets=[300, 2048], max_num_seqs=2)
    with start(few) as child:
        assert child.stdout is not None
        lines = [json.loads(line) for line in child.stdout]
    results = [each["result"] for each in lines if "result" in each]
    assert [each["budget"] for each in results] == [300, 2048]
    assert all(each["requests"] == 20 == each["finished"] for each in results)
    # a prompt of 900 tokens takes three steps where one may have 300
    assert results[0]["steps"] > results[1]["steps"]
    # two run at once: the others wait
    assert results[1]["queued"]["max"] > 1.0
    one_at_a_time = next(each for each in lines if each.get("doing") == "simulating")
    assert one_at_a_time["left_out"] == 4980


@pytest.mark.parametrize("name", ["budget", "policy"])
def test_numbers_that_do_not_go_together(tmp_path: Path, name: str) -> None:
    wrong = {"budget": {"budgets": [16]}, "policy": {"policies": ["nobody's"]}}[name]
    with start(job(tmp_path, most_requests=5, **wrong)) as child:
        assert child.stdout is not None
        last = json.loads(child.stdout.readlines()[-1])
    assert {"budget": "max_num_seqs", "policy": "nobody's"}[name] in last["error"]
