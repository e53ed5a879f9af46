from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.backends.native import OWN_BITS, choose_kinds
from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.model.checkpoint import Checkpoint
from paceline.checkpoints.open import open_checkpoint
from paceline.errors import ConfigError
from paceline.quantize import mixed
from paceline.quantize import quantize as quantizing
from paceline.quantize.layers import LayerRounding
from paceline.quantize.mixed import KINDS, allocate, group_of, losses, share_of
from paceline.quantize.output import matrices_of
from paceline.quantize.quantize import quantize
from paceline.quantize.rounding import levels_of, round_nearest
from tests.backends.torch.models import VOCAB, save_model
from tests.checkpoints.builders import VOCAB as GGUF_VOCAB
from tests.checkpoints.builders import llama_tensors, write_gguf
from tests.quantize.test_layers import SIZES, hidden_states
from tests.quantize.test_quantize import Killed, halved

Q4, Q5, Q8 = KINDS


def test_what_is_kept_together_is_one_group() -> None:
    start = "model.layers.3"
    assert group_of(f"{start}.self_attn.v_proj.weight") == f"{start}.self_attn.q_proj.weight"
    assert group_of(f"{start}.mlp.up_proj.weight") == f"{start}.mlp.gate_proj.weight"
    assert group_of(f"{start}.mlp.down_proj.weight") == f"{start}.mlp.down_proj.weight"
    experts = {group_of(f"{start}.mlp.experts.{n}.{part}_proj.weight")
               for n in range(3) for part in ("gate", "up", "down")}  # fmt: skip
    assert experts == {f"{start}.mlp.experts"}


def test_bits_go_where_they_save_most() -> None:
    weights = {"a": 100, "b": 100, "c": 100, "d": 1000}
    costs = {"a": 8.0, "b": 1.0, "c": 0.01, "d": 8.0}
    for size in (0.6, 0.65, 0.7, 0.8, 0.9):
        kinds = allocate(costs, weights, size)
        assert share_of(kinds, weights) <= size
        # a costs what d costs and is a tenth of it; b is as large as a and c
        assert kinds["a"] >= kinds["d"] and kinds["a"] >= kinds["b"] >= kinds["c"]
    assert set(allocate(costs, weights, 1.0).values()) == {Q8}
    assert set(allocate(costs, weights, 20 / 34).values()) == {Q4}
    assert allocate(costs, weights, 0.7)["a"] == Q8


def as_stored(checkpoint: Checkpoint, group: str) -> dict[str, torch.Tensor]:
    """Return the values of a group's matrices, rounded to the nearest in 4 bits."""
    return {
        name: round_nearest(torch.from_numpy(checkpoint.tensor(name)), levels_of(Q4)).values()
        for name in matrices_of(checkpoint)
        if group_of(name) == group
    }


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_costs_are_those_of_the_model_with_one_group_rounded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, name, **SIZES)
    checkpoint = open_checkpoint(tmp_path)
    windows = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, (2, 24)))
    seen: list[tuple[int, int]] = []
    divergence = mixed._divergence

    def noting(*logs: torch.Tensor) -> float:
        # time that is left is counted from the last call
        assert len(seen) == 2
        return divergence(*logs)

    with monkeypatch.context() as patch:
        patch.setattr(mixed, "_divergence", noting)
        found = losses(
            checkpoint, windows, matrices_of(checkpoint), lambda *done: seen.append(done)
        )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert set(found) == {group_of(name) for name in matrices_of(checkpoint)}
    assert all(math.isfinite(cost) and cost > 0 for cost in found.values())
    head = torch.from_numpy(checkpoint.tensor("lm_head.weight"))
    norm = torch.from_numpy(checkpoint.tensor("model.norm.weight"))

    def answers() -> torch.Tensor:
        hidden = torch.cat([hidden_states(checkpoint, window) for window in windows])
        normed = torch.nn.functional.rms_norm(
            hidden, hidden.shape[1:], norm, checkpoint.config.rms_norm_eps
        )
        return (normed @ head.t()).log_softmax(1)

    exact = answers()
    for group in (min(found, key=lambda key: found[key]), max(found, key=lambda key: found[key])):
        changed = as_stored(checkpoint, group)
        with monkeypatch.context() as patch:
            patched(patch, checkpoint, changed)
            other = answers()
        expected = float((exact.exp() * (exact - other)).sum(1).mean())
        assert found[group] == pytest.approx(expected, rel=0.02, abs=1e-6)


def patched(
    patch: pytest.MonkeyPatch, checkpoint: Checkpoint, changed: dict[str, torch.Tensor]
) -> None:
    from paceline.backends.torch.weights import TensorReader

    get = TensorReader.get

    def rounded(self: TensorReader, name: str) -> torch.Tensor:
        return changed[name] if name in changed else get(self, name)

    patch.setattr(TensorReader, "get", rounded)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tensors=halved(llama_tensors()))


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, GGUF_VOCAB, (3, 24)))


def test_a_mixed_file(source: Path, windows: torch.Tensor) -> None:
    target = source.with_name("mixed.gguf")
    done = quantize(source, target, windows, size=0.75)
    assert 0.65 < done.size <= 0.75 and len(done.kinds) > 1
    after = open_gguf(target)
    kinds = {name: after.tensor_type(name) for name in matrices_of(after)}
    assert {kind: list(kinds.values()).count(kind.name) for kind in done.kinds} == done.kinds
    for name, kind in kinds.items():
        assert kinds[group_of(name)] == kind
    # matrices of 4 bits are served in their bits, the others as int8
    note = choose_kinds(after, OWN_BITS).note
    assert f"{done.kinds.get(Q4, 0)} Q4_1 in their own bits" in note
    before = open_gguf(source)
    for name, kind in kinds.items():
        # a step of eight bits is a seventeenth of one of four
        values = before.tensor(name)
        step = np.ptp(values.reshape(-1, 32), 1, keepdims=True) / (127 if kind == "Q8_0" else 15)
        error = np.abs(after.tensor(name) - values).reshape(-1, 32) / step
        assert np.median(error) <= 2


def test_a_larger_file_loses_less(source: Path, windows: torch.Tensor) -> None:
    lost = {}
    for size in (0.59, 0.75, 1.0):
        errors: list[float] = []
        quantize(
            source,
            source.with_name("mixed.gguf"),
            windows,
            size=size,
            progress=lambda done, layers, error, errors=errors: errors.append(error),
        )
        lost[size] = errors[-1]
    assert lost[1.0] < lost[0.75] < lost[0.59] / 4


def test_a_killed_run_measures_once(
    source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, whole = source.with_name("mixed.gguf"), source.with_name("whole.gguf")
    quantize(source, whole, windows, size=0.75)
    with monkeypatch.context() as patch:
        patch.setattr(LayerRounding, "round_layer", killed)
        with pytest.raises(Killed):
            quantize(source, target, windows, size=0.75)
    with monkeypatch.context() as patch:
        patch.setattr(quantizing, "losses", killed)
        quantize(source, target, windows, size=0.75)
    assert target.read_bytes() == whole.read_bytes()


def test_parts_with_other_kinds_do_not_count(
    source: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs may be measured again, and differ: a layer that is done keeps what it was given."""
    target, whole = source.with_name("mixed.gguf"), source.with_name("whole.gguf")
    quantize(source, whole, windows, size=0.75)

    def kill(done: int, layers: int, lost: float) -> None:
        raise Killed

    others = iter(range(1, 100))
    with monkeypatch.context() as patch:
        # the other way round
        patch.setattr(
            quantizing, "losses", lambda *of: {name: 1.0 / next(others) for name in losses(*of)}
        )
        with pytest.raises(Killed):
            quantize(source, target, windows, size=0.75, progress=kill)
    (source.parent / "mixed.gguf.parts" / "costs.json").unlink()
    assert quantize(source, target, windows, size=0.75).resumed == 0
    assert target.read_bytes() == whole.read_bytes()


def killed(*arguments: object) -> None:
    raise Killed


@pytest.mark.parametrize("size", [0.58, 1.01, float("nan")])
def test_a_size_that_no_file_has(source: Path, windows: torch.Tensor, size: float) -> None:
    with pytest.raises(ConfigError, match=r"must be from 0\.59, which is 4 bits in all .*, to 1"):
        quantize(source, source.with_name("mixed.gguf"), windows, size=size)
