"""Checkers and curves, against their definitions."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.calibrate.asking import Answers
from paceline.bench.calibrate.checkers import CheckFailedError, quality
from paceline.bench.calibrate.curves import (
    Outcomes,
    apgr,
    auroc,
    calls_saved,
    curve,
    interval,
    oracle,
)
from paceline.bench.calibrate.labels import Check, Label, read_labels
from paceline.errors import ConfigError
from tests.docs.pages import DOCS, blocks
from tests.gateway.fault_server import Step, scripted

GRADED = Step()
GOOD = "import json, sys; sys.exit(0 if json.load(sys.stdin)['answer'] == 'yes' else 1)"


@pytest.mark.parametrize(
    ("check", "text", "found"),
    [
        ({"exact": "Paris"}, " paris. ", 1.0),
        ({"exact": "Paris"}, "Paris, France", 0.0),
        ({"regex": r"\b42\b"}, "It is 42.", 1.0),
        ({"regex": r"\b42\b"}, "It is 421.", 0.0),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', 1.0),
        ({"json_schema": {"type": "object", "required": ["a"]}}, "{}", 0.0),
        ({"json_schema": {}}, "{", 0.0),
        ({"program": [sys.executable, "-c", GOOD]}, "yes", 1.0),
        ({"program": [sys.executable, "-c", GOOD]}, "no", 0.0),
    ],
)
def test_checkers(check: dict[str, Any], text: str, found: float) -> None:
    assert quality(Label(check=Check(**check), prompt="?"), text) == found


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ({"program": [sys.executable, "-c", "while True: pass"], "timeout": 0.3}, "within 0.3 s"),
        ({"program": [sys.executable, "-c", "import os; os.abort()"]}, "ended with -6, not 0 or 1"),
        ({"program": ["/no/such"]}, "/no/such cannot be run"),
        ({"judge": "http://127.0.0.1:9", "timeout": 1.0}, "the judge gave no grade: http://127"),
    ],
)
def test_a_checker_that_fails_gives_no_verdict(check: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailedError, match=words):
        quality(Label(check=Check(**check), prompt="?"), "x")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "there is no label"),
        ("{", "line 1"),
        ('{"prompt": "x", "check": {}}', "needs one of exact, .*, got none"),
        ('{"prompt": "x", "check": {"exact": "a", "regex": "b"}}', "got exact, regex"),
        ('{"check": {"exact": "a"}}', "either a prompt or messages"),
        ('{"prompt": "x", "check": {"regex": "("}}', "regex"),
        ('{"prompt": "x", "check": {"exact": "a", "timeout": 0}}', "got 0"),
        ('{"prompt": "x", "check": {"exact": "a"}, "max_tokens": 0}', "at least 1, got 0"),
        ('{"prompt": "x", "check": {"exact": "a"}, "colour": 0}', "colour"),
    ],
)
def test_bad_labels_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "labels"
    path.write_text(line)
    with pytest.raises(ConfigError, match=words):
        read_labels(path)


def test_labels_on_the_page(tmp_path: Path) -> None:
    """docs/operate/gateway.md shows a label with each kind of checker but one."""
    (block,) = [b for b in blocks(DOCS / "operate/gateway.md") if '"check": {"exact"' in b.code]
    path = tmp_path / "labels"
    path.write_text(block.code)
    arithmetic, capital, *_ = labels = read_labels(path)
    assert quality(arithmetic, "4.") == quality(capital, "It is Paris.") == 1.0
    assert quality(arithmetic, "5") == quality(capital, "It is Rome.") == 0.0
    assert [label.check.timeout for label in labels[2:]] == [5, Check().timeout]


def test_answers_outlast_a_run_that_was_killed(tmp_path: Path) -> None:
    path, label = tmp_path / "answers", Label(check=Check(exact="a"), prompt="x")
    answers = Answers(path)
    answers.add("small", label, {"a": 1})
    path.write_bytes(path.read_bytes() + b'\n["small", "half')
    Answers(path).add("large", label, {"a": 2})
    again = Answers(path)
    assert again.find("small", label) == {"a": 1} and again.find("large", label) == {"a": 2}
    assert path.stat().st_mode & 0o077 == 0


qualities = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.floats(0, 1)), min_size=2, max_size=30
)


def arrays(rows: list[tuple[bool, bool, float]]) -> tuple[Outcomes, np.ndarray]:
    small, large, scores = (np.array(each, float) for each in zip(*rows, strict=True))
    return Outcomes(small, large), scores


@given(qualities)
def test_a_curve_goes_from_one_model_to_the_other(rows: list[tuple[bool, bool, float]]) -> None:
    outcomes, scores = arrays(rows)
    line = curve(outcomes, scores)
    assert line[0] == pytest.approx(outcomes.small.mean())
    assert line[-1] == pytest.approx(outcomes.large.mean())
    ranked = sorted(zip(scores, outcomes.small, outcomes.large, strict=True), key=lambda r: r[0])
    half = len(rows) // 2
    kept = [row[2] for row in ranked[:half]] + [row[1] for row in ranked[half:]]
    assert line[half] == pytest.approx(sum(kept) / len(rows))
    # nothing is better than what knows the gains
    assert (curve(outcomes, oracle(outcomes)) >= line - 1e-9).all()
    saved = calls_saved(outcomes, scores, 0.9)
    assert line[round((1.0 - saved) * len(rows))] >= 0.9 * line[-1] - 1e-9
    if outcomes.large.mean() > outcomes.small.mean():
        best = apgr(outcomes, oracle(outcomes))
        assert best >= apgr(outcomes, scores) - 1e-9
        # there and back, a router and its reverse are as good as a random choice
        both = apgr(outcomes, np.arange(len(rows))) + apgr(outcomes, -np.arange(len(rows)))
        assert both == pytest.approx(1.0)


@given(qualities)
def test_auroc_is_the_share_of_pairs_in_order(rows: list[tuple[bool, bool, float]]) -> None:
    good, scores = [row[0] for row in rows], np.array([row[2] for row in rows])
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, is_good in zip(scores, good, strict=True) if is_good
        for b, is_other in zip(scores, good, strict=True) if not is_other
    ]  # fmt: skip
    found = auroc(good, scores)
    assert math.isnan(found) if not pairs else found == pytest.approx(np.mean(pairs))


def test_an_interval_has_its_figure_and_narrows_with_more_prompts() -> None:
    widths = []
    for count in (40, 640):
        draw = np.random.default_rng(0)
        scores = draw.random(count)
        outcomes = Outcomes((draw.random(count) < scores).astype(float), np.ones(count))
        found = interval(apgr, outcomes, scores)
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[1] < 0.5 * widths[0]


@pytest.mark.parametrize(("said", "found"), [("8/10", 0.8), ("Grade: 10.", 1.0), ("hm, 42", None)])
async def test_a_judge_grades_from_0_to_10(said: str, found: float | None) -> None:
    asked: list[Any] = []

    def grade(body: Any) -> Any:
        asked.append(body)
        return {"choices": [{"message": {"role": "assistant", "content": said}}]}

    async with scripted(GRADED, pages={"/v1/chat/completions": grade}) as engine:
        check = Check(judge=f"{engine.url}/v1", model="grader")
        label = Label(check=check, prompt="What is blue?")
        if found is None:
            with pytest.raises(CheckFailedError, match="no grade from 0 to 10, but 'hm, 42'"):
                await asyncio.to_thread(quality, label, "the sky")
        else:
            assert await asyncio.to_thread(quality, label, "the sky") == found
    assert asked[0]["model"] == "grader"
    assert "What is blue?\n\nAnswer:\nthe sky" in asked[0]["messages"][0]["content"]
