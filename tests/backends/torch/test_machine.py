"""Devices and dtypes that PyTorch offers."""

from __future__ import annotations

import pytest
import torch

from paceline.backends.torch.machine import choose_device, choose_dtype


def test_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("float32", "cpu") is torch.float32
    assert choose_dtype("bfloat16", "cpu") is torch.bfloat16
    for avx512_bf16, amx, enabled, expected in (
        (True, False, False, torch.bfloat16),
        (False, True, True, torch.bfloat16),
        # listed by the processor, but not enabled by the system
        (False, True, False, torch.float32),
        (False, False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda v=avx512_bf16: v)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda v=amx: v)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda v=enabled: v)
        assert choose_dtype("auto", "cpu") is expected


def test_device() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected
