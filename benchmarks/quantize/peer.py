"""llama.cpp next to ``paceline quantize``: whether it reads the file as we do, and what its own
tools make of the same model with the same text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.setup import Places
from benchmarks.peers.llama_cpp import LlamaCpp
from paceline.checkpoints.hub.resolve import default_cache_dir
from paceline.quantize.check import CHUNK, REFERENCE, Figures, build, compare, forward_of

__all__ = ["llama_cpp", "read_by_peer"]

# texts, and tokens of each, whose logits are compared; a file of them takes 200 MB
TEXTS: Final = 4
TOKENS: Final = 256


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
    shape = (text.shape[0], text.shape[1])
    logits = peer.logits(model, text).reshape(*shape, -1)
    torch.set_num_threads(threads)
    exact = build(model, REFERENCE, threads, shape)

    def theirs(tokens: NDArray[np.int64], first: int) -> NDArray[np.float32]:
        part = logits[:, first : first + tokens.shape[1]]
        return np.array(part).reshape(-1, part.shape[-1])

    try:
        return compare(text, forward_of(exact, shape), {"": theirs}, CHUNK)[""]
    finally:
        exact.close()
