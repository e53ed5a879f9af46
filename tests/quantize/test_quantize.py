"""A whole model: what the new file holds, a run that is killed, and what is refused."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.checkpoints.gguf.checkpoint import GGUFCheckpoint, open_gguf
from paceline.checkpoints.gguf.container import GGUFType
from paceline.errors import CheckpointError, ConfigError
from paceline.quantize import quantize as quantizing
from paceline.quantize.quantize import quantize
from tests.checkpoints.builders import VOCAB, llama_metadata, llama_tensors, write_gguf

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
        # a matrix makes up for others too, so values are more than half a step away; those of
        # other rows would be four steps away
        steps = np.ptp(values.reshape(-1, 32), 1) / 15 if values.ndim == 2 else np.zeros(1)
        distance = np.abs(after.tensor(name) - values).reshape(len(steps), -1)
        assert np.median(distance / np.maximum(steps, 1e-30)[:, None]) <= 2.0
    own = {"general.file_type", "general.quantization_version"}
    kept = {key: value for key, value in after.metadata.items() if key not in own}
    assert kept == dict(before.metadata)
    fields = gguf.GGUFReader(source).fields
    for key, field in gguf.GGUFReader(target).fields.items():
        assert key in own or key.startswith("GGUF.") or field.types == fields[key].types


def kinds(checkpoint: GGUFCheckpoint) -> dict[str, str]:
    return {name: checkpoint.tensor_type(name) for name in checkpoint.tensor_names()}


def test_five_bits_lose_less(source: Path, windows: torch.Tensor) -> None:
    def lost(kind: GGUFType) -> float:
        errors: list[float] = []
        target = source.with_name(f"{kind.name}.gguf")
        quantize(
            source,
            target,
            windows,
            kind=kind,
            progress=lambda done, layers, error: errors.append(error),
        )
        assert kind.name in kinds(open_gguf(target)).values()
        return errors[-1]

    # on the very tokens that they were rounded on; these few are not learned by heart
    assert 0 < lost(GGUFType.Q5_1) < 0.75 * lost(GGUFType.Q4_1)


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


@pytest.mark.parametrize(
    "changed", ["text", "kind", "source", "cut off", "a layer cut off", "a layer gone"]
)
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
    parts = target.with_name("q4.gguf.parts")
    if changed.endswith("cut off"):
        part = parts / ("streams.npz" if changed == "cut off" else "layer-0.npz")
        part.write_bytes(part.read_bytes()[:1000])
    if changed == "a layer gone":
        (parts / "layer-0.npz").unlink()
    text = windows.flip(0) if changed == "text" else windows
    kind = GGUFType.Q5_1 if changed == "kind" else GGUFType.Q4_1
    assert quantize(source, target, text, kind=kind).resumed == 0
    fresh = source.with_name("fresh.gguf")
    quantize(source, fresh, text, kind=kind)
    assert target.read_bytes() == fresh.read_bytes()


def test_two_processes_do_not_share_parts(source: Path, windows: torch.Tensor) -> None:
    target = source.with_name("q4.gguf")

    def second(done: int, layers: int, lost: float) -> None:
        with pytest.raises(ConfigError, match=r"q4\.gguf\.parts is being written by another"):
            quantize(source, target, windows, kind=GGUFType.Q5_1)

    quantize(source, target, windows, progress=second)
    assert "Q5_1" not in kinds(open_gguf(target)).values()


def test_a_run_that_is_killed_as_it_removes_its_parts(
    source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, unlink, removed = source.with_name("q4.gguf"), Path.unlink, 0

    def kill(path: Path, missing_ok: bool = False) -> None:
        nonlocal removed
        if path.parent.name.endswith(".parts"):
            removed += 1
            if removed == 3:
                raise Killed
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(Killed):
            quantize(source, target, windows)
    quantize(source, target, windows)
    assert not list(source.parent.glob("*.part*"))


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


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("blk.1.ffn_up.weight", r"layers\.1\.mlp\.gate_proj"),
        ("blk.1.attn_norm.weight", r"layers\.1\.self_attn\.q_proj"),
        ("token_embd.weight", r"layers\.0\.self_attn\.q_proj"),
    ],
)
def test_a_weight_that_is_not_a_number(
    tmp_path: Path, windows: torch.Tensor, stored: str, named: str
) -> None:
    tensors = halved(llama_tensors())
    tensors[stored].flat[3] = np.nan
    source = write_gguf(tmp_path / "nan.gguf", tensors=tensors)
    with pytest.raises(CheckpointError, match=rf"{named}.* is not finite"):
        quantize(source, tmp_path / "q4.gguf", windows)
    assert not (tmp_path / "q4.gguf").exists()


def test_a_full_disk(source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: gguf.GGUFWriter, *args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = source.with_name("q4.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", write)
        with pytest.raises(ConfigError, match=r"q4\.gguf cannot be read or written: No space"):
            quantize(source, target, windows)
    assert not target.exists() and not list(source.parent.glob("*.partial"))
    # what was done is not lost
    assert quantize(source, target, windows).resumed == 2
    assert target.exists()


def test_a_disk_that_would_be_full(
    source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, layers = source.with_name("q4.gguf"), 0

    def count(*about: object) -> None:
        nonlocal layers
        layers += 1

    usage = shutil.disk_usage(source.parent)._replace(free=50_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(ConfigError, match=r"q4\.gguf\.parts need 0\.1 MB .* 0\.1 MB are free"):
            quantize(source, target, windows, progress=count)
    assert layers == 0
    needed: list[int] = []
    check = quantizing._Parts.check_room
    monkeypatch.setattr(
        quantizing._Parts,
        "check_room",
        lambda self, path, size: (needed.append(size), check(self, path, size)),
    )
    sizes: list[int] = []
    parts = target.with_name("q4.gguf.parts")
    quantize(
        source,
        target,
        windows,
        progress=lambda *_: sizes.append(sum(path.stat().st_size for path in parts.iterdir())),
    )
    # what the files have besides, their headers and the vocabulary, is left out
    assert needed[0] == pytest.approx(sizes[-1] + target.stat().st_size, rel=0.5)


def test_experts_that_lie_in_one_tensor(tmp_path: Path, windows: torch.Tensor) -> None:
    """One expert has every token, one has none: it is rounded by itself."""
    tensors = halved(llama_tensors(tied=False))
    random = np.random.default_rng(9)
    for layer in range(2):
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            one = tensors.pop(f"blk.{layer}.{name}.weight")
            experts = np.stack([one, one[::-1], one * np.float16(0.5)])
            tensors[f"blk.{layer}.{name}_exps.weight"] = np.ascontiguousarray(experts)
        router = random.standard_normal((3, 32), dtype=np.float32) * 1e-4
        tensors[f"blk.{layer}.ffn_gate_inp.weight"] = router
    change = {"llama.expert_count": 3, "llama.expert_used_count": 1}
    source = write_gguf(tmp_path / "experts.gguf", tensors=tensors, change=change)
    quantize(source, tmp_path / "q4.gguf", windows)
    before, after = open_gguf(source), open_gguf(tmp_path / "q4.gguf")
    found = kinds(after)
    experts_of = {name for name in found if ".experts." in name}
    assert len(experts_of) == 18 and {found[name] for name in experts_of} == {"Q4_1"}
    assert found["lm_head.weight"] == "Q8_0" and found["model.layers.0.mlp.router.weight"] == "F32"
    for name in experts_of:
        values = before.tensor(name)
        steps = np.ptp(values.reshape(-1, 32), 1) / 15
        distance = np.abs(after.tensor(name) - values).reshape(len(steps), -1)
        assert np.median(distance / steps[:, None]) <= 2.0


def test_another_alignment(tmp_path: Path, windows: torch.Tensor) -> None:
    """The new file's tensors lie where its readers look for them."""
    tensors = halved(llama_tensors())
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    for key, value in llama_metadata().items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint64)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = write_gguf(tmp_path / "plain.gguf", tensors=tensors)
    for source in (path, plain):
        quantize(source, source.with_suffix(".q4.gguf"), windows)
    one, other = (open_gguf(each.with_suffix(".q4.gguf")) for each in (path, plain))
    for name in one.tensor_names():
        assert np.array_equal(one.tensor(name), other.tensor(name))


def test_a_folder_of_that_name_is_not_removed(source: Path, windows: torch.Tensor) -> None:
    folder = source.with_name("q4.gguf.parts")
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(ConfigError, match=r"q4\.gguf\.parts is there and holds no parts"):
        quantize(source, source.with_name("q4.gguf"), windows)
    assert (folder / "mine.txt").read_text() == "kept"
