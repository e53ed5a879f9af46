"""Which engine has seen how much of a prompt's beginning, by hashes of its blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

__all__ = ["PREFIX_BLOCK_BYTES", "PrefixIndex", "hash_chain", "prefix_chain"]

# a block of text: about 64 tokens of English
PREFIX_BLOCK_BYTES: Final = 256
# of a prompt; what comes behind is not looked at
_MAX_HASHED_BYTES: Final = 256 * 1024


def prefix_chain(data: bytes, salt: bytes = b"") -> list[int]:
    """An identity for each leading run of whole blocks of ``data``.

    Args:
        salt: of a tenant: what one tenant asked must not show in where another is sent.
    """
    chain = []
    running = blake2b(salt[:64], digest_size=8)
    for start in range(
        0, min(len(data), _MAX_HASHED_BYTES) - PREFIX_BLOCK_BYTES + 1, PREFIX_BLOCK_BYTES
    ):
        running.update(data[start : start + PREFIX_BLOCK_BYTES])
        chain.append(int.from_bytes(running.digest(), "little"))
    return chain


def hash_chain(pieces: Sequence[int]) -> list[int]:
    """The same of pieces that have an identity each."""
    chain = []
    parent = 0
    for piece in pieces:
        parent = hash((parent, piece))
        chain.append(parent)
    return chain


class PrefixIndex:
    """Leading runs that one engine has computed.

    Args:
        memory: runs remembered; those used longest ago are forgotten first.
    """

    def __init__(self, memory: int = 100_000) -> None:
        self._memory = memory
        self._seen: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matched(self, chain: Sequence[int]) -> int:
        """How many runs of ``chain`` it has seen, from the first on."""
        seen = self._seen
        for count, run in enumerate(chain):
            if run not in seen:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        seen = self._seen
        # the longest first, so that of a prompt that is half forgotten its beginning is left
        for run in reversed(chain):
            seen[run] = None
            seen.move_to_end(run)
        while len(seen) > self._memory:
            seen.popitem(last=False)

    def clear(self) -> None:
        """The engine began anew and holds nothing."""
        self._seen.clear()
