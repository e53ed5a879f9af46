"""``load_backend`` with the settings as keywords, and PyTorch where nothing else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.backends.loading import load
from paceline.backends.loading.load import WorkerBackend
from paceline.backends.loading.settings import BackendSettings

__all__ = ["load_backend"]


def load_backend(
    folder: Path,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    own_process: bool = False,
    compute: str = "torch",
    **settings: Any,
) -> WorkerBackend:
    asked = BackendSettings(compute=compute, **settings)
    return load.load_backend(
        folder,
        asked,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        own_process=own_process,
    )
