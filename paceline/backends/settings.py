"""What a backend that runs a model is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core.errors import ConfigError
from paceline.core.ranges import Range, outside

__all__ = ["BackendSettings"]

_RANGES: Final = {"block_size": Range(1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of one backend. Raises ConfigError for a size below 1; whatever depends on the model
    or the machine is checked by ``load_backend``."""

    # "auto", "cpu", "cuda" or "cuda:N"
    device: str = "auto"
    # of weights and activations: "auto", "float32", "bfloat16", or with native compute "int8" or
    # "q4" of the weights, or "native": each matrix in the bits that the file has
    dtype: str = "auto"
    # of the KV cache: "auto", "float32", "bfloat16" or "int8". What is not the weights' own dtype
    # needs native compute
    kv_dtype: str = "auto"
    # what computes: "torch", "native" for the C++ library on the CPU, or "auto": native where it
    # can serve the model
    compute: str = "auto"
    # level of the native kernels, a name of ``native.variants()``, such as "avx2"; None: the best
    # that runs
    isa: str | None = None
    # find the likeliest token of one or two greedy requests without reading the whole head: right
    # but for errors of more than 6 standard deviations. Native compute, int8, q4 or native weights
    screen_head: bool = False
    # bytes on disk that copies of packed weights may take, so that the next start need not pack
    # them; None: none are kept. Native compute alone
    packed_cache_bytes: int | None = None
    # a model that guesses tokens for this one to verify, a folder or a .gguf file, and its weights'
    # format; the same file is the same model, in fewer bits. Or the folder of a head that reads the
    # served model's hidden states. None: there is none
    draft_path: str | None = None
    draft_dtype: str = "auto"
    # the checkpoint's own MTP layers guess, instead of a model in ``draft_path``
    draft_mtp: bool = False
    # prompt + output tokens of one request; None: as long as the model and the KV cache allow
    max_model_len: int | None = None
    # what the model is for: "auto" by its files, "generate", or "pooling" and then what it becomes
    # if they do not say it: "embed" or "classify"; see ``checkpoints.pooling``
    runner: str = "auto"
    convert: str = "auto"
    # sizes that embeddings may be cut to, where the files do not say it; (): by the files alone
    matryoshka_dimensions: tuple[int, ...] = ()
    # tokens per KV block
    block_size: int = 16
    # the KV pool's size in blocks or at most in bytes, not both; neither: see
    # ``machine.choose_num_blocks``
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    # host memory for swapped KV blocks; None: half the KV pool's size, taken as it is used; on
    # CUDA 4 GiB at most, pinned at once
    swap_bytes: int | None = None
    # why layers with a sliding window have no window blocks, for the ready line; empty: they may
    # have some, see ``windows.choose_windows``
    without_windows: str = ""
    # processor threads; None: as many as it may use of the nodes'
    threads: int | None = None
    # the NUMA nodes to compute on: "auto", "off" for all of them, or a list such as "0-1"; see
    # ``placement.choose_placement``
    numa: str = "auto"
    # where these nodes cannot be had (any more): "auto" instead of an error
    numa_fallback: bool = False

    def __post_init__(self) -> None:
        # a list, where it came as JSON
        object.__setattr__(self, "matryoshka_dimensions", tuple(self.matryoshka_dimensions))
        for _, message in outside(self, _RANGES):
            raise ConfigError(message)

    @property
    def drafts(self) -> bool:
        """Whether a model or layers are loaded that guess."""
        return self.draft_mtp or self.draft_path is not None
