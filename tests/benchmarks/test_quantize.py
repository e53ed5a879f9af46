from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.common.processes import Command, Unavailable
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.quantize import memory, speed
from benchmarks.quantize.__main__ import killed_at_half
from benchmarks.quantize.memory import Used, memory_of_shape, run_alone, write_layer
from benchmarks.quantize.peer import asked_of_server, read_by_peer
from benchmarks.quantize.speed import speed_ratio
from benchmarks.quantize.starts import starts
from paceline.backends.native import unavailable_reason
from paceline.checkpoints.open import open_checkpoint
from paceline.cli.main import main
from paceline.quantize.check import REFERENCE, build, forward_of
from tests.backends.torch.models import VOCAB, save_model
from tests.quantize.test_folder import folder_of, written

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


# answers with what it was asked, once it is said to listen
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][0]["content"]
        self.send_response(400 if text == "bad" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(f"0.08 I srv  llama_server: listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


class ServingPeer:
    def server_of(self, model: Path, port: int) -> Command:
        return Command((sys.executable, "-c", SERVER, str(port)))


@pytest.mark.parametrize(
    ("question", "why"), [("Why?", ""), ("bad", "answers 400"), (" ", "no text")]
)
def test_a_peers_server_is_asked(tmp_path: Path, question: str, why: str) -> None:
    ask = partial(asked_of_server, cast(LlamaCpp, ServingPeer()), tmp_path, question)
    if not why:
        assert ask(tmp_path / "log") == question
        return
    with pytest.raises(Unavailable, match=why):
        ask(tmp_path / "log")


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


def test_one_layer_of_a_wide_model_is_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(command: Sequence[str], *, quiet: bool = False) -> Used:
        """Run what a command would, in this process, which has imported it."""
        if command[1] == "-c":
            exec(command[2], {})
            return Used(0.0, 90)
        assert command[1:3] == ("-m", "paceline.cli.main") and main(list(command[3:])) == 0
        return Used(0.0, 200)

    source = written(folder_of(tmp_path / "model"))
    monkeypatch.setattr(memory, "write_layer", partial(write_layer, width=64, inner=96, heads=2))
    monkeypatch.setattr(memory, "run_alone", here)
    assert memory_of_shape(source, tmp_path) == {"peak_mb": 200, "imports_mb": 90}
    config = open_checkpoint(tmp_path / "one-layer-q4.gguf").config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (1, 64, 96)


def test_the_memory_of_a_command_is_its_own() -> None:
    """Without this process's, which has imported PyTorch."""
    empty, full = (
        run_alone((sys.executable, "-c", f"bytes(range(256)) * ({size} << 12)")).peak_mb
        for size in (0, 64)
    )
    assert 0 < empty < 60 and 60 < full - empty < 70
    with pytest.raises(subprocess.CalledProcessError):
        run_alone((sys.executable, "-c", "raise SystemExit(3)"))


@pytest.mark.thorough
# the command next to the server has the lowest priority
@pytest.mark.timeout(600)
def test_starts_of_a_model_in_sixteen_bits(tmp_path: Path) -> None:
    found = starts(folder_of(tmp_path / "model"), tmp_path, ("--threads", "1"))
    assert "rounds each weight of a file in float32 by itself" in str(found["alone"]["ready"])
    assert "int8 for now" in str(found["first"]["ready"])
    assert "weights are the four bits" in str(found["second"]["ready"])
    assert all(float(str(start["seconds"])) > 0 for start in found.values())
