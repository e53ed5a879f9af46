"""Outputs held to a grammar, on every backend, however the requests are scheduled.

The reference for each request is a run of its own; chunks, preemption, planning ahead and forks
must give the same tokens, and every output must match. Vocabulary: the ASCII bytes, 3 is the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline.core.backend import ModelBackend
from paceline.core.grammar import ConstrainedBackend, Grammar
from paceline.core.request import FinishReason
from paceline.engine.text.grammar import GrammarCompiler
from paceline.errors import RequestFailedError
from tests.contract.ascii import END, Ascii
from tests.contract.test_backends import BACKENDS, GREEDY, SAMPLED, drive
from tests.driving import Driver, make_request

WORDS = "(alpha|beta|gamma)( (alpha|beta|gamma)){6,9}"
GRAMMARS = {
    "regex": Grammar("regex", WORDS),
    "lark": Grammar("lark", 'start: "<" /[a-z]{20,30}/ ">"'),
    "schema": Grammar(
        "json_schema",
        '{"type":"object","properties":{"n":{"type":"integer","minimum":1000,"maximum":99999},'
        '"b":{"type":"boolean"},"l":{"type":"array","items":{"enum":["x","yy"]},"minItems":3,'
        '"maxItems":5}},"required":["n","b","l"],"additionalProperties":false,'
        '"x-guidance":{"whitespace_flexible":false}}',
    ),
}
PROMPTS = {"regex": [7, 9, 11], "lark": list(range(40, 87)), "schema": list(range(20, 35))}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ModelBackend]:
    made = BACKENDS[request.param](tmp_path_factory.mktemp("model"))
    assert isinstance(made, ConstrainedBackend)
    compiler = GrammarCompiler(Ascii)
    made.constrain(compiler)
    yield made
    made.close()
    compiler.close()


def add(driver: Driver, sampling: dict[str, Any], **fields: Any) -> None:
    for name, prompt in PROMPTS.items():
        request = make_request(
            name,
            prompt,
            100,
            grammar=GRAMMARS[name],
            eos_token_ids=frozenset({END, 4}),
            **sampling,
            **fields,
        )
        driver.add(request)
    driver.add(make_request("free", [5] * 30, 60, **sampling))


def check(driver: Driver) -> dict[str, list[int]]:
    def text(name: str) -> str:
        tokens = driver.tokens[name]
        assert driver.finished[name].finish_reason is FinishReason.STOP, driver.finished[name]
        assert tokens[-1] in (END, 4)
        return bytes(tokens[:-1]).decode()

    assert re.fullmatch(WORDS, text("regex"))
    assert re.fullmatch("<[a-z]{20,30}>", text("lark"))
    value = json.loads(text("schema"))
    assert 1000 <= value["n"] <= 99999 and isinstance(value["b"], bool)
    assert 3 <= len(value["l"]) <= 5
    return dict(driver.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_valid_output_however_it_is_scheduled(
    backend: ModelBackend, sampling: dict[str, Any]
) -> None:
    driver = drive(backend, max_num_seqs=1)
    add(driver, sampling)
    driver.run()
    reference = check(driver)
    for settings in (
        {},
        {"max_num_batched_tokens": 9},
        {"num_tokens": 176, "max_num_batched_tokens": 16},
        {"num_tokens": 176, "depth": 2, "max_num_batched_tokens": 16},
    ):
        driver = drive(backend, **settings)  # type: ignore[arg-type]
        add(driver, sampling)
        driver.run()
        assert check(driver) == reference, settings
    assert driver.scheduler.stats().num_preemptions > 0


def test_forks_have_matchers_of_their_own(backend: ModelBackend) -> None:
    driver = drive(backend, depth=2)
    texts = []
    for index in range(3):
        request = make_request(
            f"r/{index}",
            PROMPTS["regex"],
            100,
            grammar=GRAMMARS["regex"],
            eos_token_ids=frozenset({END, 4}),
            fork_of="r/0" if index else None,
            temperature=1.0,
            seed=index,
        )
        driver.add(request)
    driver.run()
    for index in range(3):
        texts.append(bytes(driver.tokens[f"r/{index}"][:-1]).decode())
        assert re.fullmatch(WORDS, texts[-1])
    assert (len(set(texts)) > 1) is not (backend.info.name in ("null", "simulated"))


def test_bans_and_allowed_ids(backend: ModelBackend) -> None:
    driver = drive(backend)
    only = frozenset(b"abc")
    driver.add(make_request("only", [1, 2], 40, allowed_token_ids=only, **SAMPLED))
    driver.add(
        make_request(
            "banned",
            [1, 2],
            40,
            allowed_token_ids=only,
            bad_words=(tuple(b"ab"), tuple(b"ca"), tuple(b"bbb")),
            **SAMPLED,
        )
    )
    driver.run()
    assert set(driver.tokens["only"]) <= only
    text = bytes(driver.tokens["banned"]).decode()
    assert len(text) == 40 and set(text) <= set("abc")
    assert not re.search("ab|ca|bbb", text)


class Faulty:
    """A matcher source whose matchers break after some tokens."""

    timeout = 1.0

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.prepare = compiler.prepare
        self.close = compiler.close

    def matcher(self, grammar: Grammar) -> Any:
        real = self._compiler.matcher(grammar)

        class Breaks:
            count = 0

            def consume(self, token_ids: Sequence[int]) -> None:
                self.count += len(token_ids)
                if self.count > 3 and grammar.kind == "lark":
                    raise RequestFailedError("the matcher fell over")
                if self.count > 5 and grammar.kind == "regex":
                    raise ZeroDivisionError
                real.consume(token_ids)

            def allowed(self) -> bytes:
                return real.allowed()

            def look_ahead(self, drafts: Sequence[int]) -> Any:
                return real.look_ahead(drafts)

            def forced(self, most: int) -> Any:
                return real.forced(most)

        return Breaks()


def test_a_matcher_that_fails_ends_its_request_alone(backend: ModelBackend) -> None:
    driver = drive(backend, depth=2)
    add(driver, SAMPLED)
    driver.run()
    reference = check(driver)
    assert isinstance(backend, ConstrainedBackend)
    compiler = GrammarCompiler(Ascii)
    backend.constrain(Faulty(compiler))
    try:
        driver = drive(backend, depth=2)
        add(driver, SAMPLED)
        driver.run()
    finally:
        backend.constrain(compiler)
    for name, message in (("lark", "fell over"), ("regex", "ZeroDivisionError")):
        assert driver.finished[name].finish_reason is FinishReason.ERROR
        assert message in (driver.finished[name].error or "")
        count = len(driver.tokens[name])
        assert 0 < count < 10 and driver.tokens[name] == reference[name][:count]
    for name in ("schema", "free"):
        assert driver.tokens[name] == reference[name]
