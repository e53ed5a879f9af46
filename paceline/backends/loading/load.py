"""Loading of a checkpoint into a backend, on the compute path that suits machine and model.

PyTorch is imported only where it computes, or where only it can tell whether a device exists: it
takes a second and 200 MB to load. An encoder is computed by PyTorch, without a KV cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeAlias

from paceline.backends.drafting.draft_model import DraftPlan
from paceline.backends.loading.adapter import ModelAdapters, PlannedAdapter
from paceline.backends.loading.draft import choose_draft
from paceline.backends.loading.plan import (
    LoadPlan,
    bind_placement,
    choose_device,
    choose_length,
    choose_loader,
    place_threads,
    settle_plan,
    torch_dtype,
)
from paceline.backends.loading.pool_sizes import PoolSizes, choose_sizes
from paceline.backends.loading.settings import BackendSettings, BatchLimits
from paceline.backends.machine.cpu import NO_TORCH, has_torch
from paceline.backends.machine.yielding import Beside, at_once
from paceline.backends.native import Kinds, choose_kinds
from paceline.backends.pooling.load import make_runner
from paceline.backends.pooling.runner import HiddenModel, PoolingRunner
from paceline.backends.runner.interface import CopyableModel, ModelLoader, YieldingModel
from paceline.backends.runner.model_runner import ModelRunner
from paceline.checkpoints.hf.checkpoint import HFCheckpoint
from paceline.checkpoints.model.encoder import EncoderFiles
from paceline.checkpoints.open import OpenedEncoder, open_model
from paceline.core.backend import BackendInfo
from paceline.core.grammar import MatcherSource
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.errors import CheckpointError, ConfigError

__all__ = ["Runner", "WorkerBackend", "load_backend", "load_encoder"]


class Runner(Protocol):
    """An executor of plans, called from the thread."""

    def run(self, plan: SchedulerOutput) -> StepResult: ...

    def constrain(self, matchers: MatcherSource, thread: Executor) -> None: ...


# runner of plans, its description, and its adapters; None: a pooled model has none
Loaded: TypeAlias = tuple[Runner, BackendInfo, ModelAdapters | None]


def _in_turn(
    turn: AbstractContextManager[Callable[[], float]],
    run: Callable[[SchedulerOutput], StepResult],
    plan: SchedulerOutput,
) -> StepResult:
    with turn as lent:
        result = run(plan)
        seconds = lent()
    return replace(result, elapsed=result.elapsed - seconds) if seconds else result


class WorkerBackend:
    """A ``core.backend.ModelBackend`` that runs plans on its own thread, of everything that runs a
    model. All of a model's work is done on that thread, loading included. Two backends in one
    process share only the machine.

    Args:
        build: called on the thread; the constructor raises what it raises.
    """

    def __init__(self, build: Callable[[], Loaded]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-model")
        self._mask_thread: ThreadPoolExecutor | None = None
        self._runner: Runner | None = None
        # None: no other engine computes on these processors
        self._turn: AbstractContextManager[Callable[[], float]] | None = None
        try:
            self._runner, self._info, self._adapters = self._executor.submit(build).result()
        except BaseException:
            self._executor.shutdown()
            raise

    @property
    def info(self) -> BackendInfo:
        return self._info

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Queue one step. Raises RuntimeError after ``close``."""
        if self._runner is None:
            raise RuntimeError("the backend is closed")
        run = self._runner.run
        if self._turn is None:
            return self._executor.submit(run, plan)
        return self._executor.submit(_in_turn, self._turn, run, plan)

    def take_turns(self, turn: AbstractContextManager[Callable[[], float]]) -> None:
        """Compute each step within ``turn``, which says how many of its seconds it lent to others
        meanwhile."""
        self._turn = turn

    def hand_over(self, wanted: int, offer: Callable[[], None], slice_s: float) -> int:
        """Call ``offer`` in steps, as ``YieldingModel.hand_over`` does; a model that computes a
        step at once never does."""
        if isinstance(self._runner, ModelRunner) and isinstance(self._runner.model, YieldingModel):
            return self._runner.model.hand_over(wanted, offer, slice_s)
        return 1

    def constrain(self, matchers: MatcherSource) -> None:
        assert self._runner is not None, "constrain() after close()"
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-masks")
        self._runner.constrain(matchers, self._mask_thread)

    def open_adapter(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> PlannedAdapter:
        """Implement ``AdapterBackend.open_adapter``. Raises CheckpointError where the model has no
        adapters."""
        if self._adapters is None:
            raise CheckpointError(f"{path}: a model that is pooled has no adapters")
        return self._adapters.open(path, max_rank, dtype, pause)

    def load_adapter(
        self, slot: int, opened: PlannedAdapter, pause: Callable[[], None]
    ) -> tuple[str, int]:
        assert self._adapters is not None, "opened without adapters"
        return self._adapters.load(slot, opened, pause)

    def drop_adapter(self, slot: int) -> None:
        if self._adapters is not None and self._runner is not None:
            # behind the plans that may name it
            self._executor.submit(self._adapters.drop, slot)

    def block_layout(self) -> tuple[int, str] | None:
        memory = self._memory()
        return None if memory is None else memory.block_layout()

    def read_blocks(self, block_ids: Sequence[int]) -> Future[bytes]:
        memory = self._memory()
        assert memory is not None, "this model's blocks cannot be copied"
        return self._executor.submit(memory.read_blocks, block_ids)

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> Future[None]:
        assert isinstance(self._runner, ModelRunner), "a pooled model's blocks are not copied"
        return self._executor.submit(self._runner.write_blocks, block_ids, data)

    def _memory(self) -> CopyableModel | None:
        """Return what copies blocks; None for a model that has none worth it, or after close."""
        return self._runner.memory if isinstance(self._runner, ModelRunner) else None

    def close(self) -> None:
        # cleared first: from now on a submitted plan is an error, while queued ones still run
        self._runner = None
        self._executor.shutdown(wait=True)
        if self._mask_thread is not None:
            self._mask_thread.shutdown()


_log = logging.getLogger(__name__)


def load_backend(
    checkpoint_path: Path,
    settings: BackendSettings,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    own_process: bool = False,
    beside: Beside = at_once,
) -> WorkerBackend:
    """Open a checkpoint and get ready to run plans.

    Args:
        checkpoint_path: a Hugging Face folder or a .gguf file.
        max_num_seqs: requests that run at once; sizes buffers, and window blocks.
        max_num_batched_tokens: tokens of a step; sizes window blocks.
        own_process: this process runs only the backend, so all its threads are bound to the nodes;
            else only the threads that compute, which exclude the caller's.
        beside: does what takes long, on any thread.

    Raises:
        CheckpointError: the model cannot be read.
        ConfigError: settings that the model or the machine does not support.
    """
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    limits = BatchLimits(max_num_seqs, max_num_batched_tokens)
    return WorkerBackend(lambda: _load(checkpoint_path, settings, limits, own_process, beside))


def _load(
    path: Path, settings: BackendSettings, limits: BatchLimits, own_process: bool, beside: Beside
) -> Loaded:
    """Load the model on the thread that will compute: open it, settle its plan, size its memory,
    read its weights."""
    started = time.monotonic()
    opened = beside(lambda: open_model(path, settings.runner, settings.convert))
    if isinstance(opened, OpenedEncoder):
        return *load_encoder(opened, settings, limits, own_process), None
    was_opened = time.monotonic()
    plan = replace(settle_plan(path, opened, settings, limits, own_process), beside=beside)
    loader = choose_loader(plan)
    draft = choose_draft(plan) if settings.drafts else None
    sizes = choose_sizes(plan, loader, draft)
    chosen = time.monotonic()
    loaded = loader.load(sizes.num_blocks, sizes.num_host_blocks, sizes.num_window_blocks)
    _log.info(
        "loaded checkpoint=%.2f choice=%.2f weights=%.2f",
        was_opened - started, chosen - was_opened, time.monotonic() - chosen,
    )  # fmt: skip
    # a head that drafts wraps the model
    copyable, drafting = loaded.model, None
    if draft is not None:
        loaded, drafting = draft.load(loaded, sizes.num_blocks)
    info = replace(
        beside(lambda: _describe(plan, loader, draft, sizes)),
        swap_block_seconds=loaded.swap_block_seconds,
    )
    if plan.pooling is not None:
        assert isinstance(loaded.model, HiddenModel)
        dimensions = settings.matryoshka_dimensions
        return *make_runner(loaded.model, plan.pooling, plan.checkpoint, dimensions, info), None
    runner = ModelRunner(
        loaded,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=plan.max_model_len,
        draft=drafting,
    )
    if isinstance(copyable, CopyableModel):
        runner.memory = copyable
    adapters = None
    if loaded.make_adapter is not None:
        config = plan.checkpoint.config
        adapters = ModelAdapters(config, loaded.make_adapter, runner.adapters, info.dtype)
    return runner, info, adapters


def _describe_weights(plan: LoadPlan) -> str:
    """Return, for the ready line, how the matrices of a file of few bits are kept, and what few
    bits of a file that has more cost."""
    formats, checkpoint = plan.formats, plan.checkpoint
    kinds = Kinds()
    if formats.compute == "native":
        kinds = choose_kinds(checkpoint, formats.dtype)
    folder = checkpoint.quantisation if isinstance(checkpoint, HFCheckpoint) else ""
    if folder:
        in_bits = "as blocks of Q4_1" if kinds.numbers else f"decoded to {formats.dtype}"
        folder = f"{folder} {in_bits}"
    rounded = ""
    stored = checkpoint.config.stored_dtype
    if formats.dtype == "q4" and stored in ("float16", "bfloat16", "float32"):
        path = checkpoint.path
        # a folder's name may have a point in it, as in Qwen2.5
        name = path.name if path.is_dir() else path.stem
        rounded = (
            f"q4 rounds each weight of a file in {stored} by itself, and "
            "answers differ far more than the accuracy gate allows (KL of 0.3 nats a token on a "
            f"model of 135M): paceline quantize {path} -o {name}-q4.gguf makes 4 bits that "
            "lose a fraction of that (docs/understand/accuracy.md)"
        )
    return "; ".join(filter(None, (folder, kinds.note, rounded)))


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
        raise ConfigError(
            "speculative_config: a pooling model generates no tokens, so none can be drafted"
        )
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
