"""``paceline plan models``: the table of docs/start/choose-a-model.md, held to ``plan memory``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "start" / "choose-a-model.md"


def models(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "models", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out)["models"])


@pytest.mark.parametrize(("dtype", "per_weight"), [("bfloat16", 2.0), ("int8", 8.5 / 8)])
def test_a_cell_is_what_plan_memory_says(
    capsys: pytest.CaptureFixture[str], dtype: str, per_weight: float
) -> None:
    memory = {"bfloat16": 24, "int8": 16}[dtype]
    (cell,) = models(capsys, "--memory", f"{memory}GB")["meta-llama/Llama-3.1-8B"]
    assert cell["format"] == dtype
    weights = int(8_030_000_000 * per_weight)
    told = ["--weights", f"{weights}B", "--max-len", "2048", "--mean-len", "2048"]
    main(["plan", "memory", "--model", "llama-3.1-8b", "--memory", f"{memory}GB", *told, "--json"])
    assert cell["sequences"] == json.loads(capsys.readouterr().out)["paged"]


def test_a_gpu_may_have_more_memory_than_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    plain, told = models(capsys, "--memory", "9000,9000GiB")["meta-llama/Llama-3.1-8B"]
    assert plain == told and plain["memory_bytes"] == 9000 * 2**30


def test_each_flag_changes_the_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.1-8B"
    plain = models(capsys, "--memory", "16GB,8GB")[name]
    assert [cell["format"] for cell in plain] == ["int8", "q4"]
    (short,) = models(capsys, "--memory", "16GB", "--mean-len", "512")[name]
    assert short["sequences"] > 3 * plain[0]["sequences"]
    (many,) = models(capsys, "--memory", "16GB", "--sequences", "30")[name]
    assert many["format"] == "q4" and many["sequences"] >= 30
    (none,) = models(capsys, "--memory", "4GB")[name]
    assert none == {"memory_bytes": 4_000_000_000, "format": None, "sequences": 0}
    shape = {
        "name": "mine",
        "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "vocab_size": 100, "source": "here",
    }  # fmt: skip
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([shape]))
    assert "mine" in models(capsys, "--memory", "1GB", "--model-shape", str(path))


def test_all_experts_count(capsys: pytest.CaptureFixture[str]) -> None:
    cells = models(capsys, "--memory", "16GB,24GB,80GB")["Qwen/Qwen3-30B-A3B"]
    assert [cell["format"] for cell in cells] == [None, "q4", "bfloat16"]


def test_a_wrong_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models", "--memory", "16GB,much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


def test_the_page_has_the_table_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "models", "--memory", "2GB,8GB,16GB,24GB,80GB"]) == 0
    assert capsys.readouterr().out in PAGE.read_text()
