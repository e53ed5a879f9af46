"""gpt-oss's channels, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.model_formats.reasoning import (
    REASONING_FORMATS,
    HarmonyReader,
    detect_reasoning,
)
from paceline.server.model_formats.tool_formats import TOOL_FORMATS, detect_format
from paceline.server.protocol.tool_calls import CallCollector

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
BEFORE = " to=functions.now<|channel|>commentary <|constrain|>json<|message|>"
READ = "<|channel|>commentary to=functions.now<|message|>"


def read(pieces: list[str], *, thinking: bool = False) -> tuple[str, str, HarmonyReader]:
    reader = HarmonyReader(thinking=thinking)
    found = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return (
        "".join(each.thoughts for each in found),
        "".join(each.text for each in found),
        reader,
    )


CASES = [
    (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", "Hm.", "Yes."),
    (f"{ANALYSIS}Hm.{NEXT}{ANALYSIS}So.{NEXT}{FINAL}Yes.<|return|>", "Hm.So.", "Yes."),
    (f"{FINAL}Yes.", "", "Yes."),
    # for nobody in particular
    (f"<|channel|>commentary<|message|>First.{NEXT}{FINAL}Yes.", "", "First.Yes."),
    (f'{ANALYSIS}Hm.{NEXT}{CALL}{{"a": 1}}<|call|>', "Hm.", f'{READ}{{"a": 1}}<|call|>'),
    (f'{ANALYSIS}Hm.{NEXT}{BEFORE}{{"a": 1}}', "Hm.", f'{READ}{{"a": 1}}'),
    # cut off
    (f"{ANALYSIS}Hm. <|en", "Hm. <|en", ""),
    (f"{FINAL}Yes <|", "", "Yes <|"),
    ("<|channel|>fin", "", ""),
    # not its format after all
    ("to", "", "to"),
    ("to=x hi", "", "to=x hi"),
    ("Yes.", "", "Yes."),
    ("<b>Yes</b>", "", "<b>Yes</b>"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "thoughts", "said"), CASES)
def test_channels(text: str, thoughts: str, said: str) -> None:
    for pieces in ([text], list(text)):
        found = read(pieces)
        assert found[:2] == (thoughts, said)


def test_what_is_counted_as_thoughts() -> None:
    reader = HarmonyReader(thinking=False)
    assert (reader.thinking, reader.ended) == (False, False)
    reader.push(f"{ANALYSIS}Hm")
    assert (reader.thinking, reader.ended) == (True, False)
    reader.push(f".{NEXT}{FINAL}")
    assert (reader.thinking, reader.ended) == (False, True)
    assert read([f"Hm.{NEXT}{FINAL}Yes."], thinking=True)[:2] == ("Hm.", "Yes.")


def test_a_header_without_an_end_is_text() -> None:
    assert read(["<|channel|>" + "x" * 600])[1] == "<|channel|>" + "x" * 600


@given(
    thoughts=st.text("ab <>|en\n", max_size=20),
    answer=st.text("ab <>|st\n", max_size=20),
    cuts=st.lists(st.integers(0, 120), max_size=12),
)
def test_cuts_change_nothing(thoughts: str, answer: str, cuts: list[int]) -> None:
    text = f'{ANALYSIS}{thoughts}{NEXT}{FINAL}{answer}{NEXT}{CALL}{{"a": 1}}'
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    assert read(pieces)[:2] == read([text])[:2] == (thoughts, f'{answer}{READ}{{"a": 1}}')


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_reach_the_caller(size: int) -> None:
    text = f'{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>Let me see.{NEXT}{CALL}{{"a": 1}}'
    reader = HarmonyReader(thinking=False)
    collector = CallCollector(TOOL_FORMATS["harmony"].parser(["now"]), parallel=True)
    parts = []
    for begin in range(0, len(text), size):
        parts += collector.push(reader.push(text[begin : begin + size]).text, last=False)
    parts += collector.push(reader.finish().text, last=True)
    assert "".join(part for part in parts if isinstance(part, str)) == "Let me see."
    assert [(call.name, call.arguments) for call in collector.calls] == [("now", '{"a": 1}')]


def test_a_template_of_this_family_is_known() -> None:
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' }}<|end|>"
    assert detect_reasoning(template) is REASONING_FORMATS["openai_gptoss"]
    assert detect_format(template).name == "harmony"
    # Phi-3's, which has one of the marks
    assert detect_reasoning("{{ '<|user|>' }}<|end|>") is None
