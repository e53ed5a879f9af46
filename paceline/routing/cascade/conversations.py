"""Conversations that a large model answers from now on."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

__all__ = ["Conversations"]

# conversations remembered at most; the one not seen for longest is forgotten first
_MOST: Final = 50_000


class Conversations:
    """A conversation goes to the large model freely, and stays there: its style, and the prefix
    cache of the large engine, would be lost on the way down. Only digests are kept."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._large: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._large)

    @staticmethod
    def key(parts: Iterable[bytes]) -> bytes:
        """Return a conversation's key; ``parts``: its tenant, and what its turns have in common."""
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(b"%d:" % len(part))
            digest.update(part)
        return digest.digest()

    def is_large(self, key: bytes) -> bool:
        """Whether the large model answers it; keeps it from being forgotten."""
        if key not in self._large:
            return False
        self._large.move_to_end(key)
        return True

    def escalate(self, key: bytes) -> None:
        self._large[key] = None
        self._large.move_to_end(key)
        if len(self._large) > self._most:
            self._large.popitem(last=False)
