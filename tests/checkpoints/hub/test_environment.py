"""Where the hub's files and the token are."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.checkpoints.hub.environment import hub_cache, is_offline, token

NAMES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip


def test_variables_are_read_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", "~/home")
    assert hub_cache() == tmp_path / "home" / "hub"
    assert token() is None
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_first\n")
    assert token() == "hf_first"
    (tmp_path / "other").write_text("hf_second")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "other"))
    assert token() == "hf_second"
    monkeypatch.setenv("HF_TOKEN", " hf_third\n")
    assert token() == "hf_third"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "own"))
    assert hub_cache() == tmp_path / "own"
    assert not is_offline()
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    assert is_offline()
