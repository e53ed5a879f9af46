from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.backends.native import unavailable_reason
from paceline.quantize import check as checking
from paceline.quantize.check import check
from tests.quantize.test_folder import folder_of, written


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)
def test_the_result_is_compared_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "WINDOWS", 2)
    monkeypatch.setattr(checking, "WINDOW", 64)
    folder, other = (folder_of(tmp_path / name, name) for name in ("llama", "qwen3"))
    threads = torch.get_num_threads()
    own, foreign = (check(folder, written(each), 1) for each in (folder, other))
    torch.set_num_threads(threads)
    assert 0 < own.kl < foreign.kl / 10
    assert own.top1 > 0.4 > foreign.top1
