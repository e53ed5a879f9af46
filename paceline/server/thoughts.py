"""The contract of what tells a model's thoughts from its answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

__all__ = ["Read", "Reader"]


class Read(NamedTuple):
    """What more of the output was."""

    thoughts: str
    text: str


class Reader(Protocol):
    """One output being read, in any pieces."""

    @property
    def thinking(self) -> bool:
        """What comes next is thoughts."""
        ...

    @property
    def ended(self) -> bool:
        """Thoughts have ended."""
        ...

    def push(self, text: str) -> Read:
        """Take in more of the output."""
        ...

    def finish(self) -> Read:
        """The output is over: what was held back."""
        ...
