"""The simulator's benchmark: recorded vLLM runs, with and without what the others show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sim.vllm import METRICS, vllm
from tests.sim.step_times.profiles import MODEL, write_profile
from tests.sim.vllm_runs.folders import write_run


def test_runs_that_cannot_be_predicted_are_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    write_profile(profiles)
    write_run(tmp_path, name="known", model=MODEL.name)
    write_run(tmp_path, name="unheard-of", model="theirs/Unheard-of-1B")
    # a model that is known, and no profile of it
    write_run(tmp_path, name="no-profile")
    results = vllm(tmp_path, (MODEL,))
    assert set(results["vllm"]) == set(results["vllm_operators_alone"]) == {"known"}
    assert set(results["vllm"]["known"]) == {f"{name}_err" for name in METRICS}
    # no other server on its hardware was measured
    assert results["vllm_host_s"] == {"known": 0.0}
    assert set(results["vllm_left_out"]) == {"unheard-of", "no-profile"}
    printed = capsys.readouterr().out
    assert "unheard-of: left out: no shape is known" in printed
    assert "operators alone" in printed
