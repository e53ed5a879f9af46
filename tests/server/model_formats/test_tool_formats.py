"""Calls found in text, whatever the pieces it comes in, for every format."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable

import pytest

from paceline.server.model_formats.tool_formats import TOOL_FORMATS, ForcedCalls, detect_format
from paceline.server.protocol.tool_calls import CallCollector

NAMES = ("f", "g")
CALL = "<|channel|>commentary to=functions."

# format, text -> content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text < tool", "just text < tool", []),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"x"}}\n</tool_call>',
        "Let me see.\n",
        [("f", '{"a": "}<\\"x"}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    # cut within its arguments, and within its end mark
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
    # the end mark was left out
    ("hermes", '<tool_call>{"name": "f"} <tool_call>{"name": "g"} So', " So", None),
    # no JSON up to the end mark: a brace that is missing, one too many, a string without an end
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>\nSo.', None, []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}}\n</tool_call>\nSo.', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>', None, []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": "y"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call>\n',
        [("g", '{"b": "y"}')],
    ),
    ("hermes", "The <tool_call> tag begins  a call.\n", None, []),
    ("hermes", 'A\n <tool_call>{"name":"f"}</tool_call>\n B ', "A\n \n B ", [("f", "{}")]),
    ("hermes", " \n", " \n", []),
    # arguments in other forms
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"b\nc\"}"}</tool_call>',
        "",
        [("f", r'{"a": "b\nc"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2", "b": [\n3]}}</tool_call>',
        "",
        [("f", '{"a": "1\\n\\t2", "b": [\n3]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "so"}</tool_call>', None, []),
    # not offered
    ("hermes", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', None, []),
    ("llama3_json", "{not json", "{not json", []),
    ("llama3_json", "hello {}", "hello {}", []),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"q": "a;b"}}; {"name":"g","parameters":{}}',
        "",
        [("f", '{"q": "a;b"}'), ("g", "{}")],
    ),
    # data whose name is a tool's, and a call with more than its arguments
    ("llama3_json", '{"name": "f", "age": 30}', None, []),
    ("llama3_json", '{"type": "function", "name": "f"}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "why": "so", "arguments": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "Alice", "parameters": {}}; more', None, []),
    ("llama3_json", "<|python_tag|>print(1); print(2)", None, []),
    ("llama3_json", 'So; {"name": "g"} then', "So;  then", [("g", "{}")]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}; {"name": "g", "parameters": {"b": 2}}',
        '{"name": "f", "parameters": {"a": 1}; ',
        [("g", '{"b": 2}')],
    ),
    ("mistral", "[TOOL_ is no mark", "[TOOL_ is no mark", []),
    ("mistral", "The mark [TOOL_CALLS] is one", None, []),
    (
        "mistral",
        'hm[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        "hm",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f"}, {"name": "g", "argum',
        ', {"name": "g", "argum',
        [("f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "h"}, {"name": "g"}] so', None, [("g", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "g"}, {"name": "h"}]', ', {"name": "h"}]', [("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]f[ARGS]null", "", [("f", "{}")]),
    ("mistral", r'[TOOL_CALLS]f[ARGS]"{\"a\": 1}"', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]h[CALL_ID]abc[ARGS]{"a": 1}', None, []),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS] none", None, []),
    ("harmony", "<|channel|>final is no mark", "<|channel|>final is no mark", []),
    (
        "harmony",
        f'hm{CALL}f <|constrain|>json<|message|>{{"a": "<|call|>"}}<|call|>'
        f"{CALL}g<|message|>{{}}<|call|>",
        "hm",
        [("f", '{"a": "<|call|>"}'), ("g", "{}")],
    ),
    ("harmony", f"{CALL}<|message|>{{}}", None, []),
    ("harmony", f"{CALL}f<|message|>none", None, []),
    ("harmony", f"{CALL}h<|message|>{{}}<|call|>", None, []),
    ("harmony", f"{CALL}f<|message|><|call|>the answer", "the answer", [("f", "{}")]),
    ("harmony", f'{CALL}f<|message|>\n"{{}}"<|end|>the answer', "the answer", [("f", "{}")]),
    ("harmony", f'{CALL}f<|message|>\n"look up"<|call|>the answer', None, []),
    ("harmony", f'{CALL}f<|message|>\n{{"a": 1}} junk<|call|>the answer', None, []),
]


def read(
    name: str, pieces: list[str], *, forced: bool = False, parallel: bool = True
) -> tuple[list[str], list[tuple[str, str]]]:
    """Runs of text between calls, and the calls."""
    parser = ForcedCalls() if forced else TOOL_FORMATS[name].parser(NAMES)
    collector = CallCollector(parser, parallel=parallel)
    texts = [""]
    streamed: list[tuple[str, str]] = []
    for place, piece in enumerate([*pieces, ""]):
        for part in collector.push(piece, last=place == len(pieces)):
            if isinstance(part, str):
                texts[-1] += part
                continue
            if part.name is not None:
                assert part.index == len(streamed)
                streamed.append((part.name, ""))
                texts.append("")
            streamed[-1] = (streamed[-1][0], streamed[-1][1] + part.arguments)
    assert streamed == [(call.name, call.arguments) for call in collector.calls]
    if not forced:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in streamed)
    return texts, streamed


def cuts(text: str, seed: int, count: int) -> list[list[str]]:
    """The text in two at every place, word by word, character by character, and at random."""
    ways = [[text[:cut], text[cut:]] for cut in range(1, len(text))]
    ways += [re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s|.", text), list(text)]
    rng = random.Random(seed)
    for _ in range(count):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_pieces_of_any_size_read_the_same(
    name: str, text: str, content: str | None, calls: list[tuple[str, str]] | None
) -> None:
    """Without ``content``: all is text but for what belongs to calls; without ``calls``: any."""
    texts, found = read(name, [text])
    assert calls is None or found == calls
    assert "".join(texts) == content if content is not None else text.startswith(texts[0])
    if content is None and not calls:
        assert texts == [text]
    for pieces in cuts(text, 1, 5):
        assert read(name, pieces) == (texts, found), pieces


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _llama(name: str, arguments: str) -> str:
    return f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}'


def _mistral(name: str, arguments: str) -> str:
    if len(arguments) % 2:
        return f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]'
    return f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{arguments}"


def _harmony(name: str, arguments: str) -> str:
    return f"{CALL}{name} <|constrain|>json<|message|>{arguments}<|call|>"


WRITTEN: dict[str, Callable[[str, str], str]] = {
    "hermes": _hermes, "llama3_json": _llama, "mistral": _mistral, "harmony": _harmony
}  # fmt: skip
# written, and as they are sent
ARGUMENTS = [
    ("{}", "{}"),
    ('{"a": 1, "b": [{"c": "}"}]}', '{"a": 1, "b": [{"c": "}"}]}'),
    ('{"say": "a \\"b\\" <c> [d] \\u00e9 é"}', '{"say": "a \\"b\\" <c> [d] \\u00e9 é"}'),
    ('{"line": "one\ntwo"}', '{"line": "one\\ntwo"}'),
    ('"{\\"a\\": true}"', '{"a": true}'),
    ("null", "{}"),
]
PROSE = ["Sure.\n", " and  then ", "a < b [c] {d}", "\n\nDone.", "é <tool [TOOL <|chan"]


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_is_no_call_is_text_however_tokens_fall(name: str, count: int) -> None:
    """Thirty transcripts of prose, marks, calls that are whole, broken and not offered."""
    rng = random.Random(name)
    write = WRITTEN[name]
    for number in range(30):
        said, texts, calls = "", [""], []
        for _ in range(rng.randint(1, 4)):
            arguments, sent = rng.choice(ARGUMENTS)
            kind = rng.choice(("prose", "call", "call", "broken", "other", "mark"))
            part = write(rng.choice(NAMES), arguments)
            if kind == "call":
                calls.append((rng.choice(NAMES), sent))
                said += write(calls[-1][0], arguments)
                texts.append("")
                continue
            if kind == "prose":
                part = rng.choice(PROSE)
            elif kind == "broken":
                part = write("f", '{"a": {"b": 1}') + " so "
            elif kind == "other":
                part = write("h", '{"a": 1}') + " so "
            else:
                part = part[: part.index("{" if "{" in part else "n")] + " as a mark "
            said += part
            texts[-1] += part
        assert read(name, [said]) == (texts, calls)
        for pieces in cuts(said, number, count):
            assert read(name, pieces) == (texts, calls), pieces


def test_white_space_between_calls_is_layout() -> None:
    said = _hermes("f", "{}")
    assert read("hermes", [f"\n{said}\n\n{said} "]) == (["", "", ""], [("f", "{}")] * 2)
    assert read("hermes", [f"{said}\nand\n{said}"])[0] == ["", "\nand\n", ""]


def test_a_call_is_sent_once_it_is_whole() -> None:
    collector = CallCollector(TOOL_FORMATS["hermes"].parser(NAMES), parallel=True)
    *most, last = _hermes("f", '{"a": 12}')
    assert not any(collector.push(char, last=False) for char in most)
    (call,) = collector.push(last, last=False)
    assert not isinstance(call, str) and (call.name, call.arguments) == ("f", '{"a": 12}')


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>\n'
            '<tool_call>\n{"arguments":{"b":[1,{"c":2}]},"name":"g"}\n</tool_call>',
            [("f", "{}"), ("g", '{"b":[1,{"c":2}]}')],
        ),
        ('{"name":"f","parameters":{"x":[]}}; {"name":"g", "parameters": {"y": "}"}}', None),
        ('[{"name":"f","arguments":{"x":[]}}, {"name":"g","arguments": {"y": "}"}}]', None),
        ('[{"name":"f","arguments":{"x":', [("f", '{"x":')]),
        ('<tool_call>{"name":"f","argum', []),
    ],
)
def test_forced_calls_come_as_they_are_written(
    text: str, calls: list[tuple[str, str]] | None
) -> None:
    wanted = [("f", '{"x":[]}'), ("g", '{"y": "}"}')] if calls is None else calls
    for pieces in ([text], *cuts(text, 2, 5)):
        texts, found = read("", pieces, forced=True)
        assert found == wanted and not any(texts)
    collector = CallCollector(ForcedCalls(), parallel=True)
    told = []
    for char in '{"name": "f", "arguments": {"a": 12}}':
        parts = collector.push(char, last=False)
        told += [part.arguments for part in parts if not isinstance(part, str)]
    assert told == ["", "{", '"', "a", '"', ":", " ", "1", "2", "}"]


def test_calls_or_an_answer_in_json() -> None:
    """Where the output is held to ``rule`` or a schema, nothing writes a mark that is a token."""
    said = {
        "hermes": _hermes("f", "{}"),
        "llama3_json": '{"name": "f", "parameters": {}}',
        "mistral": '[{"name": "f", "arguments": {}}]',
        "harmony": '{"name": "f", "arguments": {}}',
    }
    for name, form in TOOL_FORMATS.items():
        for text, calls in ((said[name], ["f"]), ('{"name": "Alice", "ok": [1]}', [])):
            collector = CallCollector(form.parser(NAMES, held=True), parallel=True)
            parts = [part for char in text for part in collector.push(char, last=False)]
            parts += collector.push("", last=True)
            assert [call.name for call in collector.calls] == calls
            content = "".join(part for part in parts if isinstance(part, str))
            assert content == ("" if calls else text)


def test_ids_that_the_model_gives() -> None:
    def ids(name: str, text: str) -> list[str]:
        collector = CallCollector(TOOL_FORMATS[name].parser(NAMES), parallel=True, short_ids=True)
        collector.push(text, last=True)
        return [call.id for call in collector.calls]

    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}") == ["abc123def"]
    assert ids("mistral", '[TOOL_CALLS][{"name": "f", "id": "x_1"}]') == ["x_1"]
    # one that was given before, or is none, is replaced
    first, second, third = ids(
        "mistral", '[TOOL_CALLS][{"name":"f","id":"a"},{"name":"f","id":"a"},{"name":"f","id":" "}]'
    )
    assert first == "a" and len({first, second, third}) == 3
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in (second, third))
    # other formats have none
    assert ids("hermes", '<tool_call>{"name": "f", "id": "call_1"}</tool_call>') != ["call_1"]


def test_without_parallel_calls_the_first_one_counts() -> None:
    text = _hermes("f", "{}") + _hermes("g", "{}") + " So."
    texts, calls = read("hermes", [text], parallel=False)
    assert "".join(texts) == " So." and calls == [("f", "{}")]


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
        '<tool_call>{"a": "' + "<tool_call>{" * 5000,
        '<tool_call>{"name": "f"} ' * 3000,
        '<tool_call>{"name": "f"}' + " junk" * 10_000,
        "[TOOL_CALLS]f[ARGS]" * 3000,
        f"{CALL}f" * 2000,
        f"{CALL}{'x' * 200} {'y' * 200}" * 100,
        f'{CALL}f<|message|>{{"a": "' * 2000,
        ';{"a' * 10_000,
    ):
        started = time.monotonic()
        read(name, [text])
        read(name, [text[i : i + 50] for i in range(0, len(text), 50)])
        assert time.monotonic() - started < 20


def test_the_template_tells_the_format() -> None:
    assert detect_format(None).name == "hermes"
    assert detect_format("{{ messages }}").name == "hermes"
    assert detect_format("... <|python_tag|> ...").name == "llama3_json"
    assert detect_format("[AVAILABLE_TOOLS] {{ tools }}").name == "mistral"
    assert detect_format("<|start|>assistant<|channel|>").name == "harmony"
    assert json.dumps(sorted(TOOL_FORMATS)) == '["harmony", "hermes", "llama3_json", "mistral"]'
