"""Choices that wait for their parent's prompt."""

from __future__ import annotations

import pytest

from paceline.core.queues.waiting import Forks
from tests.driving import make_request

PARENT, OTHER = make_request("p", 4), make_request("q", 4)


def test_children_are_kept_by_parent_in_order() -> None:
    forks = Forks()
    ours = [make_request(f"p/{i}", 4, fork_of="p") for i in range(3)]
    theirs = make_request("q/0", 4, fork_of="q")
    for child in ours:
        forks.add(PARENT, child)
    forks.add(OTHER, theirs)
    assert len(forks) == 4 and list(forks) == [*ours, theirs]
    assert forks.by_parent[PARENT.request_id] == ours, "to look at"
    assert len(forks) == 4
    assert forks.take(PARENT) == ours and forks.take(PARENT) == []
    assert list(forks) == [theirs] and len(forks) == 1 and set(forks.by_parent) == {"q"}


def test_a_child_that_ends_leaves_its_siblings_and_no_empty_entry() -> None:
    forks = Forks()
    one, two = (make_request(f"p/{i}", 4, fork_of="p") for i in range(2))
    forks.add(PARENT, one)
    forks.add(PARENT, two)
    forks.remove(one)
    assert list(forks) == [two] and len(forks) == 1
    with pytest.raises(ValueError):
        forks.remove(one)
    forks.remove(two)
    assert not forks.by_parent and not len(forks), "an entry would cost plain steps the short way"
