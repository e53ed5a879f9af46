"""Operator profiles: sums by hand, interpolation, padding, links, skew, bad files."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.step_times.profile import (
    GraphPadding,
    Interconnect,
    ProfileStepTimes,
    find_profile,
    two_point,
)
from paceline.sim.step_times.tables import AttentionTable, Curve
from tests.sim.step_times.profiles import MODEL, write_profile


def plan(*rows: tuple[int, int]) -> SchedulerOutput:
    """(start, tokens) rows, all sampling."""
    made = tuple(ScheduledRow(str(i), s, n, (), True) for i, (s, n) in enumerate(rows))
    return SchedulerOutput(0, made, (), (), (), sum(n for _, n in rows))


def micros(times: ProfileStepTimes, *rows: tuple[int, int]) -> float:
    return 1e6 * times.seconds(plan(*rows))


def test_a_step_is_the_sum_of_its_operators(tmp_path: Path) -> None:
    write_profile(tmp_path)
    times = ProfileStepTimes(tmp_path, model=MODEL)
    # 8 rows of 100 keys: attention 16 + 80, dense 10 + 8, layernorm 2 * 5; twice; 7 + 100
    assert micros(times, *[(99, 1)] * 8) == pytest.approx(2 * (96 + 18 + 10) + 107)
    # a chunk of 100 after 100 tokens: attention 100 + 10
    assert micros(times, (100, 100)) == pytest.approx(2 * (110 + 110 + 10) + 107)
    # between grid points: 55 tokens lie halfway between 10 and 100
    assert micros(times, (0, 55)) == pytest.approx(2 * (55 + 65 + 10) + 107)
    # both at once
    both = 100 + 16 + 80
    assert micros(times, (0, 100), *[(99, 1)] * 8) == pytest.approx(2 * (both + 118 + 10) + 107)


def test_steps_beyond_the_table_are_extended(tmp_path: Path) -> None:
    write_profile(tmp_path)
    times = ProfileStepTimes(tmp_path, model=MODEL)
    assert micros(times, (0, 4000)) == pytest.approx(2 * (4000 + 4010 + 10) + 107)


def test_padding_links_and_host(tmp_path: Path) -> None:
    write_profile(tmp_path)
    padded = ProfileStepTimes(tmp_path, model=MODEL, padding=GraphPadding((4, 16)))
    # 5 rows cost the matrices of 16, and the attention of 5
    row = 5 * (2 + 10)
    assert micros(padded, *[(99, 1)] * 5) == pytest.approx(2 * (row + 26 + 10) + 107)
    host = ProfileStepTimes(tmp_path, model=MODEL, padding=GraphPadding((4, 16)), host_seconds=1e-3)
    # only steps that no captured graph covers
    assert micros(host, *[(99, 1)] * 5) == micros(padded, *[(99, 1)] * 5)
    assert micros(host, (0, 100)) == pytest.approx(micros(padded, (0, 100)) + 1000)
    link = Interconnect(2, bandwidth=1e9, latency=1e-5)
    write_profile(tmp_path, "Toy-tp2")
    parallel = ProfileStepTimes(tmp_path, "Toy-tp2", model=MODEL, link=link)
    # two all-reduces a layer of 2 * 100 * 1000 bytes at 1 byte/ns, and 10 us each
    alone = micros(ProfileStepTimes(tmp_path, "GPU-Toy-1B-bf16-tp1", model=MODEL), (0, 100))
    assert micros(parallel, (0, 100)) == pytest.approx(alone + 4 * (10 + 200))


def test_a_profile_of_several_gpus_needs_their_link(tmp_path: Path) -> None:
    write_profile(tmp_path, "Toy-tp2")
    with pytest.raises(ConfigError, match=r"one of 2 GPU\(s\).*give the bandwidth"):
        ProfileStepTimes(tmp_path, "Toy-tp2", model=MODEL)
    write_profile(tmp_path, "Toy-tp1")
    link = Interconnect(2, bandwidth=1e9)
    with pytest.raises(ConfigError, match=r"one of 1 GPU\(s\).*joins 2"):
        ProfileStepTimes(tmp_path, "Toy-tp1", model=MODEL, link=link)


def test_several_prompts_are_not_extended_from_noise() -> None:
    # 1 us of noise between histories of 0 and 10; the truth is 1 us for ten keys
    rows = [(100, h, 0, 0, t) for h, t in ((0, 20.0), (10, 22.0), (100, 30.0), (1000, 120.0))]
    table = AttentionTable(rows)
    # by the first cell alone it would be half of 20
    assert table.at(100, -30.0, 0, (0.0,)) == (pytest.approx(17.0),)
    # never less than half
    assert table.at(100, -150.0, 0, (0.0,)) == (10.0,)


def test_vllm_capture_sizes() -> None:
    padding = GraphPadding.like_vllm(128)
    assert [padding.padded(n) for n in (1, 3, 5, 9, 130, 256, 257)] == [1, 4, 8, 16, 136, 256, 257]
    assert GraphPadding.like_vllm(256).padded(257) == 272
    assert GraphPadding.like_vllm(8).padded(17) == 17


def test_unequal_rows_cost_more_by_alpha(tmp_path: Path) -> None:
    write_profile(tmp_path)
    times = ProfileStepTimes(tmp_path, model=MODEL)
    # three of 100 keys and one of 500: mean 200, a quarter is long, longer ones 500. Two layers
    even = micros(times, *[(199, 1)] * 4)
    uneven = micros(times, (99, 1), (99, 1), (99, 1), (499, 1))
    assert uneven == pytest.approx(even + 2 * 0.5 * 4 * (500 - 200) / 10)


def test_two_point_distribution_has_the_same_moments() -> None:
    keys = [100, 150, 150, 300, 900]
    mean, share, longer = two_point(keys)
    shorter = (mean - share * longer) / (1 - share)
    assert mean == sum(keys) / 5
    for power in (2, 3):
        ours = share * (longer - mean) ** power + (1 - share) * (shorter - mean) ** power
        theirs = sum((k - mean) ** power for k in keys) / 5
        assert ours == pytest.approx(theirs)
    assert two_point([7, 7, 7])[2] == 7.0


def test_incomplete_grids_are_used_where_they_reach() -> None:
    # chunk 20 was measured with many keys only; for few, 10 and 30 decide
    rows = [(c, 0, 1, k, float(c)) for c in (10, 30) for k in (10, 100, 1000)]
    rows += [(20, 0, 1, k, 500.0) for k in (100, 1000)]
    table = AttentionTable(rows)
    assert table.at(20, 0.0, 1, (50.0,)) == (20.0,)
    assert table.at(20, 0.0, 1, (100.0,)) == (500.0,)


def test_a_curve_never_falls_below_what_was_measured() -> None:
    curve = Curve({10: 5.0, 20: 1.0})
    assert (curve(15), curve(100), curve(0)) == (3.0, 1.0, 9.0)


def test_the_meta_file_names_the_model(tmp_path: Path) -> None:
    write_profile(tmp_path)
    assert ProfileStepTimes(tmp_path).model.name == "Qwen/Qwen3-0.6B"
    (tmp_path / "GPU-Toy-1B-bf16-meta.yaml").unlink()
    with pytest.raises(ConfigError, match="meta"):
        ProfileStepTimes(tmp_path)


def test_bad_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found: none"):
        find_profile(tmp_path)
    write_profile(tmp_path)
    write_profile(tmp_path, "Other-tp1")
    with pytest.raises(ConfigError, match="GPU-Toy-1B-bf16-tp1, Other-tp1"):
        find_profile(tmp_path)
    (tmp_path / "Other-tp1-dense.csv").write_text("layer,tokens,time_us\nmlp,1\n")
    with pytest.raises(ConfigError, match=r"Other-tp1-dense.csv:2: 2 columns, expected 3"):
        ProfileStepTimes(tmp_path, "Other-tp1", model=MODEL)
    with pytest.raises(ConfigError, match="bandwidth"):
        Interconnect(2)
