"""Folders of FP8, GPTQ and AWQ, written here as their makers lay them out, against the weights that
they stand for in transformers."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from paceline.backends.native import choose_kinds, unavailable_reason
from paceline.backends.native.single_kernels import PackedMatrix
from paceline.backends.native.step import NativeLoader
from paceline.backends.native.tensors import RawTensor, checkpoint_tensors
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.checkpoints.weights.quantised import Quantisation, QuantisedMatrix
from paceline.checkpoints.weights.safetensors import SafetensorsEntry, read_safetensors_header
from paceline.errors import CheckpointError
from tests.backends.conftest import load
from tests.backends.quantised_folders import GPTQ, LAYOUTS, SIZES, change_config, write
from tests.backends.test_architectures import PROMPT, Sequence, expected, make_loader, same
from tests.backends.torch.models import make_model

NATIVE: Final = unavailable_reason() is None
Q4_1: Final = GGMLQuantizationType.Q4_1
# one of each format every day
FORMATS: Final = [
    pytest.param(name, marks=() if name in ("gptq", "awq", "fp8-blocks") else pytest.mark.thorough)
    for name in LAYOUTS
]


@pytest.mark.parametrize("layout", FORMATS)
def test_logits_are_those_of_the_weights_that_are_meant(layout: str, tmp_path: Path) -> None:
    model = write(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    theirs = expected(model, PROMPT)
    weights = model.state_dict()
    for name in checkpoint.tensor_names():
        np.testing.assert_array_equal(checkpoint.tensor(name), weights[name].numpy(), name)
    for path in ("torch", "native") if NATIVE else ("torch",):
        same(Sequence(make_loader(checkpoint, path)).feed(PROMPT), theirs)


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8-blocks"])
def test_fused_matrices_are_cut_into_theirs(layout: str, tmp_path: Path) -> None:
    # one matrix of q, k and v, and one of gate and up, whose blocks of rows the parts cut
    model = write(tmp_path, layout, "phi3", num_attention_heads=4, num_key_value_heads=2)
    checkpoint = open_checkpoint(tmp_path)
    for path in ("torch", "native") if NATIVE else ("torch",):
        same(Sequence(make_loader(checkpoint, path)).feed(PROMPT), expected(model, PROMPT))
    assert isinstance(checkpoint, HFCheckpoint)
    name = "model.layers.1.self_attn.v_proj.weight"
    whole = checkpoint.tensor(name)
    np.testing.assert_array_equal(checkpoint.tensor_row(name, 3), whole[3])


@pytest.mark.skipif(not NATIVE, reason=str(unavailable_reason()))
@pytest.mark.parametrize(
    ("layout", "exact"),
    [
        ("gptq-symmetric", True),
        ("gptq", False),
        ("gptq-one-group", False),
        ("awq", False),
        ("gptq-bfloat16-scales", False),
    ],
)
def test_four_bits_are_kept(layout: str, exact: bool, tmp_path: Path) -> None:
    write(tmp_path, layout)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.stored_dtype == "Q4_1"
    kinds = choose_kinds(checkpoint, "q4")
    # seven matrices in each of three layers, and the embedding and the head
    assert kinds.note.startswith("21 Q4_1 in their own bits, 2 ")
    largest = 0.0
    for name, tensor in checkpoint_tensors(checkpoint):
        if not isinstance(tensor, RawTensor) or tensor.type != "Q4_1":
            continue
        meant = checkpoint.tensor(name)
        packed = PackedMatrix(tensor, "q4").unpack()
        # a step is the least difference between two values of a group
        grouped = np.sort(meant.reshape(len(meant), -1, 32), axis=2)
        gaps = np.diff(grouped, axis=2)
        step = np.where(gaps > 1e-6, gaps, np.inf).min(axis=2)
        error = np.abs(packed - meant).reshape(grouped.shape).max(axis=2)
        largest = max(largest, float((error / step).max()))
    assert (largest < 1e-6) == exact and largest <= 1 / 128
    for name, tensor in checkpoint_tensors(checkpoint, in_bits=False):
        if isinstance(tensor, np.ndarray) and tensor.ndim == 2:
            np.testing.assert_array_equal(tensor, checkpoint.tensor(name))


@pytest.mark.skipif(not NATIVE, reason=str(unavailable_reason()))
@pytest.mark.parametrize("dtype", ["q4", "gguf"])
def test_bits_are_kept_by_every_name_for_that(dtype: str, tmp_path: Path) -> None:
    write(tmp_path, "gptq-symmetric")
    backend = load(tmp_path, dtype=dtype, compute="native", block_size=16)
    assert "as blocks of Q4_1; 21 Q4_1 in their own bits" in backend.info.choice
    backend.close()
    loader = NativeLoader(
        checkpoint=open_checkpoint(tmp_path),
        dtype=dtype,
        kv_dtype="float32",
        block_size=16,
        max_model_len=32,
        threads=1,
    )
    # stored blocks, and nothing that was rounded to fit into others
    kept = [each for _, each in loader.tensors() if isinstance(each, RawTensor)]
    assert [each.type for each in kept].count("Q4_1") == 21


def test_a_group_of_more_inputs_than_there_are_is_all_of_them(tmp_path: Path) -> None:
    write(tmp_path, "gptq-one-group")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["group_size"] = 2147483616
    path.write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, kind = checkpoint.raw_tensor(name)
    assert kind == "Q4_1" and rows.nbytes < 10_000


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("gptq-act-order", "GPTQ of 4 bits in groups of 32 decoded to float32"),
        ("awq", "AWQ of 4 bits in groups of 32 decoded to float32"),
        ("fp8", "FP8 decoded to float32"),
    ],
)
def test_the_ready_line_says_what_became_of_it(layout: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    backend = load(tmp_path)
    assert said in backend.info.choice
    backend.close()


@pytest.mark.skipif(not NATIVE, reason=str(unavailable_reason()))
@pytest.mark.parametrize("layout", FORMATS)
def test_auto_takes_no_more_bits_than_the_file_has(layout: str, tmp_path: Path) -> None:
    write(tmp_path, layout)
    backend = load(tmp_path, dtype="auto", compute="auto", block_size=16)
    assert backend.info.name == "native" and backend.info.dtype in ("int8", "q4")
    stored = open_checkpoint(tmp_path).config.stored_dtype
    kept = layout not in ("gptq-act-order", "gptq-8", "gptq-groups-of-16", "gptq-float32-scales")
    wanted = "FP8" if "fp8" in layout or "compressed" in layout else "Q4_1" if kept else "INT"
    assert stored.startswith(wanted) and (stored == "Q4_1" or backend.info.dtype == "int8")
    backend.close()


@pytest.mark.skipif(not NATIVE, reason=str(unavailable_reason()))
def test_the_ready_line_counts_what_is_kept(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    backend = load(tmp_path, dtype="q4", compute="native", block_size=16)
    assert "AWQ of 4 bits in groups of 32 as blocks of Q4_1; 21 Q4_1" in backend.info.choice
    backend.close()


def large(folder: Path, layout: str) -> QuantisedMatrix:
    """A matrix of 1,024 outputs and 2,048 inputs."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)

    tensors = {
        "gptq": {"qweight": numbers(256, 1024), "qzeros": numbers(16, 128)},
        "awq": {"qweight": numbers(2048, 128), "qzeros": numbers(16, 128)},
        "fp8": {"weight": numbers(1024, 512).view(torch.uint8) & 119},
    }[layout]
    scales = torch.rand(16, 1024, generator=generator).half()
    if layout == "fp8":
        tensors["weight"] = tensors["weight"].view(torch.float8_e4m3fn)
        tensors["weight_scale_inv"] = torch.rand(8, 16, generator=generator)
    else:
        tensors["scales"] = scales
    save_file({f"m.{name}": each for name, each in tensors.items()}, folder / "m.safetensors")
    quantisation = {
        "gptq": Quantisation("GPTQ", 4, 128, 1),
        "awq": Quantisation("AWQ", 4, 128),
        "fp8": Quantisation("FP8", block=(128, 128)),
    }[layout]
    found = quantisation.take(read_safetensors_header(folder / "m.safetensors"))["m.weight"]
    assert not isinstance(found, SafetensorsEntry) and found.shape == (1024, 2048)
    return found


@pytest.mark.parametrize("layout", ["gptq", "awq", "fp8"])
def test_matrices_are_unpacked_some_rows_at_a_time(layout: str, tmp_path: Path) -> None:
    matrix = large(tmp_path, layout)

    def peak(make: Callable[[], NDArray[Any]]) -> tuple[NDArray[Any], float]:
        tracemalloc.start()
        made = make()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return made, most

    values, most = peak(matrix.values)
    # what is stored, what it becomes, and some rows of what lies between: all of that would be
    # three to six times as much
    assert most < values.nbytes + matrix.num_bytes + (4 << 20)
    # rows by themselves, across the places where it was cut
    for rows in (slice(0, 1), slice(61, 131), slice(1000, 1024)):
        np.testing.assert_array_equal(matrix.part(rows).values(), values[rows])
    if layout == "fp8":
        return
    blocks, most = peak(matrix.blocks)
    assert most < blocks.nbytes + matrix.num_bytes + (4 << 20)
    np.testing.assert_array_equal(matrix.part(slice(61, 131)).blocks(), blocks[61:131])
    np.testing.assert_allclose(dequantize(blocks, Q4_1), values, atol=0.01)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ in the format 'marlin'"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"bits": None}, "GPTQ of None bits"),
        (GPTQ | {"bits": 4.0}, "GPTQ of 4.0 bits is not read, only of the whole numbers 4 and 8"),
        (GPTQ | {"bits": True}, "GPTQ of True bits"),
        (
            {"quant_method": "awq", "bits": 4.0, "group_size": 32},
            "AWQ of 4.0 bits is not read, only of the whole number 4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {},
            },
            "config_groups is empty",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": 32}, "'gemv'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "AWQ of 8 bits"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False, "group_size": 32}, "zero points"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        ({}, "by None"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    change_config(tmp_path, settings)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert said in str(raised.value) and "use a GGUF file" in str(raised.value)


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    make_model("llama", **SIZES).save_pretrained(tmp_path)
    for settings, said in (
        ("gptq", "must be an object"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": "32"}, "group_size is '32'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        # config.json tells of weights that are not there
        (GPTQ, "no tensor is stored so"),
    ):
        change_config(tmp_path, settings)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(tmp_path)


Q_PROJ: Final = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("layout", "ending", "value", "said"),
    [
        ("gptq", "qzeros", None, "has no qzeros"),
        ("gptq", "scales", torch.ones(1, 64), r"scales has shape \[1, 64\].*implies \[2, 64\]"),
        ("gptq", "qweight", torch.ones(8, dtype=torch.int32), r"with a qweight of \[8\]"),
        ("gptq", "qweight", torch.ones(8, 64), "stored as F32, must be I32"),
        ("gptq", "g_idx", torch.full((64,), 2, dtype=torch.int32), "among its 2"),
        ("gptq", "g_idx", torch.full((64,), -1, dtype=torch.int32), "among its 2"),
        ("gptq", "bias", torch.ones(64), "q_proj.bias"),
        ("fp8", "weight_scale", None, "has no weight_scale"),
        ("fp8", "weight_scale", torch.ones(3), r"scales of shape \[3\]"),
        ("fp8-blocks", "weight_scale_inv", torch.ones(2, 1), r"\[3, 2\] are read"),
        ("gptq", "scales", torch.ones(2, 64, dtype=torch.int16), "stored as I16; scales of F32"),
        (
            "fp8-blocks",
            "weight_scale_inv",
            torch.ones(3, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            r"weight_scale_inv is stored as F8_E8M0; scales of F32, F16, BF16, F64 are read",
        ),
        (
            "fp8",
            "weight",
            torch.ones(0, 64).to(torch.float8_e4m3fn),
            r"shape \[0, 64\]: it is empty",
        ),
        (
            "fp8",
            "weight",
            torch.ones(64, 0).to(torch.float8_e4m3fn),
            r"shape \[64, 0\]: it is empty",
        ),
        ("gptq", "qweight", torch.ones(8, 0, dtype=torch.int32), r"shape \[8, 0\]: it is empty"),
        ("gptq", "qweight", torch.ones(0, 64, dtype=torch.int32), r"shape \[0, 64\]: it is empty"),
        ("awq", "qweight", torch.ones(64, 0, dtype=torch.int32), r"shape \[64, 0\]: it is empty"),
        (
            "gptq",
            "qweight",
            torch.ones(8, 60, dtype=torch.int32),
            r"shape \[8, 60\], 60 outputs: GPTQ of 4 bits in groups of 32 has a multiple of 8",
        ),
    ],
)
def test_parts_that_do_not_go_together(
    layout: str, ending: str, value: torch.Tensor | None, said: str, tmp_path: Path
) -> None:
    write(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    del stored[f"{Q_PROJ}.{ending}"]
    if value is not None:
        stored[f"{Q_PROJ}.{ending}"] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)
