"""Loading of a checkpoint into a backend, on the compute path that suits machine and model.

PyTorch is imported only where it computes, or where only it can tell whether a device exists: it
takes a second and 200 MB to load.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from paceline.backends.drafting.draft_model import DraftPlan
from paceline.backends.loading.draft import choose_draft
from paceline.backends.loading.encoder import load_encoder
from paceline.backends.loading.plan import LoadPlan, choose_loader, settle_plan
from paceline.backends.loading.settings import BackendSettings, BatchLimits
from paceline.backends.loading.sizes import PoolSizes, choose_sizes
from paceline.backends.native import Kinds, choose_kinds
from paceline.backends.pooling.load import make_runner
from paceline.backends.pooling.runner import HiddenModel
from paceline.backends.runner.interface import ModelLoader
from paceline.backends.runner.model_runner import ModelRunner
from paceline.backends.runner.worker_thread import Runner, WorkerBackend
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.open import OpenedEncoder, open_model
from paceline.core.backend import BackendInfo
from paceline.errors import ConfigError

__all__ = ["load_backend"]

_log = logging.getLogger(__name__)


def load_backend(
    checkpoint_path: Path,
    settings: BackendSettings,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    own_process: bool = False,
) -> WorkerBackend:
    """Open a checkpoint and get ready to run plans.

    Args:
        checkpoint_path: a Hugging Face folder or a .gguf file.
        max_num_seqs: requests that run at once; sizes buffers, and window blocks.
        max_num_batched_tokens: tokens of a step; sizes window blocks.
        own_process: this process runs only the backend, so all its threads are bound to the nodes;
            else only the threads that compute, which exclude the caller's.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: settings that the model or the machine does not support.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    limits = BatchLimits(max_num_seqs, max_num_batched_tokens)
    return WorkerBackend(lambda: _load(checkpoint_path, settings, limits, own_process))


def _load(
    path: Path, settings: BackendSettings, limits: BatchLimits, own_process: bool
) -> tuple[Runner, BackendInfo]:
    """Load the model on the thread that will compute: open it, settle its plan, size its memory,
    read its weights."""
    started = time.monotonic()
    opened = open_model(path, settings.runner, settings.convert)
    if isinstance(opened, OpenedEncoder):
        return load_encoder(opened, settings, limits, own_process)
    was_opened = time.monotonic()
    plan = settle_plan(path, opened, settings, limits, own_process)
    loader = choose_loader(plan)
    draft = choose_draft(plan) if settings.drafts else None
    sizes = choose_sizes(plan, loader, draft)
    chosen = time.monotonic()
    loaded = loader.load(sizes.num_blocks, sizes.num_host_blocks, sizes.num_window_blocks)
    _log.info(
        "loaded checkpoint=%.2f choice=%.2f weights=%.2f",
        was_opened - started, chosen - was_opened, time.monotonic() - chosen,
    )  # fmt: skip
    drafting = None
    if draft is not None:
        loaded, drafting = draft.load(loaded, sizes.num_blocks)
    info = replace(
        _describe(plan, loader, draft, sizes),
        swap_block_seconds=loaded.swap_block_seconds,
    )
    if plan.pooling is not None:
        assert isinstance(loaded.model, HiddenModel)
        dimensions = settings.matryoshka_dimensions
        return make_runner(loaded.model, plan.pooling, plan.checkpoint, dimensions, info)
    runner = ModelRunner(
        loaded,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=plan.max_model_len,
        draft=drafting,
    )
    return runner, info


def _describe_weights(plan: LoadPlan) -> str:
    """Return, for the ready line, how the matrices of a file of few bits are kept."""
    formats, checkpoint = plan.formats, plan.checkpoint
    kinds = Kinds()
    if formats.compute == "native":
        kinds = choose_kinds(checkpoint, formats.dtype)
    folder = checkpoint.quantisation if isinstance(checkpoint, HFCheckpoint) else ""
    if folder:
        in_bits = "as blocks of Q4_1" if kinds.numbers else f"decoded to {formats.dtype}"
        folder = f"{folder} {in_bits}"
    return "; ".join(filter(None, (folder, kinds.note)))


def _describe(
    plan: LoadPlan, loader: ModelLoader, draft: DraftPlan | None, sizes: PoolSizes
) -> BackendInfo:
    """Describe the backend, without what is known only once it is loaded."""
    formats, windowed = plan.formats, sizes.num_window_blocks > 0
    drafter = "" if draft is None else draft.described
    window_block_bytes = loader.window_block_bytes if windowed else 0
    choice = (
        "" if plan.pooling is None else plan.pooling.described,
        formats.why,
        _describe_weights(plan),
        drafter,
        sizes.why,
        plan.placement.describe(plan.settings.threads),
    )
    return BackendInfo(
        name=formats.compute,
        vocab_size=plan.checkpoint.config.vocab_size,
        max_model_len=plan.max_model_len,
        block_size=plan.settings.block_size,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_host_blocks,
        block_bytes=loader.block_bytes
        + (0 if draft is None else draft.block_bytes)
        - window_block_bytes,
        dtype=formats.dtype,
        device=plan.device,
        kv_dtype=formats.kv_dtype,
        choice="; ".join(filter(None, choice)),
        numa_nodes=plan.placement.nodes,
        window=loader.window if windowed else 0,
        num_window_blocks=sizes.num_window_blocks,
        window_block_bytes=window_block_bytes,
        drafter=drafter,
    )
