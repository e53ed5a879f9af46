"""Folders of FP8, GPTQ and AWQ, laid out as their makers write them, and what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.backends.torch.models import make_model

# inputs of 64 and 96, so that there are several groups and blocks, and the last block is cut
SIZES: Final = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


class Written(NamedTuple):
    """What stands in a folder for a matrix, by the ending of its name, and what it means."""

    tensors: dict[str, torch.Tensor]
    meaning: NDArray[np.float32]


def rows_packed(numbers: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Several rows in one of 32 bits, the first in the lowest."""
    return columns_packed(numbers.T, bits).T.contiguous()


def columns_packed(
    numbers: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Several columns in one, in that order from the lowest bits on."""
    each = 32 // bits
    found = np.zeros((len(numbers), numbers.shape[1] // each), np.uint32)
    for row, column in np.ndindex(*found.shape):
        for place, which in enumerate(order or range(each)):
            number = int(numbers[row, column * each + which])
            found[row, column] |= np.uint32(number << bits * place)
    return torch.from_numpy(found.view(np.int32))


def integers(
    shape: tuple[int, int], seed: int, *, bits: int = 4, group: int = 32, version: int = 1,
    shuffled: bool = False, symmetric: bool = False, awq: bool = False,
    scale: torch.dtype = torch.float16,
) -> Written:  # fmt: skip
    outputs, inputs = shape
    rng = np.random.default_rng(seed)
    size = inputs if group == -1 else group
    groups = inputs // size
    numbers = rng.integers(0, 1 << bits, (inputs, outputs))
    # the first version stores one less
    lowest = int(version == 1 and not awq)
    zeros = rng.integers(lowest, (1 << bits) + lowest, (groups, outputs))
    if symmetric:
        zeros[:] = 1 << bits - 1
    # numbers that bfloat16 holds too
    scales = (rng.integers(64, 192, (groups, outputs)) / (1024 << bits)).astype(np.float16)
    of_input = np.arange(inputs) // size
    if shuffled:
        of_input = rng.permutation(of_input)
    meaning = (numbers - zeros[of_input]) * scales[of_input].astype(np.float64)
    stored = torch.from_numpy(scales).to(scale)
    assert np.array_equal(stored.float().numpy(), scales.astype(np.float32))
    if scale == torch.float32:
        # one that is no half
        stored[0, 0] *= 1.0 + 2.0**-20
        meaning = (numbers - zeros[of_input]) * stored.double().numpy()[of_input]
    tensors = {"scales": stored}
    if awq:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors["qweight"] = columns_packed(numbers, bits, order)
        tensors["qzeros"] = columns_packed(zeros, bits, order)
    else:
        tensors["qweight"] = rows_packed(numbers, bits)
        tensors["qzeros"] = columns_packed(zeros - lowest, bits)
        tensors["g_idx"] = torch.from_numpy(of_input.astype(np.int32))
        # as AutoGPTQ does where there is none
        tensors["bias"] = torch.zeros(outputs, dtype=torch.float16)
    return Written(tensors, meaning.T.astype(np.float32))


def bytes_(
    shape: tuple[int, int], seed: int, *, scales: Callable[[int, int], tuple[int, ...]],
    block: tuple[int, int] = (1, 1), name: str = "weight_scale", dtype: torch.dtype = torch.float32,
) -> Written:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    # the two that are no number
    codes[codes & 127 == 127] = 1
    weight = codes.view(torch.float8_e4m3fn)
    scale = (torch.rand(scales(*shape), generator=generator) / 2000 + 2e-4).to(dtype)
    factors = scale.float()
    if factors.ndim == 2 and factors.shape[1] > 1:
        factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        factors = factors[: shape[0], : shape[1]]
    elif factors.ndim == 1 and len(factors) > 1:
        factors = factors[:, None]
    meaning = (weight.float() * factors).numpy()
    return Written({"weight": weight, name: scale, "input_scale": torch.ones(1)}, meaning)


GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
BLOCKS: Final = (24, 48)
_CHANNELS: Final = {"num_bits": 8, "type": "float", "strategy": "channel"}
# what config.json says, and a matrix in that layout
LAYOUTS: Final[dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], Written]]]] = {
    "gptq": (GPTQ, integers),
    "gptq-v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda shape, seed: integers(shape, seed, version=2),
    ),
    "gptq-act-order": (
        GPTQ | {"desc_act": True},
        lambda shape, seed: integers(shape, seed, shuffled=True),
    ),
    "gptq-8": (GPTQ | {"bits": 8}, lambda shape, seed: integers(shape, seed, bits=8)),
    "gptq-one-group": (
        GPTQ | {"group_size": -1},
        lambda shape, seed: integers(shape, seed, group=-1),
    ),
    "gptq-groups-of-16": (
        GPTQ | {"group_size": 16},
        lambda shape, seed: integers(shape, seed, group=16),
    ),
    "gptq-symmetric": (
        GPTQ | {"sym": True},
        lambda shape, seed: integers(shape, seed, symmetric=True),
    ),
    "gptq-bfloat16-scales": (
        GPTQ,
        lambda shape, seed: integers(shape, seed, scale=torch.bfloat16),
    ),
    "gptq-float32-scales": (
        GPTQ,
        lambda shape, seed: integers(shape, seed, scale=torch.float32),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda shape, seed: integers(shape, seed, awq=True),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda shape, seed: bytes_(shape, seed, scales=lambda rows, columns: ()),
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCKS), "fmt": "e4m3"},
        lambda shape, seed: bytes_(
            shape,
            seed,
            scales=lambda rows, columns: (-(-rows // BLOCKS[0]), -(-columns // BLOCKS[1])),
            block=BLOCKS,
            name="weight_scale_inv",
        ),
    ),
    "fp8-rows": (
        {"quant_method": "fbgemm_fp8"},
        lambda shape, seed: bytes_(shape, seed, scales=lambda rows, columns: (rows, 1)),
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": _CHANNELS, "targets": ["Linear"]}},
        },
        lambda shape, seed: bytes_(
            shape, seed, scales=lambda rows, columns: (rows,), dtype=torch.bfloat16
        ),
    ),
}


def write(folder: Path, layout: str, name: str = "llama", **changes: Any) -> Any:
    """A folder, and the model of transformers with the weights that it stands for."""
    settings, make = LAYOUTS[layout]
    model = make_model(name, **{**SIZES, **changes})
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    meant = dict(stored)
    for seed, (key, value) in enumerate(sorted(stored.items())):
        if "_proj." not in key or value.ndim != 2:
            continue
        written = make((value.shape[0], value.shape[1]), seed)
        del stored[key]
        base = key.removesuffix(".weight")
        stored |= {f"{base}.{ending}": part for ending, part in written.tensors.items()}
        meant[key] = torch.from_numpy(written.meaning)
    save_file(stored, folder / "model.safetensors")
    model.load_state_dict(meant, strict=False)
    change_config(folder, settings)
    return model


def change_config(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
