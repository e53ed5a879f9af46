"""Token ids for simulated prompts: meaningless, but equal prefixes have equal tokens.

An arrival's ``prefix`` names the pieces at the start of its prompt; the rest is its own. Without a
prefix cache all prompts of one length are the same list, so a long queue costs no memory.

This module does not know time or schedulers.
"""

from __future__ import annotations

from functools import lru_cache

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival

__all__ = ["VOCABULARY", "PromptMaker"]

# ids below this are prompts' own, those above belong to shared pieces, whose identities are spread
# over equally many (Fibonacci hashing)
_HALF = 1 << 61
_SPREAD = 0x9E37_79B9_7F4A_7C15
# all ids are below this
VOCABULARY = 2 * _HALF


@lru_cache(maxsize=8192)
def _blank(length: int) -> list[int]:
    return [0] * length


class PromptMaker:
    """Maker of prompts, deterministic.

    Args:
        distinct: False where no code compares tokens (no prefix cache).
        prefix_block: tokens of one piece of ``Arrival.prefix``.
    """

    def __init__(self, *, distinct: bool, prefix_block: int = 512) -> None:
        if prefix_block < 1:
            raise ConfigError(f"prefix_block must be at least 1 token, got {prefix_block}")
        self._distinct = distinct
        self._block = prefix_block

    def tokens(self, arrival: Arrival, number: int) -> list[int]:
        """Return ``arrival.prompt_tokens`` ids, not to be changed; ``number`` identifies it."""
        length = arrival.prompt_tokens
        if not self._distinct:
            return _blank(length)
        tokens: list[int] = []
        for identity in arrival.prefix:
            if len(tokens) >= length:
                break
            first = _HALF + identity * _SPREAD % (_HALF - self._block)
            tokens += range(first, first + min(self._block, length - len(tokens)))
        first = number << 24
        tokens += range(first, first + length - len(tokens))
        return tokens
