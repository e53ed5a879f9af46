from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common import chat_gate
from benchmarks.common.chat_gate import (
    FIRST,
    KEPT,
    ROUNDED,
    Answered,
    _Side,
    figures_of,
    judged,
    read_chat,
    show,
)
from benchmarks.common.questions import HELD, OPEN, QUESTIONS
from paceline.backends.native import unavailable_reason
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.quantize.check import build
from tests.quantize.test_folder import folder_of

needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"native kernels: {unavailable_reason()}"
)


def answered(index: int, *, loops: bool = False, reference: bool = False) -> Answered:
    return Answered(
        question=QUESTIONS[index],
        kl=0.08,
        agree=15,
        positions=16,
        other_first=False,
        loops=loops,
        reference_loops=reference,
    )


def test_figures_by_hand() -> None:
    answers = [answered(index) for index in range(20)]
    # of question 1, which is held back, one token was compared
    answers[1] = replace(answers[1], kl=0.5, agree=0, positions=1, other_first=True)
    found = figures_of(answers)
    assert found.kl == pytest.approx((19 * 0.08 + 0.5) / (19 * 16 + 1))
    assert found.top1 == pytest.approx(19 * 15 / (19 * 16 + 1))
    assert found.first == 1 / 20 and found.chance == 1
    result = judged(answers, ROUNDED)
    assert result["passes"] and not judged(answers, KEPT)["passes"]
    assert result["held"]["first"] == 1 / 10 and result["held"]["kl"] > result["kl"]
    assert (result["questions"], result["held"]["questions"]) == (20, 10)
    assert QUESTIONS[1] in HELD and QUESTIONS[0] in OPEN
    # one of twenty first tokens is more than 4 %
    assert not found.passes(KEPT) and found.passes(ROUNDED)


@pytest.mark.parametrize(
    ("more", "less", "chance"),
    [(4, 0, 1 / 16), (5, 0, 1 / 32), (3, 1, 5 / 16), (0, 5, 1.0), (0, 0, 1.0)],
)
def test_more_loops_by_chance(more: int, less: int, chance: float) -> None:
    answers = [answered(index, loops=True, reference=True) for index in range(7)]
    answers += [answered(index, loops=True) for index in range(more)]
    answers += [answered(index, reference=True) for index in range(less)]
    answers = [replace(each, agree=16, kl=0.0) for each in answers]
    found = figures_of(answers)
    assert found.chance == pytest.approx(chance)
    assert found.passes(KEPT) is (chance >= 0.05)
    assert found.loops.share == pytest.approx((7 + more) / len(answers))


def test_short_answers_do_not_pass_for_want_of_loops(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [answered(index) for index in range(20)]
    assert judged(answers, ROUNDED)["passes"] is True
    short = {name: judged(answers, limits, 16) for name, limits in (("a", ROUNDED), ("b", KEPT))}
    assert short["a"]["passes"] is None and short["b"]["passes"] is False
    assert short["a"]["loops"] is None and short["a"]["held"]["chance"] is None
    show(short)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[-3:] for line in lines[:2]] == [["counted", "-", "-"]] * 2
    assert "loops were not counted" in lines[2] and lines[5].strip() == "FAILS"


@needs_native
def test_formats_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, threads = folder_of(tmp_path / "model"), torch.get_num_threads()
    formats = {"same": (folder, "float32/float32"), "q4": (folder, "q4/int8")}
    monkeypatch.setattr(chat_gate, "_GROUP", 2)
    found = read_chat(folder, formats, OPEN[:3], 1, tokens=24)
    monkeypatch.setattr(chat_gate, "_GROUP", 3)
    together = read_chat(folder, formats, OPEN[:3], 1, tokens=24)
    torch.set_num_threads(threads)
    assert together == found
    same, four = figures_of(found["same"]), figures_of(found["q4"])
    assert (same.kl, same.top1, same.first, same.chance) == (0, 1, 0, 1)
    assert same.passes(KEPT)
    assert four.kl > 0 and 0.2 < four.top1 < 1
    assert [each.question for each in found["q4"]] == list(OPEN[:3])
    assert all(1 <= each.positions <= FIRST for each in found["q4"])


@needs_native
def test_answers_are_the_likeliest_tokens(tmp_path: Path) -> None:
    """Each token of an answer is the likeliest where the text before it is read at once."""
    folder, threads = folder_of(tmp_path / "model"), torch.get_num_threads()
    tokenizer, length = load_tokenizer(folder), 80
    model = build(folder, "float32/float32", 1, (3, length))
    torch.set_num_threads(threads)
    side = _Side(model, tokenizer, length)
    prompts = [tokenizer.encode(text) for text in ("a", "a longer one", "and so on")]
    answers = side.answer(prompts, 12)
    for answer, read in zip(answers, side.read(prompts, answers), strict=True):
        assert len(answer) <= 12 and read.argmax(1).tolist()[: len(answer)] == answer
    assert any(answers)
    model.close()
