"""gpt-oss's folders: experts in one tensor, in 16 bits and in MXFP4."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.backends.native import (
    RawTensor,
    checkpoint_tensors,
    choose_kinds,
    unavailable_reason,
)
from paceline.backends.native.tensors import PACKED
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import CheckpointError
from tests.backends.test_architectures import (
    EVERY_EXPERT,
    PROMPT,
    Sequence,
    expected,
    make_loader,
    make_native,
    same,
)
from tests.backends.torch.models import make_model

# inputs in whole blocks of 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
EXPERTS = "model.layers.{}.mlp.experts.{}"


def write_mxfp4(folder: Path, **changes: int) -> Any:
    """A folder with experts in MXFP4, and the model that it stands for, by transformers."""
    model = make_model("gpt-oss", **SIZES, **changes)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for layer in range(model.config.num_hidden_layers):
        for name in ("gate_up_proj", "down_proj"):
            key = EXPERTS.format(layer, name)
            experts, inputs, outputs = tensors.pop(key).shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            with torch.no_grad():
                getattr(model.model.layers[layer].mlp.experts, name).copy_(values)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return model


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_mxfp4_is_what_transformers_takes_it_for(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, HFCheckpoint)
    assert checkpoint.quantisation == "MXFP4" and checkpoint.config.stored_dtype == "MXFP4"
    held = model.model.layers[1].mlp.experts
    for expert in (0, 4):
        name = EXPERTS.format(1, expert)
        gate_up, down = held.gate_up_proj[expert].T, held.down_proj[expert].T
        for part, values in (("gate", gate_up[0::2]), ("up", gate_up[1::2]), ("down", down)):
            ours = checkpoint.tensor(f"{name}.{part}_proj.weight")
            assert (ours == values.detach().numpy()).all()
            row = checkpoint.tensor_row(f"{name}.{part}_proj.weight", 5)
            assert (row == ours[5]).all()
            # and as blocks that the native kernels keep
            stored, kind = checkpoint.raw_tensor(f"{name}.{part}_proj.weight")
            assert kind == "MXFP4"
            assert (dequantize(stored, GGMLQuantizationType.MXFP4) == ours).all()
    for path in ["torch"] if unavailable_reason() else ["torch", "native"]:
        sequence = Sequence(make_loader(checkpoint, path))
        same(sequence.feed(PROMPT), expected(model, PROMPT))


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_mxfp4_experts_stay_in_their_bits(tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path, **EVERY_EXPERT["gpt-oss"])
    checkpoint = open_checkpoint(tmp_path)
    four, eight = PACKED["mxfp4"], PACKED["int8"]
    layer = bytes([eight, eight, eight, eight, four, four])
    kinds = choose_kinds(checkpoint, "gguf")
    assert kinds.numbers == layer * checkpoint.config.num_hidden_layers + bytes([eight, eight])
    theirs = expected(model, PROMPT)
    errors = {}
    for dtype in ("gguf", "q4"):
        loader = replace(make_native(checkpoint), dtype=dtype, kv_dtype="bfloat16")
        ours = Sequence(loader).feed(PROMPT)
        errors[dtype] = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    # of activations in 8 bits, and of weights that are rounded again
    assert errors["gguf"] < 0.1 < errors["q4"]


@pytest.mark.parametrize("in_bits", [False, True])
def test_experts_in_16_bits_are_not_taken_for_blocks(tmp_path: Path, in_bits: bool) -> None:
    make_model("gpt-oss").to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = dict(checkpoint_tensors(checkpoint, in_bits=in_bits))
    for part in ("gate", "up", "down"):
        name = f"{EXPERTS.format(1, 2)}.{part}_proj.weight"
        assert checkpoint.tensor_type(name) == "BF16"
        assert (np.asarray(tensors[name]) == checkpoint.tensor(name)).all()
    # others lie in rows
    assert isinstance(tensors["model.layers.1.self_attn.o_proj.weight"], RawTensor)


def without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERTS.format(0, 'down_proj')}_scales"]


def short_scales(tensors: dict[str, torch.Tensor]) -> None:
    key = f"{EXPERTS.format(0, 'down_proj')}_scales"
    tensors[key] = tensors[key][:, :-1].contiguous()


def wrong_type(tensors: dict[str, torch.Tensor]) -> None:
    key = f"{EXPERTS.format(0, 'down_proj')}_scales"
    tensors[key] = tensors[key].to(torch.int32)


def one_expert(tensors: dict[str, torch.Tensor]) -> None:
    key = f"{EXPERTS.format(0, 'down_proj')}_bias"
    tensors[key] = tensors[key][0].contiguous()


def an_expert_less(tensors: dict[str, torch.Tensor]) -> None:
    key = f"{EXPERTS.format(0, 'down_proj')}_bias"
    tensors[key] = tensors[key][:-1].contiguous()


def no_bytes(tensors: dict[str, torch.Tensor]) -> None:
    # as large as its shape says, and nothing on disk
    tensors[f"{EXPERTS.format(0, 'down_proj')}_bias"] = torch.empty(1 << 40, 0)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_bytes, "1 to 4096 experts are read"),
        (without_scales, "down_proj_blocks has no scales"),
        (short_scales, r"with scales of \[5, 63, 3\]"),
        (wrong_type, "its scales as I32, must be U8"),
        (one_expert, r"has shape \[64\], not that of all experts"),
        (an_expert_less, "experts.4.down_proj.bias"),
    ],
)
def test_parts_that_do_not_go_together(
    tmp_path: Path, spoil: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    write_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_another_swiglu_is_refused(tmp_path: Path) -> None:
    make_model("gpt-oss").save_pretrained(tmp_path)
    change_config(tmp_path, swiglu_alpha=1.0)
    with pytest.raises(CheckpointError, match=r"swiglu_alpha=1\.0 is not supported, only 1\.702"):
        open_checkpoint(tmp_path)
