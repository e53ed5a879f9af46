"""Fixtures that every folder may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; skips where it was not pulled (``make model`` pulls it)."""
    from paceline.checkpoints.resolve import find_local

    path = find_local("smollm2-135m")
    if path is None:
        pytest.skip("the default model is not here: run `make model`")
    return path
