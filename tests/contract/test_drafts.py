"""Drafts change no answer, on every backend: with each setting that looks at tokens made before,
within grammars and outside, whoever drafts, however the requests are scheduled.

The settings are those that crashed or were ignored beside speculation elsewhere (CVE-2026-44223 and
the like): each penalty alone, all of them, and the rest that goes by tokens or positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.core.backend import ModelBackend
from paceline.core.drafter import Drafter, DraftTokens
from paceline.core.grammar import Grammar
from paceline.engine.testing import ForeignDrafter, ScriptedDrafter
from paceline.speculation import draft_choice
from paceline.speculation.draft_tokens import GRAMMAR, NGRAM
from paceline.speculation.drafts import DrafterMaker
from tests.contract.ascii import END
from tests.contract.test_backends import GREEDY, SAMPLED, drive
from tests.contract.test_grammar import GRAMMARS, backend
from tests.driving import Driver, make_request

__all__ = ["backend"]

AUTO = {"method": "auto", "num_speculative_tokens": 5}
ENDS: dict[str, Any] = {"eos_token_ids": frozenset({END, 4})}
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.7},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((97, 4.0), (32, -3.0))},
    "bad words": {"bad_words": ((98,), (97, 103), (32, 103))},
    "minimum": {"min_tokens": 40},
    "log-probabilities": {"logprobs": 2, "prompt_logprobs": 1},
    "only": {"allowed_token_ids": (*range(97, 123), 32, 60, 62, END)},
}
# each in a grammar of its own kind, and free
KINDS: tuple[Grammar | None, ...] = (GRAMMARS["regex"], GRAMMARS["lark"], None)
LENGTH = 56


def add_all(driver: Driver, sampling: dict[str, Any]) -> None:
    for number, (name, setting) in enumerate(PENALTIES.items()):
        for place, grammar in enumerate(KINDS):
            if name == "bad words" and grammar is not None:
                # a word of the grammar that may not end
                continue
            prompt = [(7 * number + 11 * place + i) % 60 + 40 for i in range(9)] * 2
            settings = {"grammar": grammar, "logprobs": 0} | ENDS | sampling | setting
            driver.add(make_request(f"{name} {place}", prompt, LENGTH, **settings))


def answers_of(driver: Driver) -> dict[str, Any]:
    return {
        name: (tokens, driver.finished[name].finish_reason, driver.finished[name].stop_reason)
        for name, tokens in driver.tokens.items()
    }


class _Invalid:
    """What no grammar here allows, behind what is right."""

    def __init__(self, text: Sequence[int], right: int) -> None:
        self._text, self._right = text, right

    def propose(self, tokens: Sequence[int], count: int) -> DraftTokens:
        good = list(self._text[len(tokens) : len(tokens) + min(self._right, count)])
        return DraftTokens((good + [0] * count)[:count], 1, NGRAM)


def _drafters(reference: dict[str, Any], vocab_size: int) -> dict[str, DrafterMaker | None]:
    def by(make: Callable[[Sequence[int]], Drafter]) -> DrafterMaker:
        def made(request: Any) -> Drafter:
            asked = request.asked
            return make([*asked.prompt_token_ids, *reference[asked.request_id][0]])

        return made

    return {
        "as served": None,
        "right": by(lambda text: ScriptedDrafter([*text, *[END] * 20], vocab_size, extra=3)),
        "wrong": by(lambda text: ScriptedDrafter(text, vocab_size, wrong=(0,))),
        "wrong later": by(lambda text: ScriptedDrafter(text, vocab_size, wrong=(2,))),
        "against the grammar": by(lambda text: _Invalid(text, 1)),
        "an early end": by(lambda text: ScriptedDrafter([*text[:-9], *[END] * 30], vocab_size)),
        "no tokens": lambda _: ForeignDrafter(),
    }


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SAMPLED, id="sampled", marks=pytest.mark.thorough),
    ],
)
def test_answers_are_the_same(
    backend: ModelBackend, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.info.name in ("null", "simulated") and sampling is SAMPLED:
        pytest.skip("it draws as if it were greedy")
    # all drafts are verified, however unlikely
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    monkeypatch.setattr(draft_choice, "_UNLIKELY", 0.0)
    driver = drive(backend)
    add_all(driver, sampling)
    driver.run()
    reference = answers_of(driver)
    assert len(reference) == 3 * len(PENALTIES) - 2
    verified: dict[str, int] = {}
    ways: list[dict[str, Any]] = [{"num_tokens": 176, "max_num_batched_tokens": 40}, {"depth": 2}]
    preempted = 0
    for number, (name, maker) in enumerate(_drafters(reference, backend.info.vocab_size).items()):
        for settings in ways if maker is None else [ways[number % 2]]:
            driver = drive(backend, speculative_config=AUTO, drafter=maker, **settings)
            add_all(driver, sampling)
            driver.run()
            found = answers_of(driver)
            assert found == reference, (name, settings)
            stats = driver.scheduler.stats()
            verified[name] = stats.num_draft_tokens
            if name == "as served":
                counts = dict(stats.drafted), dict(stats.accepted)
                assert counts[0][GRAMMAR] == counts[1][GRAMMAR] > 0
            elif name == "right":
                assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens
            preempted += stats.num_preemptions
    assert preempted > 0
    assert min(verified.values()) > 20, verified


def check_choices(
    backend: ModelBackend, config: dict[str, Any], grammars: Sequence[Grammar | None], **more: Any
) -> Driver:
    """Check that three choices of one request are the same with drafts; return the latter's."""
    found = []
    for speculative in (None, config):
        driver = drive(backend, speculative_config=speculative, depth=2)
        for index, grammar in enumerate(grammars):
            driver.add(
                make_request(
                    f"r/{index}", [40, 41, 42] * 8, LENGTH, grammar=grammar,
                    fork_of="r/0" if index else None, temperature=1.0, seed=index,
                    frequency_penalty=0.3, **more,
                )
            )  # fmt: skip
        driver.run()
        found.append(answers_of(driver))
    assert found[0] == found[1]
    return driver


def test_choices_of_one_request(backend: ModelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_choice, "_LIKELY", 0.0)
    driver = check_choices(backend, AUTO, [GRAMMARS["regex"]] * 3, **ENDS)
    assert driver.scheduler.stats().num_accepted_tokens > 0
