"""Swaps of several models, of each kind, by a server of null models."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import models


def test_each_kind_of_swap_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", ["null", "null"])
    monkeypatch.setattr(models, "SWAPS", 2)
    # at once in one of them, and else long enough for the process that waits for a load
    monkeypatch.setattr(models, "FLAGS", ["--packed-cache", "2GiB", "--max-num-seqs", "9"])
    callers = models.Callers()
    found = models.swaps(callers, tmp_path)
    assert set(found) == {
        "swap_s", "swap_at_once_s", "swap_packing_s", "swap_without_spare_s",
    }  # fmt: skip
    # imports of an engine take longer than its fork
    assert 0 < found["swap_packing_s"] < found["swap_without_spare_s"]
    assert callers.errors_5xx == callers.cut_short == 0
