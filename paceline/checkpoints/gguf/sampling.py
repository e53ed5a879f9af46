"""Sampling defaults that a GGUF file carries, under the names of generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.gguf.container import read_gguf
from paceline.checkpoints.gguf.shards import gguf_files

__all__ = ["KEYS", "sampling_keys"]

# by the field of generation_config.json that llama.cpp's converter takes each from
KEYS: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def sampling_keys(path: Path) -> dict[str, Any]:
    """Return those that the file has. Raises CheckpointError for a malformed file."""
    metadata = read_gguf(gguf_files(path)[0]).metadata
    return {name: _as_written(metadata[key]) for name, key in KEYS.items() if key in metadata}


def _as_written(value: Any) -> Any:
    """Return 0.6 for the float32 next to it, which has seven digits at most."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
