"""llama.cpp next to ``paceline quantize``: whether it reads the file as we do."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.setup import Places
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.quality import TEXTS, TOKENS, distance
from paceline.checkpoints.hub.resolve import default_cache_dir
from paceline.quantize.check import Figures

__all__ = ["llama_cpp", "read_by_peer"]


def llama_cpp(model: Path) -> LlamaCpp:
    """Return llama.cpp, built. Raises Unavailable."""
    root = Path(os.environ.get("PACELINE_PEERS") or default_cache_dir() / "peers")
    peer = LlamaCpp(Places(root, model, tuple(sorted(os.sched_getaffinity(0)))))
    peer.build()
    return peer


def read_by_peer(peer: LlamaCpp, model: Path, windows: NDArray[np.int64], threads: int) -> Figures:
    """Return how far llama.cpp's logits of a file are from ours in float32 of the same file. Raises
    Unavailable where it does not load."""
    text = np.ascontiguousarray(windows[:TEXTS, :TOKENS])
    return distance(peer.logits(model, text), model, text, threads)
