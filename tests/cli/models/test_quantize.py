from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.checkpoints.open import open_checkpoint
from paceline.cli.main import main
from paceline.quantize import check as checking
from paceline.quantize import text
from tests.checkpoints.builders import VOCAB, llama_tensors, write_gguf


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # the command sets it for its process
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        name: values.astype(np.float16) if values.ndim == 2 else values
        for name, values in llama_tensors().items()
    }
    change = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"t{index}" for index in range(3, VOCAB))],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    return write_gguf(tmp_path / "model.gguf", tensors=tensors, change=change)


def test_progress_and_result(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[str] = []

    def windows(tokenizer: text.Reader, choice: str) -> torch.Tensor:
        chosen.append(choice)
        return torch.arange(64).view(2, 32) % VOCAB

    monkeypatch.setattr(text, "calibration_windows", windows)
    figures = checking.Figures(top1=0.9, kl=0.0312, perplexity=8.0, perplexity_ratio=1.034)
    monkeypatch.setattr(checking, "why_not", lambda source: None)
    monkeypatch.setattr(checking, "check", lambda source, target, threads: figures)
    target = model.with_name("q4.gguf")
    command = ["quantize", str(model), "-o", str(target), "--threads", "1"]
    assert main([*command, "--calibration", "own.txt", "--check"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("layer 1 of 2, error ") and out[0].endswith("s left")
    assert out[2].startswith(f"{target}: 0.0 MB of ")
    assert out[3] == (
        "next to float32 of the source: KL 0.0312 nats a token, the likeliest token is the same at "
        "90.0%, perplexity +3.4%"
    )
    assert chosen == ["own.txt"]
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert open_checkpoint(target).config.num_hidden_layers == 2
    assert main(command) == 0
    assert "KL" not in capsys.readouterr().out
    assert chosen[1:] == ["chat"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "q4.bin"), "--output q4.bin must end in .gguf"),
        (("-o", "there/is/none/q4.gguf"), "there is no folder there/is/none"),
        (("-o", "folder.gguf"), "--output folder.gguf is a folder"),
        (("-o", "model.gguf"), "model.gguf is the model itself"),
        (("-o", "q4.gguf", "--size", "0.7"), "--size 0.7 needs --bits mixed"),
        (("-o", "q4.gguf", "--bits", "mixed", "--size", "0.5"), "--size 0.5 must be from 0.59"),
        (("-o", "q4.gguf", "--threads", "0"), "--threads 0 must be at least 1"),
        (("-o", "q4.gguf", "--calibration", "none.txt"), "calibration text cannot be read"),
    ],
)
def test_refused(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(model.parent)
    Path("folder.gguf").mkdir()
    assert main(["quantize", "model.gguf", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(model.parent.glob("*.part*"))


def test_mixed_bits(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    windows = torch.arange(64).view(2, 32) % VOCAB
    monkeypatch.setattr(text, "calibration_windows", lambda tokenizer, choice: windows)
    found: dict[str, list[str]] = {}
    for size in ((), ("--size", "0.59"), ("--size", "1")):
        target = model.with_name("mixed.gguf")
        assert main(["quantize", str(model), "-o", str(target), "--bits", "mixed", *size]) == 0
        found["".join(size)] = capsys.readouterr().out.splitlines()
    for lines in found.values():
        assert lines[:2] == [f"measured what matrices of layer {n} of 2 cost" for n in (1, 2)]
        assert lines[2].startswith("layer 1 of 2, error ")
    assert found["--size0.59"][4] == "matrices: 14 Q4_1; 0.59 of their bytes in Q8_0"
    assert found["--size1"][4] == "matrices: 14 Q8_0; 1.00 of their bytes in Q8_0"
    assert "Q5_1" in found[""][4]
    assert 0.6 < float(found[""][4].split("; ")[1].split()[0]) <= 0.7


def test_what_is_not_there_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tmp_path / "none"), "-o", str(tmp_path / "q4.gguf")]) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_without_pytorch(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.quantize")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["quantize", str(model), "-o", str(model.with_name("q4.gguf"))]) == 2
    assert "quantize needs PyTorch: pip install 'paceline[torch]'" in capsys.readouterr().err


def test_what_cannot_be_checked_is_refused_before_the_work(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "unavailable_reason", lambda: "no kernels here")
    target = model.with_name("q4.gguf")
    assert main(["quantize", str(model), "-o", str(target), "--check"]) == 2
    assert "--check: no kernels here" in capsys.readouterr().err
    assert not target.exists()
