"""Fixtures: a backend over a tiny random Llama, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.loading.load import WorkerBackend
from tests.backends.helpers import load_backend
from tests.backends.torch.models import save_model


def load(folder: Path, **settings: Any) -> WorkerBackend:
    """In float32 on the CPU, with few small blocks."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "kv_cache_bytes": 1 << 20,
        "max_num_seqs": 8,
        # a team of threads is of no use to models so small
        "threads": 1,
    }
    return load_backend(folder, **(defaults | settings))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def llama(llama_folder: Path) -> Iterator[WorkerBackend]:
    backend = load(llama_folder)
    yield backend
    backend.close()
