"""Settings of a backend that runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.errors import ConfigError
from paceline.ranges import Range, outside

__all__ = ["BackendSettings", "BatchLimits"]

_RANGES: Final = {"block_size": Range(1), "adapter_bytes": Range(0)}


class BatchLimits(NamedTuple):
    """The scheduler's limits of one step, by which buffers and window blocks are sized."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of one backend. Raises ConfigError for a size below 1; settings that depend on the
    model or the machine are checked by ``load_backend``."""

    # "auto", "cpu", "cuda" or "cuda:N"
    device: str = "auto"
    # format of weights and activations: "auto", "float32", "bfloat16", or for the weights in native
    # compute "int8", "q4" or "gguf": each matrix in the bits that the file has
    dtype: str = "auto"
    # format of the KV cache: "auto", "float32", "bfloat16" or "int8". One other than the weights'
    # needs native compute
    kv_dtype: str = "auto"
    # compute path: "torch", "native" for the C++ library on the CPU, or "auto": native where it can
    # serve the model
    compute: str = "auto"
    # level of the native kernels, a name of ``native.variants()``, such as "avx2"; None: the best
    # that runs
    isa: str | None = None
    # bytes on disk for copies of packed weights, which save the next start from packing them; None:
    # no copies are kept. Native compute only
    packed_cache_bytes: int | None = None
    # a model that drafts tokens for this one to verify, a folder or a .gguf file, and its weights'
    # format; the served model's own file is the same model in fewer bits. Or the folder of a head
    # that reads the served model's hidden states. None: neither
    draft_path: str | None = None
    draft_dtype: str = "auto"
    # the checkpoint's own MTP layers draft, instead of a model in ``draft_path``
    draft_mtp: bool = False
    # prompt + output tokens of one request; None: as long as the model and the KV cache allow
    max_model_len: int | None = None
    # purpose of the model: "auto" by its files, "generate", or "pooling", and then the task where
    # the files do not name it: "embed" or "classify"; see ``checkpoints.heads.pooling``
    runner: str = "auto"
    convert: str = "auto"
    # sizes that embeddings may be cut to, where the files name none; (): by the files alone
    matryoshka_dimensions: tuple[int, ...] = ()
    # tokens per KV block
    block_size: int = 16
    # the KV pool's size in blocks or at most in bytes, not both; neither: see
    # ``cpu.choose_num_blocks``
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    # share of the memory that is free at start which weights and KV pool may take together; None:
    # the pool takes the compute path's share of it
    gpu_memory_utilization: float | None = None
    # bytes of host memory for swapped KV blocks; None: half the KV pool's size, taken as it is
    # used; on CUDA 4 GiB at most, pinned at once
    swap_bytes: int | None = None
    # bytes for adapters, set aside before the KV pool is sized
    adapter_bytes: int = 0
    # reason why layers with a sliding window get no window blocks, for the ready line; empty: they
    # may get some, see ``pool_sizes.choose_windows``
    without_windows: str = ""
    # processor threads; None: as many as the process may use of its nodes' processors
    threads: int | None = None
    # the NUMA nodes to compute on: "auto", "off" for all of them, or a list such as "0-1"; see
    # ``placement.choose_placement``
    numa: str = "auto"
    # take "auto", instead of an error, where these nodes are not (or no longer) available
    numa_fallback: bool = False

    def __post_init__(self) -> None:
        # JSON gives a list
        object.__setattr__(self, "matryoshka_dimensions", tuple(self.matryoshka_dimensions))
        for _, message in outside(self, _RANGES):
            raise ConfigError(message)

    @property
    def drafts(self) -> bool:
        """Tell whether a model or layers that draft are loaded."""
        return self.draft_mtp or self.draft_path is not None
