"""llama.cpp next to ``paceline quantize``: whether it reads the file as we do, and serves it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.client import exchange
from benchmarks.common.processes import Unavailable, free_port
from benchmarks.common.server import ReadyServer
from benchmarks.common.setup import Places
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.quality import TEXTS, TOKENS, distance
from paceline.checkpoints.hub.resolve import default_cache_dir
from paceline.quantize.check import Figures

__all__ = ["asked_of_server", "llama_cpp", "read_by_peer"]

# its server's line once the model is loaded
_LISTENS: Final = r"llama_server: listening on http://127\.0\.0\.1:(\d+)"
# within which it loads a model, and answers
_PATIENCE: Final = 300.0


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


def asked_of_server(peer: LlamaCpp, model: Path, question: str, log: Path) -> str:
    """Return what llama.cpp's server says to a question at temperature 0, through the chat template
    of the file. Raises Unavailable where it does not start or answer."""
    argv = peer.server_of(model, free_port()).argv
    body = {
        "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32,
    }  # fmt: skip

    async def ask(port: int) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(_PATIENCE), exchange(port, "/v1/chat/completions", body) as answer
        ):  # fmt: skip
            return answer.status, await answer.body()

    with ReadyServer(argv, _LISTENS, log, seconds=_PATIENCE) as server:
        status, found = asyncio.run(ask(server.port))
    if status != 200:
        raise Unavailable(f"llama-server answers {status}: {found[:200]!r}")
    text: str = json.loads(found)["choices"][0]["message"]["content"]
    if not text.strip():
        raise Unavailable("llama-server answers with no text")
    return text
