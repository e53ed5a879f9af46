"""A whole model: what the new file holds, a run that is killed, and what is refused."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint, open_gguf
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize.quantize import quantize
from tests.checkpoints.builders import VOCAB, llama_tensors, write_gguf

LENGTH = 24


class Killed(Exception):
    """Stands for a signal that ends the process."""


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, VOCAB, (3, LENGTH)))


def halved(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    return {
        name: values.astype(np.float16) if values.ndim == 2 else values
        for name, values in tensors.items()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    change = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(VOCAB)],
        "tokenizer.ggml.scores": [0.5 * index for index in range(VOCAB)],
        "tokenizer.chat_template": "{{ messages }}",
        "general.name": "tiny",
        "llama.expert_count": 0,
    }
    return write_gguf(tmp_path / "tiny.gguf", tensors=halved(llama_tensors()), change=change)


def test_the_new_file(source: Path, windows: torch.Tensor) -> None:
    target = source.with_name("q4.gguf")
    errors: list[tuple[int, int, float]] = []
    done = quantize(source, target, windows, progress=lambda *all_of: errors.append(all_of))
    before, after = open_gguf(source), open_gguf(target)
    assert done.kept == () and done.resumed == 0
    assert done.bytes_after == target.stat().st_size < done.bytes_before
    assert [(index, layers) for index, layers, _ in errors] == [(1, 2), (2, 2)]
    assert not list(source.parent.glob("*.part*"))
    assert kinds(after) == {
        name: "F32" if "norm" in name else "Q8_0" if "embed" in name else "Q4_1"
        for name in before.tensor_names()
    }
    for name in before.tensor_names():
        values = before.tensor(name)
        # the two streams differ, so a matrix is not just rounded but also makes up for others
        allowed = 1.5 * np.ptp(values) / 15 if values.ndim == 2 else 0.0
        assert np.abs(after.tensor(name) - values).mean() <= allowed
    own = {"general.file_type", "general.quantization_version"}
    kept = {key: value for key, value in after.metadata.items() if key not in own}
    assert kept == dict(before.metadata)
    fields = gguf.GGUFReader(source).fields
    for key, field in gguf.GGUFReader(target).fields.items():
        assert key in own or key.startswith("GGUF.") or field.types == fields[key].types


def kinds(checkpoint: GGUFCheckpoint) -> dict[str, str]:
    return {name: checkpoint.tensor_type(name) for name in checkpoint.tensor_names()}


def test_five_bits_lose_less(source: Path, windows: torch.Tensor) -> None:
    def lost(bits: str) -> float:
        errors: list[float] = []
        target = source.with_name(f"{bits}.gguf")
        quantize(
            source,
            target,
            windows,
            bits=bits,
            progress=lambda done, layers, error: errors.append(error),
        )
        return errors[-1]

    assert 0 < lost("5") < lost("4") / 2
    assert "Q5_1" in kinds(open_gguf(source.with_name("5.gguf"))).values()


def test_a_killed_run_goes_on(source: Path, windows: torch.Tensor) -> None:
    target, whole = source.with_name("q4.gguf"), source.with_name("whole.gguf")
    quantize(source, whole, windows)

    def kill(done: int, layers: int, lost: float) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantize(source, target, windows, progress=kill)
    assert not target.exists()
    layers: list[int] = []
    done = quantize(source, target, windows, progress=lambda at, *_: layers.append(at))
    assert done.resumed == 1 and layers == [2]
    assert target.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("changed", ["text", "bits", "source", "cut off"])
def test_parts_of_another_run_do_not_count(
    source: Path, windows: torch.Tensor, changed: str
) -> None:
    target = source.with_name("q4.gguf")

    def kill(done: int, layers: int, lost: float) -> None:
        raise Killed

    with pytest.raises(Killed):
        quantize(source, target, windows, progress=kill)
    if changed == "source":
        write_gguf(source, tensors=halved(llama_tensors(tied=False)))
    if changed == "cut off":
        streams = target.with_name("q4.gguf.parts") / "streams.npz"
        streams.write_bytes(streams.read_bytes()[:1000])
    text = windows.flip(0) if changed == "text" else windows
    bits = "5" if changed == "bits" else "4"
    assert quantize(source, target, text, bits=bits).resumed == 0
    fresh = source.with_name("fresh.gguf")
    quantize(source, fresh, text, bits=bits)
    assert target.read_bytes() == fresh.read_bytes()


def test_all_parts_of_a_split_file(tmp_path: Path, windows: torch.Tensor) -> None:
    tensors = halved(llama_tensors())
    whole = write_gguf(tmp_path / "whole.gguf", tensors=tensors)
    write_gguf(tmp_path / "split.gguf", tensors=tensors, tensors_per_part=5)
    first = min(tmp_path.glob("split-*"))
    for path, target in ((whole, "a.gguf"), (first, "b.gguf")):
        quantize(path, tmp_path / target, windows)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_matrix_with_other_rows_keeps_its_bits(tmp_path: Path, windows: torch.Tensor) -> None:
    tensors = halved(llama_tensors())
    for layer in range(2):
        for name, axis in (("ffn_gate", 0), ("ffn_up", 0), ("ffn_down", 1)):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = np.ascontiguousarray(tensors[key].take(range(40), axis))
    change = {"llama.feed_forward_length": 40}
    source = write_gguf(tmp_path / "odd.gguf", tensors=tensors, change=change)
    done = quantize(source, tmp_path / "q4.gguf", windows)
    assert done.kept == tuple(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2))
    after = open_gguf(tmp_path / "q4.gguf")
    for name in done.kept:
        assert after.tensor_type(name) == "F16"
        assert np.array_equal(after.tensor(name), open_gguf(source).tensor(name))


def test_a_model_in_few_bits_is_refused(tmp_path: Path, windows: torch.Tensor) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    source = write_gguf(tmp_path / "q4.gguf", quantise=kind)
    with pytest.raises(ConfigError, match=r"14 of 14 matrices .* in Q4_1; start from the model"):
        quantize(source, tmp_path / "again.gguf", windows)


def test_a_weight_that_is_not_a_number(tmp_path: Path, windows: torch.Tensor) -> None:
    tensors = halved(llama_tensors())
    tensors["blk.1.ffn_up.weight"][3, 4] = np.nan
    source = write_gguf(tmp_path / "nan.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\..* not finite"):
        quantize(source, tmp_path / "q4.gguf", windows)
    assert not (tmp_path / "q4.gguf").exists()


def test_a_full_disk(source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: gguf.GGUFWriter, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = source.with_name("q4.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
        with pytest.raises(ConfigError, match=r"q4\.gguf cannot be written: No space left"):
            quantize(source, target, windows)
    assert not target.exists() and not list(source.parent.glob("*.partial"))
    # what was done is not lost
    assert quantize(source, target, windows).resumed == 2
    assert target.exists()
