"""The loader for a checkpoint on the compute path chosen for it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.backends.loading.formats import Formats
from paceline.backends.native import OWN_BITS
from paceline.backends.native.packed import PackedCopies, fingerprint
from paceline.backends.runner.interface import ModelLoader
from paceline.checkpoints.heads.pooling import PoolingFiles
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import ConfigError

__all__ = ["choose_copies", "choose_loader", "torch_dtype"]

# weight formats whose head is, or may be, int8
_SCREENED: Final = ("int8", "q4", OWN_BITS)


def torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))


def choose_copies(path: Path, formats: Formats, max_bytes: int | None) -> PackedCopies | None:
    if max_bytes is None:
        return None
    if formats.compute != "native":
        raise ConfigError(
            f"--packed-cache changes nothing with {formats.compute} compute, which packs no weights"
        )
    # imported here: it can fetch models, with all the modules that this takes
    from paceline.checkpoints.hub.resolve import default_cache_dir

    return PackedCopies(default_cache_dir() / "packed", max_bytes, fingerprint(path))


def choose_loader(
    checkpoint: Checkpoint,
    formats: Formats,
    *,
    device: str,
    block_size: int,
    max_model_len: int,
    threads: int,
    screen_head: bool,
    pooling: PoolingFiles | None,
    copies: PackedCopies | None,
) -> ModelLoader:
    if screen_head and (formats.compute != "native" or formats.dtype not in _SCREENED):
        raise ConfigError(
            f"--screen-head changes nothing with {formats.compute} compute and {formats.dtype} "
            f"weights: it is for native compute with {', '.join(_SCREENED)}"
        )
    if formats.compute == "native":
        from paceline.backends.native.step import NativeLoader

        return NativeLoader(
            checkpoint=checkpoint,
            dtype=formats.dtype,
            kv_dtype=formats.kv_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            threads=threads,
            isa=formats.isa,
            screen_head=screen_head,
            has_head=pooling is None,
            copies=copies,
        )
    from paceline.backends.torch.load import TorchLoader

    return TorchLoader(
        checkpoint=checkpoint,
        dtype=formats.dtype,
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        threads=threads,
        has_head=pooling is None,
    )
