from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.quantize import speed
from benchmarks.quantize.__main__ import killed_at_half
from benchmarks.quantize.peer import read_by_peer
from benchmarks.quantize.speed import speed_ratio
from paceline.backends.native import unavailable_reason
from paceline.quantize.check import REFERENCE, build, forward_of
from tests.backends.torch.models import VOCAB, save_model
from tests.quantize.test_folder import folder_of

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)


@pytest.fixture(scope="module")
def windows() -> NDArray[np.int64]:
    return np.random.default_rng(3).integers(0, VOCAB, (4, 240))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(path, "llama")
    return path


class Peer:
    """A peer whose logits are ours in float32, with ``noise`` added."""

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def logits(self, model: Path, windows: NDArray[np.int64]) -> NDArray[np.float32]:
        shape = (windows.shape[0], windows.shape[1])
        exact = build(model, REFERENCE, 1, shape)
        found = forward_of(exact, shape)(windows, 0).copy()
        exact.close()
        noise = np.random.default_rng(4).standard_normal(found.shape, dtype=np.float32)
        return found + np.float32(self._noise) * noise


def test_how_far_a_peers_logits_are(folder: Path, windows: NDArray[np.int64]) -> None:
    threads = torch.get_num_threads()
    same, other = (
        read_by_peer(cast(LlamaCpp, Peer(noise)), folder, windows, 1) for noise in (0.0, 0.1)
    )
    torch.set_num_threads(threads)
    assert abs(same.kl) < 1e-6 and same.top1 > 0.99
    # half the variance of the noise
    assert other.kl == pytest.approx(0.005, rel=0.2)


@pytest.mark.thorough
def test_a_run_that_is_killed_at_half_writes_the_same(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    command = [sys.executable, "-m", "paceline.cli.main", "quantize", str(folder)]
    subprocess.run([*command, "-o", str(tmp_path / "whole.gguf")], check=True)
    took = killed_at_half(folder, tmp_path / "killed.gguf", 3)
    assert min(took.values()) > 0
    assert (tmp_path / "killed.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


def test_the_faster_side(
    folder: Path, tmp_path: Path, windows: NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "large", "llama", num_hidden_layers=24)
    monkeypatch.setattr(speed, "TURNS", 3)
    small, large = folder, tmp_path / "large"
    ratio = speed_ratio(small, large, "q4/int8", windows, 1)
    assert ratio.low > 2 and ratio.median > 2
    assert speed_ratio(large, small, "q4/int8", windows, 1).median < 0.5
