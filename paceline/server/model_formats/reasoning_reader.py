"""The interface of readers that separate a model's reasoning from its answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Read", "Reader"]


class Read(NamedTuple):
    """The next part of the output, split."""

    thoughts: str
    text: str


class Reader(Protocol):
    """Reads one output, in pieces of any size."""

    @property
    def thinking(self) -> bool:
        """Whether the model is still reasoning."""

    @property
    def ended(self) -> bool:
        """Whether the reasoning has ended."""

    def push(self, text: str) -> Read:
        """Take in more of the output; return what it adds."""

    def finish(self) -> Read:
        """Return the text held back, as the output has ended."""
