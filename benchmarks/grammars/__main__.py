"""Grammar libraries at a real vocabulary: time to compile, time per mask, and what they enforce.

Each case is a schema or regular expression with an output that matches it. The library compiles
it with a cold cache; then the output's tokens are consumed one by one and a mask is filled before
each, as a server does. "Nasty" cases are only compiled. A batch is 64 outputs of "person", each at
another position of its output; a step consumes a token and fills a mask for every one. Coverage
feeds a valid and an invalid value per keyword: a library enforces it, refuses the schema, or
accepts the invalid value.

"Validity" generates under hundreds of schemas of rising difficulty, regular expressions and
grammars (``schemas``) with choices that no model would make, and judges every output that
ends by itself with an independent validator. "At the door" is the server's answer to each keyword
of JSON Schema: held to, an annotation, or a 400; none may be passed over.

xgrammar is measured where it is importable; Paceline does not depend on it. One thread. The last
line is JSON. Ends with 1 if an output was invalid or a keyword is passed over.

    python -m benchmarks.grammars
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.grammars.outputs import generate_all
from paceline.bench.machine import machine
from paceline.checkpoints.hub.resolve import find_local
from paceline.core.grammar import Grammar
from paceline.engine.text.grammar import GrammarCompiler
from paceline.engine.text.tokenizer import HFTokenizer, load_tokenizer
from paceline.errors import PacelineError
from paceline.server.model_formats.json_schema.check import ANNOTATIONS
from paceline.server.protocol.structured import json_grammar

_BATCH = 64
_STEPS = 16
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "number"},
                "c": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            },
            "required": ["v", "c"],
            "additionalProperties": False,
        }
    },
}
CASES: dict[str, tuple[str, str, str]] = {
    "person": (
        "json_schema",
        json.dumps(PERSON),
        '{"name":"Kari Nordmann","age":42,"emails":["kari@example.com"],'
        '"address":{"city":"Oslo","zip":"0150"}}',
    ),
    "tree": (
        "json_schema",
        json.dumps(TREE),
        '{"v":1.5,"c":[{"v":2,"c":[]},{"v":3,"c":[{"v":4,"c":[]}]}]}',
    ),
    "any object": (
        "json_schema",
        '{"type":"object"}',
        '{"question":"what is it","answers":[1,2,{"deep":[true,null,"text with words in it"]}]}',
    ),
    "enum of 500": (
        "json_schema",
        json.dumps({"enum": [f"value number {i}" for i in range(500)]}),
        '"value number 321"',
    ),
    "date pattern": ("regex", r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d( \w+){3,9}", "2026-09-24 a b c d"),
}
NASTY: dict[str, tuple[str, str]] = {
    "2000 properties": (
        "json_schema",
        json.dumps(
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
        ),
    ),
    "string of 5000 to 100000": (
        "json_schema",
        '{"type":"string","minLength":5000,"maxLength":100000}',
    ),
    "multiple of 9973": ("json_schema", '{"type":"integer","multipleOf":9973}'),
    "exponential regex": ("regex", "(a|b)*a(a|b){16}"),
    "nested counts": ("regex", "(((a{1,100}){1,100}){1,100})"),
}
# keyword -> schema, a value it allows, one it does not
KEYWORDS: dict[str, tuple[Any, Any, Any]] = {
    "type": ({"type": "integer"}, 1, "x"),
    "enum": ({"enum": [1, "a"]}, "a", "b"),
    "const": ({"const": [1]}, [1], [2]),
    "minimum": ({"type": "integer", "minimum": 5}, 7, 3),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 2.5}, 2, 2.5),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 21, 22),
    "minLength": ({"type": "string", "minLength": 3}, "abc", "ab"),
    "maxLength": ({"type": "string", "maxLength": 3}, "abc", "abcd"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    "format date": ({"type": "string", "format": "date"}, "2026-01-02", "2026-13-02"),
    "minItems": ({"type": "array", "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "prefixItems": ({"prefixItems": [{"const": 1}], "type": "array"}, [1], [2]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [1], [2]),
    "required": ({"type": "object", "required": ["a"]}, {"a": 1}, {"b": 1}),
    "additionalProperties": (
        {"type": "object", "properties": {"a": True}, "additionalProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    "patternProperties": (
        {
            "type": "object",
            "patternProperties": {"^a": {"const": 1}},
            "additionalProperties": False,
        },
        {"ab": 1},
        {"ab": 2},
    ),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^a+$"}},
        {"aa": 1},
        {"ab": 1},
    ),
    "dependentRequired": (
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": 2}]}, 2, 3),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, 1, 7),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 7, 3),
    "not": ({"type": "integer", "not": {"const": 3}}, 4, 3),
    "if/then": ({"if": {"type": "integer"}, "then": {"minimum": 5}}, 7, 3),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, 1, 2),
}


# the other keywords of JSON Schema 2020-12 and of the drafts before it, each in a schema of its own
OTHER_KEYWORDS: dict[str, Any] = {
    "maxContains": {"type": "array", "maxContains": 1},
    "minContains": {"type": "array", "minContains": 1},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "additionalItems": {"type": "array", "additionalItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$anchor": {"$anchor": "a"},
    "$vocabulary": {"$vocabulary": {}},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "contentMediaType": {"type": "string", "contentMediaType": "text/html"},
    "contentSchema": {"type": "string", "contentSchema": {}},
    "unknown": {"type": "string", "minimumLength": 3},
}


class Matches(Protocol):
    """One output under a library."""

    def fill(self) -> None: ...

    def accept(self, token_id: int) -> bool: ...

    def may_end(self) -> bool: ...


# makes a matcher, or None where the library refuses
Compile = Callable[[str, str], Matches | None]


def llguidance(tokenizer: HFTokenizer) -> Compile:
    eos = min(tokenizer.eos_token_ids)

    class Match:
        def __init__(self, grammar: Grammar) -> None:
            compiler = GrammarCompiler(lambda: tokenizer)
            # the vocabulary's trie is built once per server, not per grammar
            compiler._tokenizer, compiler._ends = shared._tokenizer, shared._ends
            self._matcher = compiler.matcher(grammar)
            compiler.close()

        def fill(self) -> None:
            self._mask = self._matcher.allowed()

        def accept(self, token_id: int) -> bool:
            try:
                self._matcher.consume([token_id])
            except PacelineError:
                return False
            return True

        def may_end(self) -> bool:
            self.fill()
            return bool(self._mask[eos >> 3] >> (eos & 7) & 1)

    shared = GrammarCompiler(lambda: tokenizer)
    shared.prepare(Grammar("regex", "a")).result()

    def compiles(kind: str, source: str) -> Matches | None:
        try:
            return Match(Grammar(kind, source))
        except PacelineError:
            return None

    return compiles


def xgrammar(tokenizer: HFTokenizer) -> Compile | None:
    try:
        import xgrammar as library  # type: ignore[import-not-found]
    except ImportError:
        return None
    size = tokenizer.vocab_size
    info = library.TokenizerInfo(
        [tokenizer.token_bytes(i) for i in range(size)],
        library.VocabType.RAW,
        stop_token_ids=sorted(tokenizer.eos_token_ids),
    )

    class Match:
        def __init__(self, kind: str, source: str) -> None:
            compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            if kind == "json_schema":
                compiled = compiler.compile_json_schema(source, strict_mode=False)
            else:
                compiled = compiler.compile_regex(source)
            self._matcher = library.GrammarMatcher(compiled)
            self._mask = library.allocate_token_bitmask(1, size)

        def fill(self) -> None:
            self._matcher.fill_next_token_bitmask(self._mask, 0)

        def accept(self, token_id: int) -> bool:
            return bool(self._matcher.accept_token(token_id))

        def may_end(self) -> bool:
            return any(self._matcher.fork().accept_token(e) for e in tokenizer.eos_token_ids)

    def compiles(kind: str, source: str) -> Matches | None:
        try:
            return Match(kind, source)
        except Exception:
            # the library may raise any error for a schema that it does not accept
            return None

    return compiles


def accepts(match: Matches, tokens: list[int]) -> bool:
    return all(match.accept(token) for token in tokens) and match.may_end()


def batch_steps(compiles: Compile, tokens: list[int]) -> list[float]:
    """Return the seconds of each step of a batch."""
    kind, source, _ = CASES["person"]
    batch = []
    for place in range(_BATCH):
        match = compiles(kind, source)
        assert match is not None
        at = place % (len(tokens) - _STEPS)
        for token in tokens[:at]:
            match.accept(token)
        batch.append((match, at))
    seconds = []
    for step in range(_STEPS):
        started = time.perf_counter()
        for match, at in batch:
            match.fill()
            match.accept(tokens[at + step])
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(name: str, compiles: Compile, tokenizer: HFTokenizer) -> dict[str, Any]:
    """Print a table and return its numbers."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    print(f"\n{name}\n{'case':28s} {'compile ms':>11s} {'mask us':>9s} {'p99':>9s} {'matches':>8s}")
    result: dict[str, Any] = {}
    every: list[float] = []
    for case, (kind, source, text) in CASES.items():
        started = time.perf_counter()
        match = compiles(kind, source)
        compile_ms = 1e3 * (time.perf_counter() - started)
        if match is None:
            print(f"{case:28s} refused")
            continue
        times, valid = [], True
        for token in ids(text):
            started = time.perf_counter()
            match.fill()
            times.append(1e6 * (time.perf_counter() - started))
            valid = valid and match.accept(token)
        valid = valid and match.may_end()
        every += times
        mean, worst = statistics.fmean(times), sorted(times)[int(0.99 * len(times))]
        said = "yes" if valid else "NO"
        print(f"{case:28s} {compile_ms:11.2f} {mean:9.1f} {worst:9.1f} {said:>8s}")
    for case, (kind, source) in NASTY.items():
        started = time.perf_counter()
        match = compiles(kind, source)
        if match is not None:
            match.fill()
        spent = 1e3 * (time.perf_counter() - started)
        print(f"{case:28s} {spent:11.2f} {'' if match else 'refused':>9s}")
        result[f"nasty {case} ms"] = round(spent, 2)
    steps = batch_steps(compiles, ids(CASES["person"][2]))
    result["batch of 64, us per token"] = round(1e6 * statistics.fmean(steps) / _BATCH, 1)
    result["batch of 64, worst step ms"] = round(1e3 * max(steps), 2)
    print(
        f"batch of {_BATCH}: {result['batch of 64, us per token']} us per token, worst step "
        f"{result['batch of 64, worst step ms']} ms of {len(steps)}"
    )
    words: dict[str, list[str]] = {"enforced": [], "refused": [], "not enforced": []}
    for keyword, (schema, good, bad) in KEYWORDS.items():
        source = json.dumps(schema)
        first, second = compiles("json_schema", source), compiles("json_schema", source)
        if first is None or second is None:
            words["refused"].append(keyword)
            continue
        taken = accepts(first, ids(json.dumps(good, separators=(",", ":"))))
        leaked = accepts(second, ids(json.dumps(bad, separators=(",", ":"))))
        words["enforced" if taken and not leaked else "not enforced"].append(keyword)
    for status, keywords in words.items():
        print(f"{status} ({len(keywords)}): {', '.join(keywords)}")
        result[status] = len(keywords)
    result["mask us mean"] = round(statistics.fmean(every), 1)
    result["mask us p99"] = round(sorted(every)[int(0.99 * len(every))], 1)
    return result


def at_the_door(compiles: Compile, tokenizer: HFTokenizer) -> dict[str, list[str]]:
    """Print and return the server's answer to each keyword."""
    found: dict[str, list[str]] = {"held to": [], "refused": [], "passed over": []}
    cases = KEYWORDS | {name: (made, None, None) for name, made in OTHER_KEYWORDS.items()}
    for keyword, (made, _, bad) in cases.items():
        try:
            source = json_grammar(made, "schema").source
        except PacelineError:
            found["refused"].append(keyword)
            continue
        match = compiles("json_schema", source)
        if match is None:
            found["refused"].append(keyword)
            continue
        text = json.dumps(bad, separators=(",", ":"))
        leaks = keyword in OTHER_KEYWORDS or accepts(
            match, tokenizer.encode(text, add_special_tokens=False)
        )
        found["passed over" if leaks else "held to"].append(keyword)
    print("\nat the door")
    for status, keywords in found.items():
        print(f"{status} ({len(keywords)}): {', '.join(keywords)}")
    print(f"annotations ({len(ANNOTATIONS)}): {', '.join(sorted(ANNOTATIONS))}")
    return found


def validity() -> dict[str, int]:
    """Print the tallies and return their sums."""
    tallies, preemptions = generate_all(schemas=400, patterns=100, grammars=80)
    print(f"\n{'validity':28s} {'asked':>7s} {'completed':>10s} {'valid':>7s}")
    for kind, tally in sorted(tallies.items()):
        valid = tally.completed - len(tally.invalid)
        print(f"{kind:28s} {tally.asked:7d} {tally.completed:10d} {valid:7d}")
        for text in [*tally.invalid, *tally.failed]:
            print(f"  NOT VALID {text[:300]}")
    rows = list(tallies.values())
    completed, wrong = sum(t.completed for t in rows), sum(len(t.invalid) for t in rows)
    share = 100 * (completed - wrong) / max(1, completed)
    print(
        f"{share:.1f} % of {completed} completed outputs valid, {preemptions} preemptions between"
    )
    return {
        "asked": sum(t.asked for t in rows),
        "completed": completed,
        "invalid": wrong,
        "failed": sum(len(t.failed) for t in rows),
    }


def main() -> int:
    path = find_local("smollm2-135m")
    if path is None:
        raise SystemExit("the default model is not here: run `make model`")
    tokenizer = load_tokenizer(path)
    print(f"vocabulary of {tokenizer.vocab_size}")
    compiles = llguidance(tokenizer)
    results: dict[str, Any] = {"llguidance": measure("llguidance", compiles, tokenizer)}
    other = xgrammar(tokenizer)
    if other is None:
        print("\nxgrammar is not importable here: not measured")
    else:
        results["xgrammar"] = measure("xgrammar", other, tokenizer)
    door = at_the_door(compiles, tokenizer)
    results["door"] = {status: len(keywords) for status, keywords in door.items()}
    results["validity"] = outputs = validity()
    about = {"bench": "grammars", "machine": machine(), "vocab": tokenizer.vocab_size}
    print(json.dumps({**about, **results}))
    return 1 if outputs["invalid"] or outputs["failed"] or door["passed over"] else 0


if __name__ == "__main__":
    sys.exit(main())
