"""Plans by arithmetic, against published numbers and against brute force."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sim.plan.batching import estimate_batching, expected_longest
from paceline.sim.plan.memory import PRESETS, plan_memory
from paceline.sim.plan.models import find_model
from tests.backends.torch.models import save_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # as the models' pages state them
        ("smollm2-135m", 0.1345),
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
        ("mistral-7b-v0.3", 7.248),
        ("qwen2.5-7b", 7.616),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
    ],
)
def test_cards_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert find_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_checkpoint_with_experts_has_all_their_parameters(tmp_path: Path) -> None:
    model = save_model(tmp_path, "mixtral")
    # norms, which plans leave out, are under 1 % even of a model so small
    parameters = find_model(str(tmp_path)).num_parameters
    assert parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=1e-2)


def test_kv_bytes() -> None:
    # 128 KiB for grouped queries, 512 KiB where every head has its own
    assert find_model("llama-3.1-8b").kv_bytes_per_token() == 128 * 1024
    assert find_model("llama-2-7b").kv_bytes_per_token() == 512 * 1024
    assert find_model("llama-3.1-8b").kv_bytes_per_token(1.0) == 64 * 1024


def test_unknown_models_are_refused() -> None:
    assert find_model("Llama-3.1-8B") == find_model("meta-llama/Llama-3.1-8B")
    with pytest.raises(ConfigError, match="neither a checkpoint nor a known model; known are"):
        find_model("gpt-9")


def test_the_textbook_exercise() -> None:
    """80 GB - 40 GB of weights = 40 GB; 2048 tokens of 1.08 MB are 2.2 GB: 18 of those."""
    preset = PRESETS["80gb-40gb"]
    plan = plan_memory(
        memory_bytes=preset.memory_bytes,
        weight_bytes=preset.weight_bytes,
        kv_bytes_per_token=preset.kv_bytes_per_token,
        max_len=preset.max_len,
        mean_len=preset.mean_len,
        utilization=preset.utilization,
    )
    assert plan.kv_bytes == 40e9
    assert plan.preallocated == int(40e9 // (2048 * 1081344)) == 18
    assert plan.paged == pytest.approx(40e9 / (1081344 * 519.5), abs=1)
    assert plan.gain == pytest.approx(4, rel=0.05)
    assert plan.preallocated_waste == pytest.approx(0.75)
    assert plan.paged_waste == pytest.approx(0.0144, abs=1e-3)


def test_paged_waste_is_what_random_lengths_leave() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(100, 900) for _ in range(20_000)]
    held = sum(-(-length // 16) * 16 for length in lengths)
    plan = plan_memory(
        memory_bytes=1e9,
        weight_bytes=0,
        kv_bytes_per_token=1000,
        max_len=1000,
        mean_len=statistics.mean(lengths),
    )
    assert plan.paged_waste == pytest.approx(1 - sum(lengths) / held, rel=0.02)


MEMORY = {
    "memory_bytes": 10e9,
    "weight_bytes": 4e9,
    "kv_bytes_per_token": 1e6,
    "max_len": 1000,
    "mean_len": 500.0,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", 12e9),
        ("weight_bytes", 3e9),
        ("kv_bytes_per_token", 5e5),
        ("utilization", 0.95),
        ("reserve_bytes", 1e9),
        ("mean_len", 250.0),
        ("block_size", 128),
    ],
)
def test_every_number_counts(name: str, value: float) -> None:
    assert plan_memory(**MEMORY).paged != plan_memory(**(MEMORY | {name: value})).paged  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_bytes": 9.5e9}, "nothing is left .* 10.0 GB x 0.9 - 9.5 GB .* = -0.5 GB"),
        ({"max_len": 9000}, "one sequence of 9000 tokens needs 9.00 GB, but there is .* = 5.0 GB"),
        ({"mean_len": 2000}, "mean length 2000 must be between 1 and the longest, 1000"),
        ({"utilization": 1.5}, "utilization must be in"),
        ({"block_size": 0}, "block size must be at least 1, got 0"),
        ({"kv_bytes_per_token": 0}, "must be positive"),
    ],
)
def test_impossible_budgets_say_the_numbers(change: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_memory(**(MEMORY | change))  # type: ignore[arg-type]


def test_expected_longest_is_the_mean_of_maxima() -> None:
    rng = random.Random(3)
    lengths = [rng.randint(1, 500) for _ in range(60)]
    maxima = [max(rng.choice(lengths) for _ in range(8)) for _ in range(20_000)]
    assert expected_longest(lengths, 8) == pytest.approx(statistics.mean(maxima), rel=0.01)
    assert expected_longest([7], 8) == 7
    assert expected_longest(lengths, 1) == pytest.approx(statistics.mean(lengths))


def simulate(lengths: list[int], batch: int, fixed: float, row: float) -> tuple[float, float]:
    """Tokens per second of static batches, padded and dropped, step by step."""
    padded = dropped = 0.0
    for start in range(0, len(lengths), batch):
        group = lengths[start : start + batch]
        for step in range(max(group)):
            padded += fixed + row * batch
            dropped += fixed + row * sum(length > step for length in group)
    return sum(lengths) / padded, sum(lengths) / dropped


def test_static_rates_are_those_of_a_step_by_step_count() -> None:
    rng = random.Random(4)
    lengths = [rng.choice((5, 100)) for _ in range(4000)]
    estimate = estimate_batching(lengths, 8, fixed=0.02, row=0.001)
    padded, dropped = simulate(lengths, 8, 0.02, 0.001)
    assert estimate.padded == pytest.approx(padded, rel=0.01)
    assert estimate.dropped == pytest.approx(dropped, rel=0.01)
    assert estimate.continuous == pytest.approx(8 / 0.028)
    assert estimate.textbook_gain == pytest.approx(100 / 52.5, rel=0.03)
    assert 1 < estimate.gain < estimate.textbook_gain


def test_nothing_is_gained_where_nothing_differs() -> None:
    equal = estimate_batching([64] * 10, 8, fixed=0.02, row=0.001)
    assert equal.gain == pytest.approx(1.0) == equal.textbook_gain
    # all time is spent per row: a dropped row saves as much as a refilled one earns
    rows = estimate_batching([1, 100], 8, fixed=0.0, row=0.001)
    assert rows.gain == pytest.approx(1.0) and rows.textbook_gain > 1.9


def test_batches_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0, 4"):
        estimate_batching([], 4, fixed=1, row=1)
    with pytest.raises(ConfigError, match="not both 0"):
        estimate_batching([1], 4, fixed=0, row=0)
