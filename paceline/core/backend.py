"""The seam between deciding and computing: three methods and a description.

Real engines, the null backend and tests drive the scheduler through this Protocol alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.pooling import PoolingInfo

__all__ = ["BackendInfo", "BlockMemory", "ModelBackend"]


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Capacity, formats and shapes of a loaded backend; fixed for its life."""

    # for people and logs: "null", "torch"
    name: str
    vocab_size: int
    # longest sequence the model's positions allow
    max_model_len: int
    # tokens per KV block
    block_size: int
    # blocks in the KV pool
    num_blocks: int
    # bytes of one block over all layers that do not have window blocks, keys and values
    block_bytes: int
    # how weights are kept
    dtype: str
    device: str
    # how the KV cache is kept; None: in the format of the weights
    kv_dtype: str | None = None
    # why these formats and this device were chosen, for people; "" where there was no choice
    choice: str = ""
    # the NUMA nodes that the backend is bound to, such as "0" or "0-3"; "": to none
    numa_nodes: str = ""
    # blocks of host memory to swap to
    num_host_blocks: int = 0
    # seconds to move one block to or from host memory
    swap_block_seconds: float = 0.0
    # as in ``CacheConfig``; then bytes of one window block over all layers that have them
    window: int = 0
    num_window_blocks: int = 0
    window_block_bytes: int = 0
    # the model that makes the tokens of ``Draft`` rows, for people; "": there is none
    drafter: str = ""
    # None: the model generates tokens; else it pools, and serves no other requests
    pooling: PoolingInfo | None = None


@runtime_checkable
class ModelBackend(Protocol):
    """Runs plans. ``execute`` is called from one thread, in ``step_id`` order. It may return before
    the step has run, and a caller may pass step N+1 before the result of step N is there."""

    @property
    def info(self) -> BackendInfo:
        """Capacity and shapes; valid from construction to close."""

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        """Run one step. The future fails only if the whole backend is broken; a fault of one
        request is reported in ``StepResult.errors``."""

    def close(self) -> None:
        """Free memory and threads; pending futures finish first. Idempotent."""


@runtime_checkable
class BlockMemory(Protocol):
    """Backend whose KV blocks can be copied out and in. Both methods act behind the plans that were
    passed to ``execute`` before and ahead of those passed later, so neither races with a step."""

    def block_layout(self) -> tuple[int, str] | None:
        """Return the bytes of one block, and what they depend on besides the model's files and
        ``BackendInfo``, such as the level of the kernels; None: this model's cannot be copied."""

    def read_blocks(self, block_ids: Sequence[int]) -> Future[bytes]:
        """Copy blocks out, one after the other."""

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> Future[None]:
        """Fill blocks with what ``read_blocks`` gave, here or in an equal backend."""
