"""Bytes by model and account, never more than there are.

A load is booked before it begins, by estimate, and settled by what the engine then takes. This
module does not know what a model is, nor where bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["Account", "Ledger", "kv_quota"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Bytes of one model."""

    # the engine's process and the model's weights; once loaded measured together, as weights
    process: int = 0
    weights: int = 0
    # KV cache when full, and host memory to swap to
    kv: int = 0
    swap: int = 0
    # most bytes of adapters
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.process + self.weights + self.kv + self.swap + self.adapters

    def by_kind(self) -> Mapping[str, int]:
        """Return the bytes by the account's name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Ledger:
    """Accounts of the models in memory.

    Args:
        memory: bytes that all of them may take together.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self._accounts: dict[str, Account] = {}

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self._accounts

    @property
    def free(self) -> int:
        return self.memory - sum(account.total for account in self._accounts.values())

    def book(self, name: str, account: Account) -> bool:
        """Open or change an account; False, and no change, where there is no room for it."""
        before = self._accounts.get(name)
        if account.total > self.free + (0 if before is None else before.total):
            return False
        self._accounts[name] = account
        return True

    def close(self, name: str) -> None:
        """Give an account's bytes back; one that is not open has none."""
        self._accounts.pop(name, None)

    def check_integrity(self) -> None:
        """Raise AssertionError where accounts exceed the memory."""
        assert self.free >= 0, f"{-self.free} bytes more are booked than there are"


def kv_quota(memory: int, fixed: int, least: int, share: float, most: int) -> int:
    """Return the bytes of a model's KV cache: what its share of the memory leaves above its
    ``fixed`` bytes, from ``least``, for one longest request, to ``most``."""
    return max(least, min(int(memory * share) - fixed, most))
