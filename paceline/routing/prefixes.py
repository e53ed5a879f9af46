"""Index of the prompt prefixes that an engine has seen, by hashes of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

__all__ = ["PREFIX_BLOCK_BYTES", "PrefixIndex", "hash_chain", "prefix_chain"]

# bytes per block: about 64 tokens of English
PREFIX_BLOCK_BYTES: Final = 256
# bytes of a prompt that are hashed, at most
_MAX_HASHED_BYTES: Final = 256 * 1024


def prefix_chain(data: bytes, salt: bytes = b"") -> list[int]:
    """Return an identity for each leading run of whole blocks of ``data``.

    Args:
        salt: separates tenants, so that one tenant's prompts do not influence another's routing.
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
    """Return an identity for each leading run of pieces, which have one each."""
    chain = []
    parent = 0
    for piece in pieces:
        parent = hash((parent, piece))
        chain.append(parent)
    return chain


class PrefixIndex:
    """Leading runs that one engine has computed.

    Args:
        memory: runs remembered; the least recently used are forgotten first.
    """

    def __init__(self, memory: int = 100_000) -> None:
        self._memory = memory
        # for reading: a choice among many engines looks at each one's
        self.runs: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.runs)

    def matched(self, chain: Sequence[int]) -> int:
        """Return how many runs of ``chain``, from the first on, it has seen."""
        seen = self.runs
        for count, run in enumerate(chain):
            if run not in seen:
                return count
        return len(chain)

    def add(self, chain: Sequence[int]) -> None:
        seen = self.runs
        # longest first, so that a partly forgotten prompt keeps its beginning
        for run in reversed(chain):
            seen[run] = None
            seen.move_to_end(run)
        while len(seen) > self._memory:
            seen.popitem(last=False)

    def clear(self) -> None:
        """Forget all runs, as the engine has restarted."""
        self.runs.clear()
