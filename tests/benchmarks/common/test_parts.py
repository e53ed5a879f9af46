"""The parts that a benchmark is asked for."""

from __future__ import annotations

import pytest

from benchmarks.common.parts import chosen

KNOWN = ("decisions", "vllm", "speed", "own")


def test_parts_are_checked_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARTS", "vllm,speed")
    assert chosen(KNOWN) == ("vllm", "speed")
    monkeypatch.setenv("PARTS", "")
    assert chosen(KNOWN) == KNOWN
    assert chosen(KNOWN, ("own",)) == ("own",)
    monkeypatch.setenv("PARTS", "vlm")
    with pytest.raises(SystemExit, match="2"):
        chosen(KNOWN)
    assert "decisions, vllm, speed, own, got 'vlm'" in capsys.readouterr().err
