"""What benchmarks say of the machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from paceline.backends.native import unavailable_reason, variants
from paceline.bench import machine as module
from paceline.bench.machine import cpu_model, cpu_name, machine

ROOT = Path(__file__).parents[2]


def test_the_processor_is_named() -> None:
    text = "processor\t: 0\nmodel name\t: Some CPU: 9\nmodel name\t: another\n"
    assert cpu_name(text) == "Some CPU: 9"
    assert cpu_name("") == platform.machine()
    text += "cpu family : 26\nmodel\t: 2\nstepping: 1\nmodel\t: 3\n"
    assert cpu_model(text) == "26.2.1"
    assert cpu_model("model: 2\n") is None


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_level_clock_and_bandwidth_are_this_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    # a buffer that takes no time
    monkeypatch.setattr(module, "_BUFFER", 8 << 20)
    about = machine()
    assert about["level"] == variants()[0]
    # no processor that runs this is slower or faster, nor its memory
    assert 0.1 < about["clock_ghz"] < 10 or platform.machine() not in ("x86_64", "aarch64")
    assert 0.1 < about["read_gb_s"] < 10_000
    assert about["cores"] >= 1 and about["memory_mb"] > 100
    assert machine((0, 1, 2))["cores"] == 3
    json.dumps(about)
    monkeypatch.setenv("PACELINE_ISA", variants()[-1])
    assert machine()["level"] == variants()[-1]


def test_every_benchmark_says_what_it_was_run_on() -> None:
    """Those that print a line of JSON with their name."""
    printing = [
        path for path in (ROOT / "benchmarks").rglob("*.py") if '"bench": "' in path.read_text()
    ]
    assert len(printing) >= 16
    for path in printing:
        text = path.read_text()
        assert "from paceline.bench.machine import machine" in text, path
        assert '"machine": ' in text, path
