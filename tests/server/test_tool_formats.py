"""Calls found in text, whatever the pieces it comes in, for every format."""

from __future__ import annotations

import json
import random
import time

import pytest

from paceline.server.bodies.tool_calls import CallCollector
from paceline.server.tool_formats import TOOL_FORMATS, detect_format

# format, forced, text -> content, calls
CASES: list[tuple[str, bool, str, str, list[tuple[str, str]]]] = [
    ("hermes", False, "just text < tool", "just text < tool", []),
    (
        "hermes",
        False,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"x"}}\n</tool_call>',
        "Let me see.",
        [("f", '{"a": "}<\\"x"}')],
    ),
    (
        "hermes",
        True,
        '<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>\n'
        '<tool_call>\n{"arguments":{"b":[1,{"c":2}]},"name":"g"}\n</tool_call>',
        "",
        [("f", "{}"), ("g", '{"b":[1,{"c":2}]}')],
    ),
    ("hermes", False, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", False, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("hermes", False, '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', []),
    ("hermes", False, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", False, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("llama3_json", False, "{not json", "{not json", []),
    ("llama3_json", False, "hello {}", "hello {}", []),
    (
        "llama3_json",
        False,
        '<|python_tag|>{"name": "f", "parameters": {"q": "a;b"}}; {"name":"g","parameters":{}}',
        "",
        [("f", '{"q": "a;b"}'), ("g", "{}")],
    ),
    ("llama3_json", False, '{"answer": 42}', '{"answer": 42}', []),
    ("mistral", False, "[TOOL_ is no mark", "[TOOL_ is no mark", []),
    (
        "mistral",
        False,
        'hm[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        "hm",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    ("mistral", False, '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    (
        "mistral",
        False,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("harmony", False, "<|channel|>final is no mark", "<|channel|>final is no mark", []),
    (
        "harmony",
        False,
        'hm<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|call|>"}'
        "<|call|><|channel|>commentary to=functions.g<|message|>{}<|call|>",
        "hm",
        [("f", '{"a": "<|call|>"}'), ("g", "{}")],
    ),
    (
        "harmony",
        False,
        "<|channel|>commentary to=functions.<|message|>{}",
        "<|channel|>commentary to=functions.<|message|>{}",
        [],
    ),
    (
        "harmony",
        False,
        "<|channel|>commentary to=functions.f<|message|>none",
        "none",
        [],
    ),
    # without arguments, with something else than arguments, and more behind them
    (
        "harmony",
        False,
        "<|channel|>commentary to=functions.f<|message|><|call|>the answer",
        "the answer",
        [("f", "{}")],
    ),
    (
        "harmony",
        False,
        '<|channel|>commentary to=functions.f<|message|>\n"look up"<|call|>the answer',
        '"look up"the answer',
        [],
    ),
    (
        "harmony",
        False,
        '<|channel|>commentary to=functions.f<|message|>\n{"a": 1} junk<|call|>the answer',
        " junkthe answer",
        [("f", '{"a": 1}')],
    ),
    ("harmony", True, '{"name":"f","arguments":{"x":[]}}', "", [("f", '{"x":[]}')]),
    ("mistral", True, '[{"name":"f","arguments":{"x":[]}}]', "", [("f", '{"x":[]}')]),
]


def read(
    name: str, forced: bool, pieces: list[str], *, parallel: bool = True
) -> tuple[str, list[tuple[str, str]]]:
    collector = CallCollector(TOOL_FORMATS[name].parser(forced=forced), parallel=parallel)
    text = ""
    streamed: dict[int, tuple[str, str]] = {}
    for piece in [*pieces, ""]:
        content, deltas = collector.push(piece, last=piece == "")
        text += content
        for delta in deltas:
            known = streamed.setdefault(delta.index, (delta.name or "", ""))
            assert delta.index in streamed and (delta.name is None or known[1] == "")
            streamed[delta.index] = (known[0], known[1] + delta.arguments)
    calls = [(call.name, call.arguments) for call in collector.calls]
    assert [streamed[i] for i in sorted(streamed)] == calls
    return text, calls


@pytest.mark.parametrize(("name", "forced", "text", "content", "calls"), CASES)
def test_pieces_of_any_size_read_the_same(
    name: str, forced: bool, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(name, forced, [text]) == (content, calls)
    assert read(name, forced, list(text)) == (content, calls)
    for seed in range(5):
        rng = random.Random(seed)
        pieces, rest = [], text
        while rest:
            count = rng.randint(1, 7)
            pieces.append(rest[:count])
            rest = rest[count:]
        assert read(name, forced, pieces) == (content, calls)


def test_arguments_stream_as_they_are_written() -> None:
    collector = CallCollector(TOOL_FORMATS["hermes"].parser(forced=False), parallel=True)
    told = []
    for char in '<tool_call>{"name": "f", "arguments": {"a": 12}}</tool_call>':
        told += [delta.arguments for delta in collector.push(char, last=False)[1]]
    assert told == ["", "{", '"', "a", '"', ":", " ", "1", "2", "}"]


def test_without_parallel_calls_the_first_one_counts() -> None:
    text = "".join(f'<tool_call>{{"name":"{n}","arguments":{{}}}}</tool_call>' for n in "fg")
    assert read("hermes", False, [text], parallel=False) == ("", [("f", "{}")])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_hostile_text_takes_little_time(name: str) -> None:
    """Each takes milliseconds; what is quadratic would take minutes."""
    for text in (
        "<tool_call>" * 5000,
        "<" * 50_000,
        "[TOOL_CALLS]" * 5000,
        "[TOOL_CALLS]" + "x" * 50_000,
        '<tool_call>{"name": ' + "[" * 50_000,
        '[TOOL_CALLS][{"name":"f","arguments":' + '{"a":' * 10_000,
        "{" * 50_000,
        '{"name": "f", "parameters": "' + "\\" * 50_000,
        " \n" * 25_000,
        '{"a":1};' * 6000,
    ):
        started = time.monotonic()
        read(name, False, [text])
        read(name, False, [text[i : i + 50] for i in range(0, len(text), 50)])
        assert time.monotonic() - started < 20


def test_the_template_tells_the_format() -> None:
    assert detect_format(None).name == "hermes"
    assert detect_format("{{ messages }}").name == "hermes"
    assert detect_format("... <|python_tag|> ...").name == "llama3_json"
    assert detect_format("[AVAILABLE_TOOLS] {{ tools }}").name == "mistral"
    assert detect_format("<|start|>assistant<|channel|>").name == "harmony"
    assert json.dumps(sorted(TOOL_FORMATS)) == '["harmony", "hermes", "llama3_json", "mistral"]'
