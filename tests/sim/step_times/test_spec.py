"""Step times as one line of text: what ``benchmarks.sim`` validates can be asked for by name."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sim.arrival import Arrival
from paceline.sim.step_times.profile import GraphPadding, Interconnect, ProfileStepTimes
from paceline.sim.step_times.spec import open_step_times
from paceline.sim.vllm_runs.prediction import step_times
from tests.sim.step_times.profiles import MODEL, write_profile
from tests.sim.step_times.test_profile import plan
from tests.sim.vllm_runs.test_prediction import toy_run

STEPS = (plan(*[(99, 1)] * 5), plan((0, 100)), plan((0, 1500), (400, 1)))


def seconds(spec: str) -> list[float]:
    times = open_step_times(spec, models=(replace(MODEL, name="Qwen/Qwen3-0.6B"),)).times
    return [times.seconds(step) for step in STEPS]


def test_a_profile_by_name_is_the_one_that_the_benchmark_validates(tmp_path: Path) -> None:
    write_profile(tmp_path, "GPU-Toy-1B-bf16-tp2")
    run = replace(
        toy_run([Arrival(0.0, 10, 10)]),
        degree=2,
        link=Interconnect(2, 16e9, 20e-6),
        padding=GraphPadding.like_vllm(64),
    )
    validated = step_times(run, tmp_path, host_seconds=0.007)
    given = f"profile:{tmp_path},link=16,latency=20us,graphs=64,host=7ms"
    assert seconds(given) == pytest.approx([validated.seconds(step) for step in STEPS])


@pytest.mark.parametrize("option", ["link=8", "latency=1ms", "graphs=8", "host=1ms"])
def test_every_option_changes_the_times(option: str, tmp_path: Path) -> None:
    write_profile(tmp_path, "GPU-Toy-1B-bf16-tp2")
    base = f"profile:{tmp_path},GPU-Toy-1B-bf16-tp2"
    link = "" if option.startswith("link=") else ",link=16"
    assert seconds(f"{base}{link},{option}") != seconds(f"{base},link=16")


def test_a_profile_of_several_gpus_without_their_link_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path, "GPU-Toy-1B-bf16-tp2")
    with pytest.raises(ConfigError, match=r"holds no communication.*link=16,latency=20us"):
        open_step_times(f"profile:{tmp_path}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("speed=3", "'speed' is no option"),
        ("host=1ms,host=2ms", "'host' is no option, or given twice"),
        ("latency=1ms", "latency= is that of a link"),
        ("link=16", "measured for one GPU"),
        ("graphs=0", "whole number of running requests"),
        ("graphs=many", "'many' is not a number"),
        ("host=soon", "soon"),
        ("a,b", "'b' is a second prefix"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: str, message: str, tmp_path: Path) -> None:
    write_profile(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_step_times(f"profile:{tmp_path},{options}")


def test_a_model_of_a_file_can_be_named() -> None:
    with pytest.raises(ConfigError, match="no shape is known"):
        open_step_times("roofline:H100-SXM,Toy-1B")
    found = open_step_times("roofline:H100-SXM,Toy-1B", models=(MODEL,))
    assert found.kv_bytes_per_token == MODEL.kv_bytes_per_token()
    assert "Toy" in asdict(MODEL)["name"]


def test_a_profile_without_options_is_bare(tmp_path: Path) -> None:
    write_profile(tmp_path)
    bare = ProfileStepTimes(tmp_path, model=MODEL)
    assert seconds(f"profile:{tmp_path}") == pytest.approx([bare.seconds(s) for s in STEPS])
