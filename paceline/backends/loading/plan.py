"""Decisions on a model that precede its weights, and the loader that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.backends.loading.formats import Formats
from paceline.backends.loading.settings import BackendSettings
from paceline.backends.machine.placement import Placement
from paceline.backends.native.packed import PackedCopies, fingerprint
from paceline.backends.runner.interface import ModelLoader
from paceline.checkpoints.heads.pooling import PoolingFiles
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.errors import ConfigError

__all__ = ["LoadPlan", "choose_loader", "torch_dtype"]

# weight formats whose head is, or may be, int8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A decoder to load; the steps of ``load`` settle its fields, from the first to the last."""

    # a Hugging Face folder or a .gguf file, and what was opened there
    path: Path
    checkpoint: Checkpoint
    # how hidden states are pooled; None: the model generates
    pooling: PoolingFiles | None
    settings: BackendSettings
    # the scheduler's max_num_seqs and max_num_batched_tokens
    limits: tuple[int, int]
    # positions to serve
    max_model_len: int
    # "cpu", or PyTorch's name of another device
    device: str
    placement: Placement
    formats: Formats


def torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))


def _choose_copies(plan: LoadPlan) -> PackedCopies | None:
    max_bytes, compute = plan.settings.packed_cache_bytes, plan.formats.compute
    if max_bytes is None:
        return None
    if compute != "native":
        raise ConfigError(
            f"--packed-cache changes nothing with {compute} compute, which packs no weights"
        )
    # imported here: it can fetch models, with all the modules that this takes
    from paceline.checkpoints.hub.resolve import default_cache_dir

    return PackedCopies(default_cache_dir() / "packed", max_bytes, fingerprint(plan.path))


def choose_loader(plan: LoadPlan) -> ModelLoader:
    """Return the loader of the plan's compute path. Raises ConfigError for settings that it does
    not have."""
    formats, settings, copies = plan.formats, plan.settings, _choose_copies(plan)
    if formats.compute == "native":
        from paceline.backends.native.step import NativeLoader

        return NativeLoader(
            checkpoint=plan.checkpoint,
            dtype=formats.dtype,
            kv_dtype=formats.kv_dtype,
            block_size=settings.block_size,
            max_model_len=plan.max_model_len,
            threads=plan.placement.threads,
            isa=formats.isa,
            has_head=plan.pooling is None,
            copies=copies,
        )
    from paceline.backends.torch.load import TorchLoader

    return TorchLoader(
        checkpoint=plan.checkpoint,
        dtype=formats.dtype,
        device=plan.device,
        block_size=settings.block_size,
        max_model_len=plan.max_model_len,
        threads=plan.placement.threads,
        has_head=plan.pooling is None,
    )
