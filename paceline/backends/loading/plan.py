"""Decisions on a model that precede its weights, and the loader that follows from them; the device
that computes it, and the threads and NUMA nodes next to that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from paceline.backends.loading.formats import Formats, choose_formats
from paceline.backends.loading.settings import BackendSettings, BatchLimits
from paceline.backends.machine.cpu import NO_TORCH, available_memory, has_torch, may_have_cuda
from paceline.backends.machine.placement import Placement, choose_placement
from paceline.backends.machine.topology import bind, format_list
from paceline.backends.machine.yielding import Beside, at_once
from paceline.backends.runner.interface import ModelLoader
from paceline.checkpoints.heads.pooling import PoolingFiles
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.model.config import ModelConfig
from paceline.checkpoints.open import OpenedModel
from paceline.errors import ConfigError

__all__ = [
    "LoadPlan",
    "bind_placement",
    "choose_device",
    "choose_length",
    "choose_loader",
    "place_threads",
    "settle_plan",
    "torch_dtype",
]

_log = logging.getLogger(__name__)


def choose_device(name: str) -> str:
    """Return "cpu", or PyTorch's name of another device. PyTorch is loaded only if one may exist.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".

    Raises ConfigError for a device that this machine does not have.
    """
    if name == "cpu" or (name == "auto" and not may_have_cuda()):
        return "cpu"
    if not has_torch():
        if name != "auto":
            raise ConfigError(f"--device {name} needs PyTorch, and {NO_TORCH}")
        _log.warning("device=cpu: there are signs of a GPU, but %s", NO_TORCH)
        return "cpu"
    from paceline.backends.torch.machine import choose_device as choose

    return str(choose(name))


def place_threads(settings: BackendSettings, device: str) -> Placement:
    """Choose where to compute; ``numa_fallback`` takes "auto" where ``numa`` is unavailable."""
    # a GPU has a node of its own, which is not looked up here
    auto = "auto" if device == "cpu" else "off"
    try:
        nodes = auto if settings.numa == "auto" else settings.numa
        return choose_placement(settings.threads, nodes)
    except ConfigError as error:
        if not settings.numa_fallback:
            raise
        _log.warning("numa_fallback numa=%s reason=%s", settings.numa, error)
    return choose_placement(settings.threads, auto)


def bind_placement(placement: Placement, *, whole_process: bool) -> Placement:
    """Apply a placement as far as the system allows it, and return the result."""
    if placement.cpus is None:
        if placement.why:
            _log.info("threads=%d numa_nodes=none: %s", placement.threads, placement.why)
        return placement
    cpus = format_list(placement.cpus)
    refusal = bind(placement.cpus, whole_process=whole_process)
    if refusal:
        _log.warning(
            "numa_unbound threads=%d numa_nodes=%s cpus=%s reason=%s",
            placement.threads, placement.nodes or "none", cpus, refusal,
        )  # fmt: skip
        why = f"NUMA nodes {placement.nodes} could not be bound to ({refusal})"
        if placement.why:
            why = f"{placement.why}, but it could not be bound ({refusal})"
        return replace(placement, nodes="", cpus=None, why=why)
    _log.info(
        "threads=%d numa_nodes=%s cpus=%s%s",
        placement.threads, placement.nodes or "none", cpus, placement.why and f": {placement.why}",
    )  # fmt: skip
    return placement


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
    limits: BatchLimits
    # positions to serve
    max_model_len: int
    # "cpu", or PyTorch's name of another device
    device: str
    placement: Placement
    formats: Formats
    # does what takes long while loading, on any thread
    beside: Beside = at_once


def settle_plan(
    path: Path,
    opened: OpenedModel,
    settings: BackendSettings,
    limits: BatchLimits,
    own_process: bool,
) -> LoadPlan:
    """Settle everything that precedes the weights.

    Args:
        own_process: as for ``load_backend``.

    Raises ConfigError for settings that the model or the machine does not support.
    """
    checkpoint, pooling = opened.checkpoint, opened.pooling
    if pooling is not None and settings.drafts:
        raise ConfigError(
            "speculative_config: a pooling model generates no tokens, so none can be drafted"
        )
    config = checkpoint.config
    usual = None if pooling is None else pooling.max_seq_length
    length = choose_length(config.longest, settings.max_model_len, usual)
    _check_positions(config, length)
    device = choose_device(settings.device)
    return LoadPlan(
        path=path,
        checkpoint=checkpoint,
        pooling=pooling,
        settings=settings,
        limits=limits,
        max_model_len=length,
        device=device,
        # before weights are packed and threads started, so that both lie on the chosen nodes
        placement=bind_placement(place_threads(settings, device), whole_process=own_process),
        formats=_settle_formats(config, settings, device, pooled=pooling is not None),
    )


def choose_length(longest: int, wanted: int | None, usual: int | None) -> int:
    """Return the positions to serve: ``wanted``, else the model's number, at most ``usual``.
    Raises ConfigError where the model has fewer."""
    length = min(longest, usual or longest) if wanted is None else wanted
    if not 1 <= length <= longest:
        raise ConfigError(f"max_model_len={length} is not in 1 to {longest}, the model's positions")
    return length


def _check_positions(config: ModelConfig, length: int) -> None:
    """Raise ConfigError where the cosines and sines of ``length`` positions take all memory: a file
    may claim any number of them."""
    needed, free = 4 * config.head_dim * length, available_memory()
    if needed > free:
        raise ConfigError(
            f"the rotary tables of {length} positions take {needed >> 20} MiB, and {free >> 20} "
            "MiB of memory are free: choose a smaller max_model_len"
        )


def _settle_formats(
    config: ModelConfig, settings: BackendSettings, device: str, *, pooled: bool
) -> Formats:
    """Return the formats that are asked for, or suit the machine and the file."""
    formats = choose_formats(
        config,
        compute=settings.compute,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        device=device,
        torch_dtype=partial(torch_dtype, device=device),
        isa=settings.isa,
        pooled=pooled,
    )
    _log.info(
        "compute=%s dtype=%s kv_dtype=%s%s",
        formats.compute, formats.dtype, formats.kv_dtype, formats.why and f": {formats.why}",
    )  # fmt: skip
    return formats


def torch_dtype(name: str, *, device: str) -> str:
    from paceline.backends.torch.machine import choose_dtype, dtype_name

    return dtype_name(choose_dtype(name, device))


def choose_loader(plan: LoadPlan) -> ModelLoader:
    """Return the loader of the plan's compute path. Raises ConfigError for settings that it does
    not have."""
    return _LOADERS[plan.formats.compute](plan)


def _native_loader(plan: LoadPlan) -> ModelLoader:
    from paceline.backends.native.packed import PackedCopies, fingerprint
    from paceline.backends.native.step import NativeLoader

    formats, settings, copies = plan.formats, plan.settings, None
    if settings.packed_cache_bytes is not None:
        # imported here: it can fetch models, with all the modules that this takes
        from paceline.checkpoints.hub.resolve import default_cache_dir

        folder = default_cache_dir() / "packed"
        copies = PackedCopies(folder, settings.packed_cache_bytes, fingerprint(plan.path))
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
        beside=plan.beside,
    )


def _torch_loader(plan: LoadPlan) -> ModelLoader:
    from paceline.backends.torch.load import TorchLoader

    if plan.settings.packed_cache_bytes is not None:
        raise ConfigError(
            "--packed-cache changes nothing with torch compute, which packs no weights"
        )
    return TorchLoader(
        checkpoint=plan.checkpoint,
        dtype=plan.formats.dtype,
        device=plan.device,
        block_size=plan.settings.block_size,
        max_model_len=plan.max_model_len,
        threads=plan.placement.threads,
        has_head=plan.pooling is None,
    )


# by compute path
_LOADERS: Final[Mapping[str, Callable[[LoadPlan], ModelLoader]]] = {
    "native": _native_loader,
    "torch": _torch_loader,
}
