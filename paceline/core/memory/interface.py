"""The KV cache as scheduling uses it: the scheduler plans over any object with these members.

``memory.kv_cache`` is the one for our own backends, and gives every block an id. Where another
engine owns the memory (``paceline.vllm``), an object that counts that engine's blocks stands here.

This module does not know where blocks come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from paceline.core.memory.block_pool import Pool
from paceline.core.memory.host_blocks import HostBlocks
from paceline.core.memory.windows import WindowBlocks
from paceline.core.outputs import BlockCopy
from paceline.core.request import Request

__all__ = ["Extension", "KVCache"]


class Extension(NamedTuple):
    """Changes to a block table that a row needs before its step runs."""

    new_block_ids: tuple[int, ...]
    copy: BlockCopy | None


class KVCache(Protocol):
    """Block tables of requests. ``KVCacheManager`` has the contracts of the methods."""

    # tokens served from the prefix cache, and tokens looked up in it
    num_hit_tokens: int
    num_queried_tokens: int

    @property
    def block_size(self) -> int: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def host(self) -> HostBlocks: ...
    @property
    def windows(self) -> WindowBlocks | None: ...

    def num_found(self, request: Request) -> int: ...
    def num_lacking(self, request: Request) -> int: ...
    def num_missing(self, request: Request) -> int: ...
    def num_in_use(self, request: Request, without: Iterable[Request] = ()) -> int: ...
    def num_freed(self, head: Request, losers: Sequence[Request]) -> Iterator[int]: ...
    def shortfall(self, request: Request, *, beside_others: bool) -> int: ...

    def admit(self, request: Request, *, beside_others: bool) -> bool: ...
    def extend(self, request: Request, num_tokens: int) -> Extension | None: ...
    def cache_computed(self, request: Request) -> None: ...
    def fork(self, parent: Request, child: Request) -> None: ...
    def free(self, request: Request, *, forget: bool = False) -> None: ...
    def check_integrity(self, requests: Iterable[Request]) -> None: ...
