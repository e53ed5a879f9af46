"""Devices that PyTorch finds on this machine, and the dtypes that they compute with."""

from __future__ import annotations

from typing import Final

import torch

from paceline.errors import ConfigError

__all__ = ["choose_device", "choose_dtype", "dtype_name"]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """Return the device; "auto" is CUDA if available. Raises ConfigError for one that is not."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if not torch.cuda.is_available() or index >= count:
            raise ConfigError(
                f"device {name!r} was asked for, but PyTorch {torch.__version__} sees {count} "
                "CUDA devices here: use --device cpu, or install a CUDA build of PyTorch"
            )
        return torch.device("cuda", index)
    return torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in settings."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype; "auto" is bfloat16 where the hardware computes with it, else float32."""
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"dtype {name!r} is not supported: use auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if torch.device(device).type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or _has_tiles()
    return torch.bfloat16 if fast else torch.float32


def _has_tiles() -> bool:
    """Whether AMX works: the processor lists it, and the kernel lets this process use it. A
    processor may list instructions that its hypervisor or kernel has not enabled."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
