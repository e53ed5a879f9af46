"""Thoughts are told apart from answers, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ThoughtReader,
    detect_reasoning,
)

THINK = REASONING_FORMATS["think"]


def read(
    pieces: list[str], marks: ReasoningFormat = THINK, *, thinking: bool = False
) -> tuple[str, str]:
    reader = ThoughtReader(marks, thinking=thinking)
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


def test_by_template() -> None:
    assert detect_reasoning("{{ content.split('</think>')[-1] }}") is THINK
    assert detect_reasoning("{{ content }}") is None
    assert detect_reasoning(None) is None
    found = detect_reasoning("[/THINK]")
    assert found is not None and found.name == "mistral"
