"""Loading of an encoder, which PyTorch computes without a KV cache."""

from __future__ import annotations

import logging
import time

from paceline.backends.loading.devices import bind_placement, choose_device, place_threads
from paceline.backends.loading.plan import choose_length, torch_dtype
from paceline.backends.loading.settings import BackendSettings, BatchLimits
from paceline.backends.machine.cpu import NO_TORCH, has_torch
from paceline.backends.pooling.load import make_runner
from paceline.backends.pooling.runner import PoolingRunner
from paceline.checkpoints.model.encoder import EncoderFiles
from paceline.checkpoints.open import OpenedEncoder
from paceline.core.backend import BackendInfo
from paceline.errors import ConfigError

__all__ = ["load_encoder"]

_log = logging.getLogger(__name__)


def load_encoder(
    opened: OpenedEncoder, settings: BackendSettings, limits: BatchLimits, own_process: bool
) -> tuple[PoolingRunner, BackendInfo]:
    """Load an encoder. Its blocks are mere numbers, enough of them that the scheduler never waits
    for one. Raises ConfigError for settings that are a decoder's."""
    started = time.monotonic()
    checkpoint, pooling = opened.checkpoint, opened.pooling
    config = checkpoint.config
    _check_settings(settings, checkpoint)
    length = choose_length(config.longest, settings.max_model_len, pooling.max_seq_length)
    device = choose_device(settings.device)
    placement = bind_placement(place_threads(settings, device), whole_process=own_process)
    from paceline.backends.torch import encoder

    dtype = settings.dtype
    if dtype == "auto" and device == "cpu":
        # encoders are small, and their vectors are compared in all their digits
        dtype = "float32"
    dtype = torch_dtype(dtype, device=device)
    model = encoder.load_encoder(checkpoint, dtype=dtype, device=device, threads=placement.threads)
    _log.info("loaded encoder=%.2f", time.monotonic() - started)
    blocks_of_one = -(-length // settings.block_size)
    choice = pooling.described, placement.describe(settings.threads)
    info = BackendInfo(
        name="torch",
        vocab_size=config.vocab_size,
        max_model_len=length,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks or limits.max_num_seqs * blocks_of_one,
        block_bytes=0,
        dtype=dtype,
        device=device,
        choice="; ".join(filter(None, choice)),
        numa_nodes=placement.nodes,
    )
    return make_runner(model, pooling, checkpoint, settings.matryoshka_dimensions, info)


def _check_settings(settings: BackendSettings, checkpoint: EncoderFiles) -> None:
    path = checkpoint.path
    if settings.drafts:
        raise ConfigError("speculative_config: a model that is pooled makes no tokens to draft")
    for flag, value, unset in (
        ("--kv-dtype", settings.kv_dtype, ("auto",)),
        ("--compute", settings.compute, ("auto", "torch")),
        ("--isa", settings.isa, (None,)),
        ("--packed-cache", settings.packed_cache_bytes, (None,)),
        ("--kv-cache-memory", settings.kv_cache_bytes, (None,)),
        ("--swap-space", settings.swap_bytes, (None, 0)),
    ):
        if value not in unset:
            raise ConfigError(
                f"{flag} {value} is for decoders, and {path} is an encoder "
                f"({checkpoint.config.model_type}), which PyTorch computes without a KV cache: "
                "leave it out"
            )
    if not has_torch():
        raise ConfigError(f"{path} is an encoder, which PyTorch computes, and {NO_TORCH}")
