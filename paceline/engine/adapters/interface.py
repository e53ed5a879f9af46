"""Protocols of a backend that computes with adapters, and the limits of one engine's adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["AdapterBackend", "AdapterLimits", "OpenedAdapter"]


class OpenedAdapter(Protocol):
    """An adapter's checked header."""

    @property
    def num_bytes(self) -> int:
        """Most bytes that it takes once it is loaded."""

    @property
    def num_products(self) -> int:
        """Products for each token."""

    @property
    def max_rank(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for users."""


@runtime_checkable
class AdapterBackend(Protocol):
    """A ModelBackend that computes with adapters. Loading is called from any thread."""

    def open_adapter(
        self, path: str, max_rank: int | None, dtype: str, pause: Callable[[], None]
    ) -> OpenedAdapter:
        """Check a file's header. Calls ``pause`` after each small part of the work. Raises
        CheckpointError."""

    def load_adapter(
        self, slot: int, opened: OpenedAdapter, pause: Callable[[], None]
    ) -> tuple[str, int]:
        """Read an adapter; plans handed over from now on may name it by ``slot``. Returns the
        digest of its contents and its bytes. Calls ``pause`` after each small part of the work.
        Raises CheckpointError."""

    def drop_adapter(self, slot: int) -> None:
        """Free an adapter once the plans handed over so far have run."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of one engine's adapters."""

    # bytes of those in memory
    max_bytes: int
    # their number; None: any
    max_count: int | None = None
    # ranks of a module; None: any
    max_rank: int | None = None
    # how values are kept: "auto", "bfloat16", "float32" or "int8"
    dtype: str = "auto"
