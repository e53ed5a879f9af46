"""Folders and safetensors files that lie or would run code."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.checkpoints.hf.config import read_hf_config
from paceline.checkpoints.hf.folder import read_folder
from paceline.checkpoints.model.checkpoint import expected_shapes
from paceline.checkpoints.open import open_checkpoint
from paceline.checkpoints.weights.safetensors import read_safetensors_header
from paceline.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_folder(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = expected_shapes(read_hf_config(read_folder(folder)).model)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


Header = dict[str, Any]
NORM = "model.norm.weight"


def edit(change: Callable[[Header], None]) -> Callable[[bytes], bytes]:
    """A mutation of the parsed header."""

    def mutate(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return mutate


def norm(**fields: Any) -> Callable[[bytes], bytes]:
    """Change fields of one tensor's entry; None removes one."""

    def change(header: Header) -> None:
        header[NORM].update(fields)
        for key, value in fields.items():
            if value is None:
                del header[NORM][key]

    return edit(change)


def shift(header: Header) -> None:
    begin, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [begin - 4, end - 4]


def swap_shape(header: Header) -> None:
    header["model.layers.0.mlp.up_proj.weight"]["shape"].reverse()


def raw_header(text: bytes) -> Callable[[bytes], bytes]:
    return lambda data: struct.pack("<Q", len(text)) + text + bytes(64)


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
LIES: list[tuple[str, str, Callable[[bytes], bytes]]] = [
    ("empty", "too small", lambda data: b""),
    ("header length", "claims a header", lambda data: struct.pack("<Q", 2**63) + data[8:]),
    ("header of 1 GB", "claims a header", lambda data: struct.pack("<Q", 2**30) + data[8:]),
    ("header past the end", "claims a header", lambda data: data[:100]),
    ("data cut short", "the file has", lambda data: data[:-5]),
    ("data too long", "follow the last", lambda data: data + bytes(5)),
    ("not an object", "header starts with", raw_header(b"[1, 2]")),
    ("not JSON", "not valid JSON", raw_header(b"{nonsense}")),
    ("not UTF-8", "not valid JSON", raw_header(b'{"\xff": 1}')),
    ("deep JSON", "nested too deeply", raw_header(b'{"a":' + b"[" * 100_000)),
    ("name twice", "occurs twice", raw_header(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}")),
    ("entry a list", "must be an object", raw_header(b'{"a":[]}')),
    ("unknown dtype", "unknown dtype", norm(dtype="F31")),
    ("dtype missing", "unknown dtype", norm(dtype=None)),
    ("dtype a list", "unknown dtype", norm(dtype=["F32"])),
    ("wider dtype", "bits", norm(dtype="F64")),
    ("shape missing", "has shape None", norm(shape=None)),
    ("shape negative", "has shape", norm(shape=[-32])),
    ("shape a float", "has shape", norm(shape=[32.0])),
    ("shape huge", "bits", norm(shape=[2**40, 2**40])),
    ("shape overflows to itself", "bits", norm(shape=[32, 2**61])),
    ("shape of rank 9", "has shape", norm(shape=[1] * 8 + [32])),
    ("offsets missing", "data_offsets None", norm(data_offsets=None)),
    ("offsets of three", "data_offsets", norm(data_offsets=[0, 1, 2])),
    ("offsets reversed", "spans", norm(data_offsets=[200, 72])),
    ("offsets negative", "data_offsets", norm(data_offsets=[-128, 0])),
    ("offsets past the end", "spans", norm(data_offsets=[2**40, 2**40 + 128])),
    ("offsets overlap", "overlaps", edit(shift)),
    ("a gap", "gap", edit(lambda header: header.pop("model.norm.weight"))),
    ("wrong shape", "shape", edit(swap_shape)),
    ("integer weights", "stored as I32", norm(dtype="I32")),
]  # fmt: skip


def refused(path: Path, message: str) -> None:
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        elapsed = time.monotonic() - start
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert elapsed < 1.0
    assert peak < 32 << 20
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("message", "mutate"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES]
)
def test_a_lie_is_refused(tmp_path: Path, message: str, mutate: Callable[[bytes], bytes]) -> None:
    write_folder(tmp_path)
    open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(mutate(path.read_bytes()))
    refused(tmp_path, message)


def test_a_missing_and_an_extra_tensor(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    fewer = {name: values for name, values in tensors.items() if name != NORM}
    save_file(fewer, tmp_path / "model.safetensors")
    refused(tmp_path, f"missing, e.g. {NORM}")
    save_file({**tensors, "model.layers.5.x": np.ones(3)}, tmp_path / "model.safetensors")
    refused(tmp_path, "does not have, e.g. model.layers.5.x")
    # written by old converters, meaning nothing
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert set(open_checkpoint(tmp_path).tensor_names()) == set(tensors)


def shard(folder: Path) -> dict[str, Any]:
    """Split the folder's weights over two files; the index."""
    tensors = write_folder(folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    index: dict[str, str] = {}
    for number, part in enumerate((names[:4], names[4:])):
        file_name = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file_name)
        index.update(dict.fromkeys(part, file_name))
    return {"metadata": {}, "weight_map": index}


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    index = shard(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert open_checkpoint(folder).tensor_names()
    outside = tmp_path / "outside.safetensors"
    save_file({NORM: np.ones(32, np.float32)}, outside)

    def with_norm_in(place: Any) -> None:
        path.write_text(json.dumps({"weight_map": {**index["weight_map"], NORM: place}}))

    places = ["../outside.safetensors", str(outside), "a/b.safetensors", "..\\x.safetensors"]
    for place in [*places, "\0.safetensors", ".safetensors", "", 3, None, "config.json"]:
        with_norm_in(place)
        refused(folder, "not the name of a safetensors file")
    with_norm_in("model-7.safetensors")
    refused(folder, "download it again")
    with_norm_in("model-0.safetensors")
    refused(folder, "the index promises")
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        path.write_text(text)
        refused(folder, "no weight_map")
    path.write_text("[]")
    refused(folder, "must be an object")
    left_out = {k: v for k, v in index["weight_map"].items() if k != NORM}
    path.write_text(json.dumps({"weight_map": left_out}))
    refused(folder, "the index leaves out")


class Payload:
    """Unpickling it would make a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path, name: str) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    write_folder(folder)
    (folder / "model.safetensors").unlink()
    data = pickle.dumps(Payload(mark))
    (folder / name).write_bytes(data)
    refused(folder, "can run any code")
    assert not mark.exists()
    # the payload works: what kept it from running is that nobody unpickled it
    pickle.loads(data)
    assert mark.exists()


def test_a_pickle_named_safetensors_is_refused(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    write_folder(folder)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(mark)))
    refused(folder, "")
    assert not mark.exists()


def test_python_files_of_a_checkpoint_are_never_run(tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "mark"
    write_folder(folder)
    code = f"import pathlib\npathlib.Path({str(mark)!r}).mkdir()\n"
    for name in ("modeling.py", "configuration.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(code)
    own = {"auto_map": {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "modeling.M"}}
    for architecture in ("LlamaForCausalLM", "OwnForCausalLM"):
        config = {**CONFIG, **own, "architectures": [architecture]}
        (folder / "config.json").write_text(json.dumps(config))
        if architecture == "OwnForCausalLM":
            refused(folder, "never runs")
        else:
            assert open_checkpoint(folder).config.model_type == "llama"
        assert not mark.exists()


def test_folders_without_a_model_say_what_is_missing(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, "neither model.safetensors nor")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path, "give the file itself")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ('{"rms_norm_eps": NaN}', "NaN"),
        ('{"vocab_size": 1, "vocab_size": 2}', "occurs twice"),
        ('{"a":' + "[" * 200_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_broken_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, message)


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "cannot read")


def test_a_missing_safetensors_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_safetensors_header(tmp_path / "absent.safetensors")
