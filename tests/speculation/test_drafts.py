"""Drafts change no answer, whoever makes them, and stay out of the way of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.drafter import Drafter
from paceline.core.grammar import Grammar
from paceline.core.predict.step_time import StepShape
from paceline.core.request import AdapterUse, FinishReason, Request
from paceline.core.slo import Slo
from paceline.engine.testing import ForeignDrafter, ScriptedDrafter
from paceline.speculation.draft_tokens import PREDICTION
from paceline.speculation.drafts import DrafterMaker
from tests.driving import Driver, adapter_use, ask, make_request

VOCAB = 97
OFF: dict[str, Any] = {"speculative_config": None}
PROMPT = (3, 5, 8, 13)


def _scripted(prompt: Sequence[int], wrong: Sequence[int] = (), extra: int = 0) -> ScriptedDrafter:
    return ScriptedDrafter([*prompt, *expected_tokens(prompt, 200, VOCAB)], VOCAB, wrong, extra)


def _knowing(*wrong: int, extra: int = 0) -> DrafterMaker:
    return lambda request: _scripted(request.asked.prompt_token_ids, wrong, extra)


def _foreign(request: Request) -> Drafter:
    return ForeignDrafter()


def _driver(drafter: DrafterMaker | None = None, **config: Any) -> Driver:
    speculative_config = {"method": "ngram", "num_speculative_tokens": 4}
    config = {"speculative_config": speculative_config} | config
    return Driver(vocab_size=VOCAB, drafter=drafter, **config)


def _drafted(driver: Driver) -> list[int]:
    return [len(draft.token_ids) for plan in driver.plans for draft in plan.drafts]


def test_right_drafts_bring_several_tokens_a_step() -> None:
    driver = _driver(_knowing())
    driver.add(make_request("a", PROMPT, 21))
    driver.run()
    assert driver.tokens["a"] == expected_tokens(PROMPT, 21, VOCAB)
    stats = driver.scheduler.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    # without drafts a token takes a step
    assert len(driver.plans) < 12


@pytest.mark.parametrize(
    "drafter",
    [_knowing(0), _knowing(1), _knowing(3), _knowing(extra=9), _foreign],
    ids=["wrong", "second wrong", "last wrong", "too long", "foreign"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_no_drafter_changes_an_answer(drafter: DrafterMaker, depth: int) -> None:
    driver = _driver(drafter, depth=depth)
    prompts = {"a": PROMPT, "b": (1, 1, 2), "c": (60, 50, 40, 30, 20)}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 30))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == expected_tokens(prompt, 30, VOCAB)
    assert all(count <= 4 for count in _drafted(driver))


def test_wrong_drafts_are_soon_no_longer_verified() -> None:
    driver = _driver(_knowing(0))
    driver.add(make_request("a", PROMPT, 40))
    driver.run()
    stats = driver.scheduler.stats()
    assert 0 < stats.num_draft_tokens < 10
    assert stats.num_accepted_tokens == 0


def test_a_drafter_that_is_given_drafts_whatever_is_configured() -> None:
    driver = Driver(vocab_size=VOCAB, drafter=_knowing())
    driver.add(make_request("a", PROMPT, 12))
    driver.run()
    assert driver.scheduler.stats().num_accepted_tokens > 0


def test_a_request_may_ask_for_no_drafts_or_few() -> None:
    for most in (0, 2):
        driver = _driver(_knowing())
        driver.add(ask(make_request("a", PROMPT, 20), max_draft_tokens=most))
        driver.run()
        assert driver.tokens["a"] == expected_tokens(PROMPT, 20, VOCAB)
        assert max(_drafted(driver), default=0) == most


def test_the_next_step_waits_for_tokens_while_drafts_come_true() -> None:
    def waits(drafter: DrafterMaker) -> bool:
        driver = _driver(drafter)
        driver.add(make_request("a", PROMPT, 60))
        while driver.scheduler.has_unfinished:
            awaited = driver.scheduler.awaits_tokens
            driver.step()
        return awaited

    assert waits(_knowing())
    assert not waits(_knowing(0))


def test_a_new_request_waits_for_tokens_if_others_were_drafted() -> None:
    def waits(*wrong: int) -> int:
        """Of the first steps of the last request, those that the next plan waits for."""
        driver = _driver(_knowing(*wrong))
        for number in range(9):
            driver.add(make_request(f"r{number}", (number, 1, 2), 40))
            driver.run()
        driver.add(make_request("last", PROMPT, 40))
        count = 0
        for _ in range(8):
            driver.step()
            count += driver.scheduler.awaits_tokens
        return count

    assert waits(0) == 0
    # all but the prompt's
    assert waits() == 7


def test_how_often_drafts_are_right_is_learned_for_each_adapter() -> None:
    """Drafts are right for the model, and wrong with the first adapter of many."""

    def make(request: Request) -> Drafter:
        adapter = request.asked.adapter
        wrong = (0,) if adapter is not None and adapter.slot == 1 else ()
        return _scripted(request.asked.prompt_token_ids, wrong)

    driver = _driver(make)

    def verified(name: str, adapter: AdapterUse | None, first: int = 3) -> int:
        """Draft tokens of one more request."""
        before = driver.scheduler.stats().num_draft_tokens
        driver.add(ask(make_request(name, (first, 1, 2), 40), adapter=adapter))
        driver.run()
        assert driver.tokens[name] == expected_tokens((first, 1, 2), 40, VOCAB)
        return driver.scheduler.stats().num_draft_tokens - before

    counts = {}
    for number in range(6):
        for slot in (0, 1, 2):
            use = adapter_use(slot) if slot else None
            counts[slot] = verified(f"r{number}.{slot}", use, number)
    assert counts[1] < 5 < 25 < counts[0] == counts[2]
    # one that is new begins with what is known of the model
    assert verified("new", adapter_use(3)) > 25
    # as does one that was not asked for in a long time
    for slot in range(3, 3 + 256):
        use = adapter_use(slot % 256, 1 + slot // 256)
        driver.add(ask(make_request(f"many{slot}", PROMPT, 5), adapter=use))
        driver.run()
    assert counts[1] < verified("again", adapter_use(1)) < 25


def test_no_step_waits_for_tokens_while_blocks_are_short() -> None:
    # from the eighth block on drafts may only have places of blocks that are held
    driver = _driver(_knowing(), num_blocks=12, block_size=4)
    driver.add(make_request("a", PROMPT, 40))
    waited = []
    while driver.scheduler.has_unfinished:
        driver.step()
        if not driver.plans[-1].drafts and 24 < len(driver.tokens["a"]) < 36:
            waited.append(driver.scheduler.awaits_tokens)
    assert driver.tokens["a"] == expected_tokens(PROMPT, 40, VOCAB)
    assert waited and not any(waited)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_drafts_end_where_the_answer_does(max_tokens: int) -> None:
    driver = _driver(_knowing(), max_model_len=len(PROMPT) + max_tokens)
    driver.add(make_request("a", PROMPT, max_tokens))
    driver.run()
    assert driver.tokens["a"] == expected_tokens(PROMPT, max_tokens, VOCAB)
    assert driver.finished["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_among_right_drafts_ends_the_answer(place: int) -> None:
    answer = expected_tokens(PROMPT, 9, VOCAB)
    first = answer.index(answer[place])
    driver = _driver(_knowing())
    stop = frozenset({answer[place]})
    driver.add(make_request("a", PROMPT, 30, stop_token_ids=stop, logprobs=0))
    driver.run()
    assert driver.tokens["a"] == answer[: first + 1]
    assert driver.finished["a"].stop_reason == answer[place]
    last = driver.finished["a"]
    assert last.logprobs is not None
    assert [entry.token_id for entry in last.logprobs] == list(last.new_token_ids)


def test_minimum_length_and_bad_words_hold_at_each_place() -> None:
    stop = frozenset(range(40))
    settings_of: dict[str, Any] = {
        "stop_token_ids": stop,
        "min_tokens": 12,
        "bad_words": ((50,), (60, 61)),
    }
    tokens = []
    for count in (0, 4):
        driver = _driver(_knowing(), **({} if count else OFF))
        driver.add(make_request("a", PROMPT, 30, **settings_of))
        driver.run()
        tokens.append(driver.tokens["a"])
    assert tokens[0] == tokens[1] and len(tokens[0]) >= 12


def test_stop_tokens_before_the_minimum_end_no_count() -> None:
    class Ends(NullBackend):
        """Stop tokens are chosen whatever the minimum, as at the end of a grammar."""

        def _choosable(self, state: Any) -> Any:
            return lambda token: True

    driver = _driver(_knowing(), backend=Ends(vocab_size=VOCAB, num_blocks=64, block_size=4))
    stop = frozenset(range(VOCAB))
    driver.add(make_request("a", PROMPT, 30, stop_token_ids=stop, min_tokens=20))
    driver.run()
    assert driver.tokens["a"] == expected_tokens(PROMPT, 20, VOCAB)
    # all tokens but the first of each row were drafted
    rows = sum(row.samples for plan in driver.plans for row in plan.rows)
    assert driver.scheduler.stats().num_accepted_tokens >= 20 - rows > 10


def test_a_grammar_is_asked_only_where_its_word_can_be_used() -> None:
    def forced(limit: int, *others: Request, **config: Any) -> int:
        """Steps that ask what the grammar of a request leaves no choice about."""
        driver = _driver(speculative_config={"method": "auto"}, **config)
        request = make_request("a", PROMPT, 12, grammar=Grammar("regex", "a*"))
        driver.add(ask(request, max_draft_tokens=limit), *others)
        driver.run()
        return sum(
            plan.rows[index].request_id == "a" for plan in driver.plans for index in plan.forces
        )

    # behind the last but one nothing is drafted any more
    assert forced(4) == 10
    assert forced(0) == 0
    # somebody waits, or what is left over is best effort's
    assert forced(4, make_request("b", PROMPT, 40), max_num_seqs=1) == 0
    free = Slo(slo_class="background", best_effort=True)
    assert forced(4, make_request("b", PROMPT, 40, slo=free), policy="deadline") < 10


def test_poison_that_was_drafted_fails_as_without() -> None:
    answer = expected_tokens(PROMPT, 20, VOCAB)
    told = []
    for count in (0, 4):
        driver = _driver(_knowing(), **({} if count else OFF), poison_token=answer[7])
        driver.add(make_request("a", PROMPT, 20))
        driver.run()
        told.append((driver.tokens["a"], driver.finished["a"].finish_reason))
    assert told[0] == told[1] == (answer[:8], FinishReason.ERROR)


def test_no_drafts_while_a_prompt_is_computed_or_many_run() -> None:
    driver = _driver(_knowing(), max_num_seqs=16, num_blocks=256)
    for index in range(12):
        driver.add(make_request(f"r{index}", (index, 1, 2), 12 if index else 40))
    driver.run()
    for plan in driver.plans:
        if plan.drafts:
            drafted = {draft.row for draft in plan.drafts}
            assert len(plan.rows) <= 8
            assert all(row.num_tokens == 1 for i, row in enumerate(plan.rows) if i not in drafted)
    assert _drafted(driver), "the last one runs alone"


def test_drafts_preempt_nobody() -> None:
    preempted = []
    for count in (0, 4):
        driver = _driver(_knowing(0), **({} if count else OFF), num_blocks=12, block_size=2)
        driver.add(make_request("a", (1, 2), 12))
        driver.add(make_request("b", (3, 4), 12))
        driver.run()
        preempted.append(driver.scheduler.stats().num_preemptions)
    assert preempted[1] <= preempted[0]


def _seconds(shape: StepShape) -> float:
    return 1.0 + 0.1 * (shape.narrow_rows + shape.wide_tokens)


@pytest.mark.parametrize(
    ("slo", "drafted"),
    # a plain step of two rows takes 1.2
    [(Slo(tpot=10.0), True), (Slo(tpot=1.25), False), (Slo(itl=1.25), False), (Slo(itl=2.0), True)],
)
def test_a_target_of_another_that_drafts_would_break_keeps_them_out(
    slo: Slo, drafted: bool
) -> None:
    driver = _driver(_knowing(), policy="deadline", seconds=_seconds)
    driver.add(make_request("warm", PROMPT, 60))
    driver.run()
    before = len(_drafted(driver))
    driver.add(make_request("a", (9, 9, 1), 30, arrival=driver.now))
    other = make_request("b", (8, 1, 7), 40, arrival=driver.now, slo=slo)
    driver.add(ask(other, max_draft_tokens=0))
    driver.run()
    assert driver.tokens["a"] == expected_tokens((9, 9, 1), 30, VOCAB)
    assert (len(_drafted(driver)) > before) is drafted


def test_a_pace_that_no_plain_step_keeps_is_kept_by_drafts() -> None:
    # a draft costs more than it brings to two requests, so that none is made for the sake of speed
    def seconds(shape: StepShape) -> float:
        return 0.2 + shape.narrow_rows + shape.wide_tokens

    def pace(slo: Slo) -> float:
        driver = _driver(_knowing(), policy="deadline", seconds=seconds, pace_admission=False)
        driver.add(make_request("warm", PROMPT, 120))
        driver.run()
        other = make_request("b", (8, 1, 7), 90, arrival=driver.now)
        driver.add(ask(other, max_draft_tokens=0))
        driver.step()
        before = len(driver.plans)
        driver.add(make_request("a", (9, 9, 1), 60, arrival=driver.now, slo=slo))
        while "a" not in driver.finished:
            driver.step()
        assert driver.tokens["a"] == expected_tokens((9, 9, 1), 60, VOCAB)
        return sum(0.2 + plan.num_tokens for plan in driver.plans[before + 1 :]) / 59

    # 2.2 a token without drafts
    assert pace(Slo(tpot=5.0)) > 2.1
    assert pace(Slo(tpot=1.8)) < 1.8


def test_costly_drafts_are_not_verified() -> None:
    # a row takes as long as a step of its own would
    driver = _driver(_knowing(3), seconds=lambda shape: shape.narrow_rows + shape.wide_tokens)
    driver.add(make_request("a", PROMPT, 160))
    driver.run()
    assert driver.tokens["a"] == expected_tokens(PROMPT, 160, VOCAB)
    # learned in the first steps, and tried anew now and then
    assert all(count == 1 for count in _drafted(driver)[17:])
    assert len(_drafted(driver)) < 24


def _nearly_free(shape: StepShape) -> float:
    return 1.0 + 0.01 * (shape.narrow_rows + shape.wide_tokens)


def test_drafts_that_make_plans_wait_too_long_are_not_verified() -> None:
    def drafted(pause: float) -> int:
        """Seconds pass between a step's tokens and the next plan, as where each is sent first."""
        driver = _driver(_knowing(1), seconds=_nearly_free)
        driver.add(make_request("a", PROMPT, 180))
        while driver.step():
            driver.now += pause
        assert driver.tokens["a"] == expected_tokens(PROMPT, 180, VOCAB)
        return len(_drafted(driver))

    # one of four drafts is right; the driver itself takes no time from a step's end to a plan
    often = drafted(0.0)
    assert often > 80
    assert drafted(1.5) < 0.7 * often
    # nobody planned for so long: it says nothing
    assert drafted(50.0) == often


def test_nothing_is_drafted_by_default() -> None:
    driver = Driver(vocab_size=VOCAB)
    driver.add(make_request("a", (1, 2, 1, 2, 1, 2), 20))
    driver.run()
    assert not _drafted(driver)


def test_what_a_request_expects_is_drafted_with_and_without_a_configuration() -> None:
    answer = tuple(expected_tokens(PROMPT, 60, VOCAB))
    # what is expected lacks a token, has one too many, and has one that is another
    expected = (*answer[:10], *answer[11:20], 0, *answer[20:30], 1, *answer[31:])
    counts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4}, {"method": "off"}):
        driver = Driver(vocab_size=VOCAB, speculative_config=config)
        driver.add(ask(make_request("a", PROMPT, 60), prediction_token_ids=expected))
        driver.add(make_request("b", (9, 9, 9), 12))
        driver.run()
        assert driver.tokens["a"] == list(answer)
        assert driver.tokens["b"] == expected_tokens((9, 9, 9), 12, VOCAB)
        last = driver.finished["a"].timeline
        assert last is not None
        counts.append({source: (tried, right) for source, tried, right in last.drafts})
        stats = driver.scheduler.stats()
        assert dict(stats.drafted) == {s: c[0] for s, c in counts[-1].items()}
        assert stats.num_accepted_tokens == sum(n for _, n in stats.accepted_by_place)
        assert driver.finished["b"].timeline is not None
        assert not driver.finished["b"].timeline.drafts
    for tried, right in (counts[0][PREDICTION], counts[1][PREDICTION]):
        assert 35 < right < tried < 70
    # drafts of others are none of the request's that expects nothing
    assert counts[2] == {}


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    wrong=st.sets(st.integers(0, 4)),
    blocks=st.integers(8, 40),
    depth=st.integers(1, 3),
    host=st.sampled_from([0, 20]),
)
def test_small_pools_and_wrong_drafts(
    prompts: list[list[int]], wrong: set[int], blocks: int, depth: int, host: int
) -> None:
    driver = _driver(
        _knowing(*wrong),
        num_blocks=max(blocks, 12),
        block_size=4,
        depth=depth,
        num_host_blocks=host,
        preemption="swap" if host else "recompute",
    )
    for index, prompt in enumerate(prompts):
        driver.add(make_request(f"r{index}", prompt, 20))
    driver.run()
    for index, prompt in enumerate(prompts):
        assert driver.tokens[f"r{index}"] == expected_tokens(prompt, 20, VOCAB)
