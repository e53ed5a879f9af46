"""Requests that wait for another request's prompt: the other choices of ``n > 1``.

A fork is unready until its parent's prompt is computed; then it shares the parent's blocks. If the
parent ends before that, the fork becomes a request of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from paceline.core.request import Request

__all__ = ["Forks"]


class Forks:
    """Unready forks by their parent's id."""

    def __init__(self) -> None:
        # public, because it is empty in most steps and a plain step should not pay for a call
        self.by_parent: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_parent.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.by_parent.values())

    def add(self, parent: Request, child: Request) -> None:
        self.by_parent.setdefault(parent.request_id, []).append(child)

    def take(self, parent: Request) -> list[Request]:
        """Take out all forks that wait for ``parent``."""
        return self.by_parent.pop(parent.request_id, [])

    def remove(self, child: Request) -> None:
        """Take a fork out that ended while it waited."""
        assert child.asked.fork_of is not None
        siblings = self.by_parent[child.asked.fork_of]
        siblings.remove(child)
        if not siblings:
            del self.by_parent[child.asked.fork_of]
