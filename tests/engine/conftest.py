from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama of random weights."""
    # PyTorch, which most tests here do without
    from tests.backends.torch.models import save_model

    made = tmp_path_factory.mktemp("llama")
    save_model(made, "llama", hidden_size=96, intermediate_size=96, max_position_embeddings=512)
    return made
