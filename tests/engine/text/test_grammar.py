"""Grammars compiled: bounded in time, stack and memory, and never the engine's end."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from paceline.backends.runner.constraint import OutputConstraint
from paceline.core.grammar import Grammar
from paceline.engine.testing import ByteTokenizer
from paceline.engine.text import grammar as module
from paceline.engine.text.grammar import GrammarCompiler
from paceline.errors import InvalidRequestError, RequestFailedError

END = ByteTokenizer.IM_END


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer)


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1}


def test_masks_follow_the_output(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab?c"))
    assert allowed(matcher.allowed()) == {ord("a")}
    matcher.consume(b"a")
    assert allowed(matcher.allowed()) == set(b"bc")
    matcher.consume(b"c")
    assert allowed(matcher.allowed()) == {END}
    matcher.consume([END])


def test_a_matcher_says_when_the_output_is_wrong(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab?c"))
    with pytest.raises(RequestFailedError, match="left its grammar"):
        matcher.consume(b"xyz")
    other = compiler.matcher(Grammar("regex", "ab?c"))
    other.consume(b"ab")
    with pytest.raises(RequestFailedError):
        other.consume([END])


def test_every_end_of_output_will_do() -> None:
    class TwoEnds(ByteTokenizer):
        @property
        def eos_token_ids(self) -> frozenset[int]:
            return frozenset({self.BOS, self.IM_END})

    matcher = GrammarCompiler(TwoEnds).matcher(Grammar("regex", "a+"))
    assert allowed(matcher.allowed()) == {ord("a")}
    matcher.consume(b"a")
    assert allowed(matcher.allowed()) == {ord("a"), ByteTokenizer.BOS, END}
    matcher.consume([END])


@pytest.mark.parametrize(
    ("drafts", "masks"),
    [
        (b"", [b"bc"]),
        (b"bcd", [b"bc", b"c", b"d", b"x"]),
        # what is not allowed, is no token, or ends the output stops it
        (b"bx", [b"bc", b"c"]),
        ([ord("b"), 10**9], [b"bc", b"c"]),
        ([ord("b"), -1], [b"bc", b"c"]),
        ([*b"cdx", END, END], [b"bc", b"d", b"x", [END]]),
    ],
)
def test_looking_ahead_leaves_the_matcher_where_it_is(
    compiler: GrammarCompiler, drafts: bytes | list[int], masks: list[bytes]
) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab?cdx"))
    matcher.consume(b"a")
    for _ in range(2):
        assert [allowed(mask) for mask in matcher.look_ahead(drafts)] == [set(m) for m in masks]
    matcher.consume(b"cdx")
    assert allowed(matcher.allowed()) == {END}


def test_what_must_follow_is_what_the_masks_leave(compiler: GrammarCompiler) -> None:
    source = json.dumps(
        {
            "type": "object",
            "properties": {"customer": {"type": "boolean"}, "quantity": {"type": "integer"}},
            "required": ["customer", "quantity"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    )
    matcher = compiler.matcher(Grammar("json_schema", source))
    total = 0
    for token in b'{"customer":true,"quantity":12}':
        forced = list(matcher.forced(32))
        total += len(forced)
        ahead = matcher.look_ahead(forced)
        assert len(ahead) == len(forced) + 1
        for token_id, mask in zip(forced, ahead, strict=False):
            assert allowed(mask) == {token_id}
        assert list(matcher.forced(2)) == forced[:2]
        matcher.consume([token])
    assert total > 100
    # the end of the output is for the model to say
    assert not matcher.forced(32) and allowed(matcher.allowed()) == {END}


def test_a_failure_behind_a_draft_is_not_one_yet(compiler: GrammarCompiler) -> None:
    constraint = OutputConstraint(compiler, Grammar("regex", "ab?c"))
    assert len(constraint.masks(b"", b"ab")) == 3
    # what fails while nobody looks is told by the next mask
    assert not constraint.forced(b"xyz", 8)
    with pytest.raises(RequestFailedError, match="left its grammar"):
        constraint.masks(b"")


HOSTILE = {
    "nested regex": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "long chain of rules": Grammar(
        "lark", "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(4000)) + '\nr4000: "c"'
    ),
    "long chain of terminals": Grammar(
        "lark", "start: R0\n" + "\n".join(f"R{i}:R{i + 1}" for i in range(4000)) + '\nR4000: "c"'
    ),
    "long chain of references": Grammar(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {
                    **{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(6000)},
                    "6000": {"type": "null"},
                },
            }
        ),
    ),
    "cycle of references": Grammar(
        "json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#"}}}'
    ),
    "left recursion": Grammar("lark", 'start: start "a" | start'),
    "repeated nothing": Grammar("lark", 'start: ("")* ("")+ start'),
    "states without end": Grammar("regex", r"(\p{L}{1,50}\W*){1,30}"),
    "every combination": Grammar(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(4)]}
                    for i in range(9)
                ]
            }
        ),
    ),
    "a deep schema": Grammar("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_an_answer(compiler: GrammarCompiler, name: str) -> None:
    """Refused or compiled: no crash, and no hang (they take milliseconds)."""
    error = compiler.prepare(HOSTILE[name]).exception(timeout=10)
    assert error is None or isinstance(error, InvalidRequestError), error
    if error is None:
        assert compiler.matcher(HOSTILE[name]).allowed()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_COMPILED", 4)
    compiler = GrammarCompiler(ByteTokenizer)
    grammars = [Grammar("regex", f"a{{{i}}}") for i in range(1, 12)]
    for grammar in grammars:
        compiler.prepare(grammar).result(10)
    assert compiler.num_compiled == 4
    # what fell out is compiled again when it is asked for
    matcher = compiler.matcher(grammars[0])
    matcher.consume(b"a")
    assert allowed(matcher.allowed()) == {END}
    compiler.close()


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    compiler.prepare(Grammar("regex", "once")).result(10)
    assert compiler.prepare(Grammar("regex", "once", "another field")).done()


def test_a_tokenizer_that_fails_fails_the_caller_only() -> None:
    calls = []

    def load() -> ByteTokenizer:
        calls.append(threading.current_thread().name)
        if len(calls) == 1:
            raise OSError("the file is gone")
        return ByteTokenizer()

    compiler = GrammarCompiler(load)
    assert isinstance(compiler.prepare(Grammar("regex", "a")).exception(10), OSError)
    assert compiler.prepare(Grammar("regex", "a")).exception(10) is None
    assert all(name.startswith("grammar") for name in calls)
    compiler.close()


def test_sizes_are_checked_at_birth() -> None:
    with pytest.raises(InvalidRequestError, match="16384 characters, this one has 20000"):
        Grammar("regex", "a" * 20_000)
    with pytest.raises(InvalidRequestError, match="not 'xml'"):
        Grammar("xml", "")


def test_a_process_ends_well_in_the_middle_of_a_compilation() -> None:
    program = """
import time
from paceline.core.grammar import Grammar
from paceline.engine.text.grammar import GrammarCompiler
from paceline.engine.testing import ByteTokenizer

compiler = GrammarCompiler(ByteTokenizer)
compiler.prepare(Grammar("lark", 'start: "a"', "x")).result(10)
slow = compiler.prepare(Grammar("lark", 'start: %json {"multipleOf": 99991, "maximum": 9}', "x"))
class Late:
    # takes its time when the interpreter has gone too far to let a thread come back
    def __del__(self, sleep=time.sleep):
        sleep(2.0)


late = Late()
while not slow.running():
    time.sleep(0.001)
time.sleep(0.02)
assert not slow.done()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
