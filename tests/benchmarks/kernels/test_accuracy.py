from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.common.chat_gate import Answered
from benchmarks.kernels import accuracy
from benchmarks.kernels.accuracy import automatic_format
from paceline.backends.native import unavailable_reason
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.check import (
    CHUNK,
    MAX_KL,
    MAX_PERPLEXITY_RATIO,
    MIN_TOP1,
    REFERENCE,
    WINDOW,
    WINDOWS,
    Comparison,
    Expected,
    Figures,
    Forward,
    build,
    compare,
    forward_of,
    text_windows,
)
from tests.backends.torch.models import VOCAB, save_model

SHAPE = (3, 40)


def test_figures_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    comparison = Comparison()
    comparison.add(Expected(reference, torch.tensor([0, 1])), other)
    figures = comparison.figures()
    assert figures.top1 == 0.5
    assert figures.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert figures.perplexity == pytest.approx(math.exp((math.log(4) + math.log(10)) / 2))
    assert figures.perplexity_ratio == pytest.approx(math.sqrt(2))
    with pytest.raises(ValueError, match="nothing"):
        Comparison().figures()


def test_the_gate_needs_all_three() -> None:
    good = {"top1": MIN_TOP1, "kl": MAX_KL, "perplexity": 9.0}
    assert Figures(**good, perplexity_ratio=MAX_PERPLEXITY_RATIO).passes
    assert not Figures(**good, perplexity_ratio=MAX_PERPLEXITY_RATIO + 0.001).passes
    assert not Figures(**good | {"kl": MAX_KL * 1.01}, perplexity_ratio=1.0).passes
    assert not Figures(**good | {"top1": MIN_TOP1 - 0.001}, perplexity_ratio=1.0).passes
    assert not Figures(**good | {"kl": math.nan}, perplexity_ratio=1.0).passes


def test_windows_are_text_and_too_little_of_it_is_an_error() -> None:
    windows = text_windows(lambda text: [ord(letter) % 128 for letter in text], 200)
    assert windows.shape == (WINDOWS, 200)
    assert len({tuple(window) for window in windows.tolist()}) == WINDOWS
    with pytest.raises(ValueError, match=f"only 0 of {WINDOWS} topics have 10000000 tokens"):
        text_windows(lambda text: [0] * len(text), 10_000_000)


def test_every_prediction_counts_once_with_the_token_that_follows() -> None:
    """A model that is sure of token + 1 has perplexity 1 on a text that counts up."""
    windows = (np.arange(7)[None] + np.array([[0], [50]])).astype(np.int64)

    def counter(wrong_at: int | None) -> Forward:
        def forward(tokens: NDArray[np.int64], first: int) -> NDArray[np.float32]:
            logits = np.full((tokens.size, 100), -30.0, dtype=np.float32)
            for row, token in enumerate(tokens.ravel()):
                logits[row, token + (2 if token == wrong_at else 1)] = 30.0
            return logits

        return forward

    for size in (1, 3, 7):
        others = {"same": counter(None), "wrong": counter(52)}
        results = compare(windows, counter(None), others, size)
        assert results["same"].top1 == 1.0 and results["same"].kl == pytest.approx(0.0)
        assert results["same"].perplexity == pytest.approx(1.0)
        assert results["wrong"].top1 == pytest.approx(11 / 12), f"2 x 6 predictions, {size=}"
        assert results["wrong"].perplexity == pytest.approx(math.exp(60 / 12), rel=1e-3)


def test_formats_of_a_real_model_differ_from_float32_by_their_rounding(tmp_path: Path) -> None:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    save_model(tmp_path, "llama")
    windows = np.random.default_rng(0).integers(0, VOCAB, SHAPE)
    models = {
        name: build(tmp_path, name, 1, SHAPE)
        for name in (REFERENCE, "bfloat16/bfloat16", "int8/int8")
    }
    forwards = {name: forward_of(model, SHAPE) for name, model in models.items()}
    reference = forwards[REFERENCE]
    try:
        steps = compare(windows, reference, forwards, 1)
        prompts = compare(windows, reference, forwards, 16)
    finally:
        for model in models.values():
            model.close()
    for way in (steps, prompts):
        assert way[REFERENCE].top1 == 1.0 and way[REFERENCE].kl == pytest.approx(0.0, abs=1e-6)
        assert 0 < way["bfloat16/bfloat16"].kl < way["int8/int8"].kl < 0.1
        assert way["int8/int8"].perplexity_ratio == pytest.approx(1.0, abs=0.1)
    # the two ways read the same text
    assert steps[REFERENCE].perplexity == pytest.approx(prompts[REFERENCE].perplexity, rel=1e-4)


@pytest.mark.parametrize("part", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_what_auto_picks_is_near_float32_on_the_text(smollm2_path: Path, part: int) -> None:
    """The gate's KL on the first tenth of the text, or a part of it, read as prompts.

    The benchmark reads all of it, both ways, and holds top-1 and perplexity too, which so
    little text does not tell.
    """
    reason = unavailable_reason()
    name = "" if reason else automatic_format(smollm2_path)
    if reason or name == REFERENCE:
        pytest.skip(reason or "nothing is rounded on this processor")
    encode = load_tokenizer(smollm2_path).encode
    text = text_windows(encode, WINDOW)
    assert text.shape[0] * (text.shape[1] - 1) >= 4000
    windows = text[::part, :64]
    models = {kind: build(smollm2_path, kind, 1, windows.shape) for kind in (REFERENCE, name)}
    forwards = {kind: forward_of(model, windows.shape) for kind, model in models.items()}
    try:
        figures = compare(windows, forwards[REFERENCE], {name: forwards[name]}, CHUNK)[name]
    finally:
        for model in models.values():
            model.close()
    assert 0 < figures.kl <= MAX_KL, figures
    assert figures.top1 > 0.9, figures


def test_a_level_that_is_yet_to_be_judged_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats are chosen by the verdicts, and there are none before the first."""
    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    save_model(tmp_path, "llama")
    assert automatic_format(tmp_path)
    monkeypatch.setattr("paceline.backends.loading.levels._table", dict)
    assert automatic_format(tmp_path) == ""


@pytest.mark.parametrize(
    ("worst", "chat"), [(MAX_KL, None), (MAX_KL * 1.1, None), (0.0, 0.019), (0.0, 0.021)]
)
def test_one_format_that_fails_fails_the_command(
    worst: float,
    chat: float | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """q4/int8 alone, on one of two levels, and only as prompts are read; or the KL on chat of
    all."""
    built: list[str] = []

    class Model(SimpleNamespace):
        def close(self) -> None:
            built.append("closed")

    def build(path: Path, name: str, threads: int, shape: tuple[int, int], level: str) -> Model:
        built.append(f"{level} {name}")
        return Model()

    for name, value in (
        ("unavailable_reason", None), ("find_local", Path("m.gguf")), ("machine", {"cpu": "x"}),
        ("variants", ("new", "old", "portable")), ("automatic_format", "q4/int8"),
        ("forward_of", None),
        ("text_windows", np.zeros((WINDOWS, WINDOW), dtype=np.int64)),
    ):  # fmt: skip
        monkeypatch.setattr(accuracy, name, lambda *arguments, value=value: value)
    monkeypatch.setattr(
        "paceline.engine.text.tokenizer.load_tokenizer", lambda path: SimpleNamespace(encode=None)
    )

    def figures(windows: object, reference: object, others: list[str], size: int) -> object:
        fails = built[-1].startswith("old") and size > 1
        return {
            name: Figures(1.0, worst if name == "q4/int8" and fails else 0.0, 9.0, 1.0)
            for name in others
        }

    monkeypatch.setattr(accuracy, "compare", figures)
    monkeypatch.setattr(accuracy, "build", build)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def read_chat(
        path: Path, formats: dict[str, tuple[Path, str]], *rest: object, isa: str
    ) -> dict[str, list[Answered]]:
        assert isa == "new" and set(formats) == set(accuracy.FORMATS)
        assert chat is not None
        answer = Answered("q", chat * 16, 16, 16, False, False, False)
        return {name: [answer] for name in formats}

    monkeypatch.setattr(accuracy, "read_chat", read_chat)
    monkeypatch.setattr("sys.argv", ["accuracy", *(["--chat"] if chat else [])])
    assert accuracy.main() == (worst > MAX_KL or (chat or 0) > 0.02)
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["machine"]["predictions"] == WINDOWS * (WINDOW - 1) >= 4000
    # the portable level takes hours
    assert set(answer["results"]) == {"new", "old"}
    assert answer["results"]["new"]["q4/int8"]["passes"]
    assert answer["results"]["old"]["q4/int8"]["passes"] == (worst <= MAX_KL)
    assert set(answer["results"]["old"]) == set(accuracy.FORMATS)
    # float32 of the same level is what its formats are compared with
    assert f"old {REFERENCE}" in built and built.count("closed") == 2 * (1 + len(accuracy.FORMATS))
