"""What is computed twice where memory is short, and which part of the scheduler saves what."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import pressure
from paceline.backends.reference.null import NullBackend
from paceline.core.policies import POLICIES


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    known = dict(POLICIES)
    results = pressure.wasted_tokens()
    assert known == POLICIES, "a policy of the benchmark's own is left behind"
    return results


@pytest.mark.thorough
def test_at_a_third_of_the_memory_little_is_computed_twice(found: dict[str, Any]) -> None:
    assert found["wasted_tokens_newest_first"] > 10_000
    assert 2 * found["wasted_tokens"] <= found["wasted_tokens_newest_first"]
    assert found["preemptions"] < found["preemptions_newest_first"]
    # what little has to go is moved, not computed again
    assert found["wasted_tokens"] == 0 or found["swapped_bytes"] > 0


@pytest.mark.thorough
def test_every_run_gives_the_tokens_of_the_roomy_one(found: dict[str, Any]) -> None:
    parts = found["parts"]
    assert found["identical_tokens"]
    assert all(row["identical_tokens"] for row in parts.values())
    # some of them had to take much back
    assert parts["without look-ahead"]["preemptions"] > 50
    assert parts["without look-ahead"]["swapped_blocks"] > 1000
    assert parts["newest first"]["preemptions"] > 50


@pytest.mark.thorough
def test_which_part_brings_what(found: dict[str, Any]) -> None:
    parts = found["parts"]
    wasted = {name: row["wasted_tokens"] for name, row in parts.items()}
    baseline = wasted["newest first"]
    # looking ahead, and moving to host memory: each does it alone
    for name in ("without swap", "without look-ahead", "newest first, with look-ahead"):
        assert 10 * wasted[name] < baseline, name
    # the choice of victims by itself is worth nothing here, and something beside the valve
    assert wasted["without look-ahead and swap"] < wasted["choice of victims alone"]
    assert wasted["without look-ahead and swap"] < baseline
    # looking ahead leaves nothing to be moved
    assert parts["without look-ahead"]["swapped_bytes"] > 0
    for name, row in parts.items():
        if name not in ("everything on", "without look-ahead"):
            assert not row["swapped_bytes"], name
        assert row["swapped_bytes"] == row["swapped_blocks"] * 16 * pressure.TOKEN_BYTES


class _Forgetful(NullBackend):
    """Moves no block."""

    def _swap(self, swaps: object) -> None:
        pass


@pytest.mark.thorough
def test_a_block_that_is_not_moved_shows_in_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = int(pressure.SHARE * pressure.NEEDED)
    options = {"num_host_blocks": tight // 2, "future_memory_check": False}
    right = pressure._run(tight, **options)
    monkeypatch.setattr(pressure, "NullBackend", _Forgetful)
    wrong = pressure._run(tight, **options)
    assert right.stats.num_swapped_in_blocks and wrong.stats.num_swapped_in_blocks
    assert right.tokens != wrong.tokens
