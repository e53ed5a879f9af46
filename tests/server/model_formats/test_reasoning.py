"""Thoughts are told apart from answers, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.model_formats.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ThoughtReader,
    detect_reasoning,
)

THINK = REASONING_FORMATS["think"]
# models of which begin within thoughts, whether they write the first mark or not
OPENED = REASONING_FORMATS["deepseek_r1"]


def read(
    pieces: list[str],
    marks: ReasoningFormat = THINK,
    *,
    thinking: bool = False,
    goes_on: bool = False,
) -> tuple[str, str]:
    reader = ThoughtReader(marks, thinking=thinking, goes_on=goes_on)
    found = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return "".join(each.thoughts for each in found), "".join(each.text for each in found)


def test_thoughts_and_answer() -> None:
    assert read(["<think>\nHm. \n\n</think>\n\nYes.\n"]) == ("Hm.", "Yes.\n")
    assert read(["Hm.</think>Yes."], thinking=True) == ("Hm.", "Yes.")
    assert read([" \n<think>Hm.</think>Yes."]) == ("Hm.", "Yes.")
    marks = REASONING_FORMATS["mistral"]
    assert read(["[THINK]a[/THINK]b"], marks) == ("a", "b")
    granite = "Here is my thought process: a Here is my response: b"
    assert read([granite], REASONING_FORMATS["granite"]) == ("a", "b")


def test_what_is_no_thought() -> None:
    assert read(["Yes."]) == ("", "Yes.")
    assert read(["  Yes."]) == ("", "  Yes.")
    assert read(["I <think> so </think>"]) == ("", "I <think> so </think>")
    assert read(["<thin"]) == ("", "<thin")
    assert read([""]) == ("", "")
    # the second pair of marks is text
    assert read(["<think>a</think>b<think>c</think>"]) == ("a", "b<think>c</think>")


def test_thoughts_that_do_not_end() -> None:
    assert read(["<think>so far </thi"]) == ("so far </thi", "")
    assert read(["so far"], thinking=True) == ("so far", "")


@given(
    thoughts=st.text("ab <>/think\n", max_size=30),
    answer=st.text("ab <>/think\n", max_size=30),
    thinking=st.booleans(),
    cuts=st.lists(st.integers(0, 90), max_size=12),
)
def test_cuts_change_nothing(thoughts: str, answer: str, thinking: bool, cuts: list[int]) -> None:
    text = f"{thoughts}</think>{answer}"
    text = text if thinking else f"<think>{text}"
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(pieces, thinking=thinking) == read([text], thinking=thinking)
    inner, _, rest = text.removeprefix("" if thinking else "<think>").partition("</think>")
    assert read([text], thinking=thinking) == (inner.strip(" \t\r\n"), rest.lstrip(" \t\r\n"))


def test_a_prompt_that_leaves_them_open() -> None:
    assert THINK.left_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.left_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.left_open("<|im_start|>assistant\n")


def test_an_answer_that_begins_within_thoughts() -> None:
    assert OPENED.left_open("<|im_start|>assistant\n")
    # thinking was turned off
    assert not OPENED.left_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    # no answer begins here
    assert not OPENED.left_open("<|im_start|>assistant\nSo", answers=False)
    for text in ("Hm.</think>Yes.", "<think>Hm.</think>Yes.", "\n<think>\nHm.\n</think>\nYes."):
        for pieces in ([text], list(text)):
            assert read(pieces, OPENED, thinking=True) == ("Hm.", "Yes.")
    assert read(["<thi"], OPENED, thinking=True) == ("<thi", "")


@pytest.mark.parametrize("marks", [THINK, OPENED])
@pytest.mark.parametrize(
    ("said", "thinks"),
    [
        ("<think>\nLet me", True),
        ("<think>", True),
        ("<think>Hm.</think>Let me", False),
        ("<think>Hm.</think>a<think>b", True),
        ("Hm.</think>", False),
        ("Let me", False),
    ],
)
def test_a_message_that_goes_on(marks: ReasoningFormat, said: str, thinks: bool) -> None:
    prompt = f"<user>What is <think>?<assistant>{said}"
    assert marks.left_open(prompt, continued=said) is thinks
    # as the template writes it, without white space around it
    assert marks.left_open(prompt, continued=f"{said}\n") is thinks


def test_a_message_that_goes_on_behind_what_the_template_opened() -> None:
    assert THINK.left_open("<assistant><think>\nLet me", continued="Let me")
    assert not THINK.left_open("<assistant><think>\n\n</think>\n\nLet me", continued="Let me")


def test_thoughts_that_go_on_keep_their_white_space() -> None:
    text = " see. </think> Yes."
    for pieces in ([text], list(text)):
        assert read(pieces, thinking=True, goes_on=True) == (" see.", "Yes.")
    assert read([" <think>"], thinking=True, goes_on=True) == (" <think>", "")


def test_by_template() -> None:
    assert detect_reasoning("{{ content.split('</think>')[-1] }}") is THINK
    assert detect_reasoning("{{ content }}") is None
    assert detect_reasoning(None) is None
    found = detect_reasoning("[/THINK]")
    assert found is not None and found.name == "mistral"
