"""Drafts that the backend's draft model makes when they are verified."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.outputs import DRAFT_MODEL, ScheduledRow, SchedulerOutput, StepResult
from paceline.core.predict.step_time import StepShape
from paceline.core.slo import NO_SLO, Slo
from paceline.speculation.draft_choice import DraftChoice, StepCosts, likeliest_first
from paceline.speculation.draft_tokens import NGRAM, UNMADE
from tests.driving import Driver, ask, make_request

VOCAB = 97
PROMPT = (3, 5, 8, 13)
ANSWER = expected_tokens(PROMPT, 300, VOCAB)


def _driver(wrong: Collection[int] = (), **config: Any) -> Driver:
    speculative_config = {"model": "another", "num_speculative_tokens": 4}
    config = {"speculative_config": speculative_config} | config
    return Driver(vocab_size=VOCAB, draft_wrong=wrong, **config)


def test_a_plan_says_how_many_and_the_backend_which() -> None:
    driver = _driver()
    driver.add(make_request("a", PROMPT, 41))
    driver.run()
    assert driver.tokens["a"] == ANSWER[:41]
    drafts = [draft for plan in driver.plans for draft in plan.drafts]
    assert {draft.source for draft in drafts} == {DRAFT_MODEL}
    assert {token for draft in drafts for token in draft.token_ids} == {UNMADE}
    stats = driver.scheduler.stats()
    assert dict(stats.drafted) == dict(stats.accepted) == {DRAFT_MODEL: stats.num_accepted_tokens}
    assert len(driver.plans) < 20
    last = driver.finished["a"].timeline
    assert last is not None
    assert last.drafts == ((DRAFT_MODEL, stats.num_draft_tokens, stats.num_accepted_tokens),)


@pytest.mark.parametrize("wrong", [(), (0,), (1,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("most", [0, 1, 2, 32])
def test_no_draft_model_changes_an_answer(wrong: tuple[int, ...], depth: int, most: int) -> None:
    backend = NullBackend(
        vocab_size=VOCAB, num_blocks=24, block_size=4, draft_wrong=wrong, draft_most=most
    )
    driver = _driver(backend=backend, num_blocks=24, depth=depth)
    prompts = {"a": PROMPT, "b": (1, 1, 2), "c": (60, 50, 40, 30, 20)}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, 40))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == expected_tokens(prompt, 40, VOCAB)
    stats = driver.scheduler.stats()
    assert bool(stats.num_draft_tokens) is bool(most)
    # counts are of what was made
    assert stats.num_draft_tokens <= most * stats.num_drafts


def test_wrong_drafts_are_soon_no_longer_made() -> None:
    driver = _driver((0,))
    driver.add(make_request("a", PROMPT, 60))
    driver.run()
    assert 0 < driver.scheduler.stats().num_draft_tokens < 12


def test_others_draft_first_where_they_are_sure() -> None:
    config = {"method": "auto", "model": "another", "num_speculative_tokens": 4}
    driver = _driver(speculative_config=config)
    # the text repeats itself, and then does not
    driver.add(make_request("a", (0,), 40))
    driver.add(make_request("b", PROMPT, 40))
    driver.run()
    assert driver.tokens["a"] == [0] * 40
    counts = {name: dict.fromkeys((NGRAM, DRAFT_MODEL), 0) for name in "ab"}
    for name, last in driver.finished.items():
        assert last.timeline is not None
        counts[name] |= {source: tried for source, tried, _ in last.timeline.drafts}
    assert counts["a"][NGRAM] > 3 * counts["a"][DRAFT_MODEL]
    assert counts["b"][DRAFT_MODEL] > 3 * counts["b"][NGRAM]


class _Timed(NullBackend):
    """Each pass of the draft model takes so long, and each known token that it has not seen."""

    seconds = token_seconds = 0.0

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._seen: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        result = super().execute(plan).result()
        passes = max((len(token_ids) for _, token_ids in result.made), default=0)
        caught_up = []
        for index, _ in result.made:
            name, start = plan.rows[index][:2]
            caught_up.append(max(0, start - self._seen.get(name, 0)))
            self._seen[name] = start + 1
        drafting = passes * self.seconds + sum(caught_up) * self.token_seconds
        future: Future[StepResult] = Future()
        future.set_result(replace(result, drafting=drafting, caught_up=tuple(caught_up)))
        return future


def _step_seconds(shape: StepShape) -> float:
    return 1.0 + 0.01 * (shape.narrow_rows + shape.wide_tokens)


def _dear(
    seconds: float, wrong: Collection[int] = (), depth: int = 1, token_seconds: float = 0.0
) -> Driver:
    """With a draft model that takes so many steps a pass and an unseen token."""
    backend = _Timed(vocab_size=VOCAB, num_blocks=256, block_size=4, draft_wrong=wrong)
    backend.seconds, backend.token_seconds = seconds, token_seconds
    return _driver(backend=backend, num_blocks=256, seconds=_step_seconds, depth=depth)


def _timed(seconds: float, wrong: Collection[int] = (), streams: int = 1, depth: int = 1) -> Driver:
    """After ``streams`` requests at once with a draft model that takes so many steps a pass."""
    driver = _dear(seconds, wrong, depth)
    for stream in range(streams):
        driver.add(make_request(f"r{stream}", (stream, 5, 8, 13), 240))
    driver.run()
    for stream in range(streams):
        assert driver.tokens[f"r{stream}"] == expected_tokens((stream, 5, 8, 13), 240, VOCAB)
    return driver


def test_a_pass_is_part_of_the_price() -> None:
    def drafted(seconds: float, streams: int = 1) -> int:
        return _timed(seconds, (3,), streams).scheduler.stats().num_draft_tokens

    # three of four are right
    free, dear = drafted(0.05), drafted(1.5)
    assert free > 150
    # tried in the first steps, and now and then
    assert 2 * dear < free
    # four share the passes
    assert drafted(0.5, 4) > 1.5 * drafted(1.5, 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_that_was_too_dear_or_wrong_is_tried_again(depth: int) -> None:
    driver = _timed(1.5, (0,), depth=depth)
    backend = driver.backend
    assert isinstance(backend, _Timed)
    before = driver.scheduler.stats()
    backend.seconds, backend.draft_wrong = 0.05, ()
    driver.add(make_request("b", (2, 9, 9), 280, arrival=driver.now))
    driver.run()
    after = driver.scheduler.stats()
    assert after.num_accepted_tokens - before.num_accepted_tokens > 100


def test_a_model_that_makes_nothing_is_asked_ever_less() -> None:
    backend = NullBackend(
        vocab_size=VOCAB, num_blocks=512, block_size=4, draft_wrong=(), draft_most=0
    )
    driver = _driver(backend=backend, num_blocks=512)
    driver.add(make_request("a", PROMPT, 1000))
    driver.run()
    asked = [number for number, plan in enumerate(driver.plans) if plan.drafts]
    assert 4 <= len(asked) < 12
    assert max(later - earlier for earlier, later in pairwise(asked)) > 200
    # another request is a reason to try again
    driver.add(make_request("b", (1, 1, 2), 60))
    first = len(driver.plans)
    driver.run()
    assert 1 <= sum(bool(plan.drafts) for plan in driver.plans[first:]) < 4


def test_one_for_whom_nothing_is_made_is_asked_less_beside_others() -> None:
    class Fails(_Timed):
        def _propose(self, row: ScheduledRow, count: int) -> tuple[int, ...]:
            return () if row.request_id == "b" else super()._propose(row, count)

    backend = Fails(vocab_size=VOCAB, num_blocks=256, block_size=4, draft_wrong=())
    backend.seconds = 0.05
    driver = _driver(backend=backend, num_blocks=256, seconds=_step_seconds)
    for name in "ab":
        # for "a" the model takes in what was right every time
        driver.add(make_request(name, (*PROMPT, ord(name)), 200))
    driver.run()
    asked = {"a": 0, "b": 0}
    for plan in driver.plans:
        for draft in plan.drafts:
            asked[plan.rows[draft.row].request_id] += 1
    assert asked["a"] > 30
    # of 200 steps; one more beside others costs next to nothing, so it is not given up
    assert 1 <= asked["b"] < 40


def test_what_the_model_has_not_seen_is_part_of_the_price() -> None:
    def drafted(token_seconds: float, max_tokens: int) -> float:
        """The share of tokens drafted of requests with prompts of 200 tokens, once it is known."""
        driver, before = _dear(0.05, token_seconds=token_seconds), 0
        for number in range(12):
            if number == 8:
                before = driver.scheduler.stats().num_accepted_tokens
            prompt = [number, *range(number, number + 199)]
            count = 60 if number < 8 else max_tokens
            driver.add(make_request(f"r{number}", prompt, count, arrival=driver.now))
            driver.run()
        return (driver.scheduler.stats().num_accepted_tokens - before) / (4 * max_tokens)

    assert drafted(0.0, 12) > 0.5
    # 40 steps for the sake of 12 tokens, and of 400
    assert drafted(0.2, 12) < 0.2
    assert drafted(0.2, 400) > 0.5


class _Head(_Timed):
    """Keeps hidden states of the latest tokens alone, and enters so many of them in a step before
    it drafts, as ``backends.drafting.draft_head`` does."""

    keeps, at_once = 128, 64

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._entered: dict[str, int] = {}
        # of the rows of a step, in order: entered in it, and still to enter
        self._told: list[tuple[int, int]] = []

    def _propose(self, row: ScheduledRow, count: int) -> tuple[int, ...]:
        first = max(self._entered.get(row.request_id, 0), row.start - self.keeps)
        until = max(first, min(row.start, first + self.at_once))
        self._entered[row.request_id] = until
        behind = max(0, row.start - until)
        self._told.append((until - first, behind))
        return () if behind else super()._propose(row, count)

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        self._told.clear()
        result = super().execute(plan).result()
        passes = max((len(token_ids) for _, token_ids in result.made), default=0)
        caught_up, behind = zip(*self._told, strict=True) if self._told else ((), ())
        drafting = passes * self.seconds + sum(caught_up) * self.token_seconds
        future: Future[StepResult] = Future()
        future.set_result(replace(result, drafting=drafting, caught_up=caught_up, behind=behind))
        return future


def test_a_head_is_priced_by_what_it_takes_in_and_not_by_the_prompt() -> None:
    backend = _Head(vocab_size=VOCAB, num_blocks=1024, block_size=4, draft_wrong=())
    backend.seconds, backend.token_seconds = 0.05, 0.04
    driver = _driver(backend=backend, num_blocks=1024, seconds=_step_seconds)
    # by these it is known what a pass takes, and a token that was not seen
    for name, prompt in (("a", PROMPT), ("b", range(90))):
        driver.add(make_request(name, tuple(prompt), 100, arrival=driver.now))
        driver.run()
    accepted = []
    for number in range(8):
        before = driver.scheduler.stats().num_accepted_tokens
        prompt = [number, *(i % VOCAB for i in range(899))]
        driver.add(make_request(f"r{number}", prompt, 24, arrival=driver.now))
        driver.run()
        accepted.append(driver.scheduler.stats().num_accepted_tokens - before)
    # all 900 tokens would be 36 steps for the sake of 24 tokens; 128 are five
    assert min(accepted[3:]) > 12, accepted


def test_making_drafts_is_part_of_predicted_steps() -> None:
    driver = _dear(0.25)
    driver.add(make_request("a", PROMPT, 200))
    beyond: list[tuple[float, float]] = []
    while driver.scheduler.has_unfinished:
        driver.step()
        plan, note = driver.plans[-1], driver.scheduler.note
        if plan.drafts and note is not None:
            passes = max(len(draft.token_ids) for draft in plan.drafts)
            beyond.append((note.predicted_s - _step_seconds(StepShape.of(plan.rows)), passes / 4))
    assert len(beyond) > 20
    for predicted, making in beyond[-10:]:
        assert predicted == pytest.approx(making, abs=0.05)


def _chosen(*survivals: Sequence[float], slo: Slo = NO_SLO) -> list[int]:
    """Drafts of each row, where a step takes 1 second, a row more nothing and a pass 0.5."""
    requests = [make_request(str(index), (1, 2), slo=slo) for index in range(len(survivals))]
    costs = StepCosts(
        seconds=1.0,
        late=1.0,
        price=lambda rows: (1.0, 0.0),
        making=0.5,
        catching_up=dict.fromkeys(range(len(survivals)), 0.0),
        known=True,
    )
    choice = DraftChoice(requests, costs, most=100, tries=False)
    choice.take(likeliest_first(survivals, ()), survivals)
    return choice.counts


def test_a_pass_is_paid_by_the_drafts_made_in_it() -> None:
    # the second pass would be for one of two rows alone: 0.9 * 1.5 is less than 3.8 * 0.5
    assert _chosen([0.9] * 4, [0.9]) == [1, 1]
    assert _chosen([0.9] * 4, [0.9] * 4) > [1, 1]
    assert _chosen([0.9] * 4)[0] > 1
    # who opens a pass takes all of its time
    assert _chosen([0.9], [0.9], slo=Slo(itl=1.4)) == [0, 0]
    assert _chosen([0.9], [0.9], slo=Slo(itl=1.6)) == [1, 1]
    # a draft that is never verified pays for nothing: 2 * 0.5 is more than 0.8
    assert _chosen([0.8], [0.05]) == [0, 0]
    assert _chosen([0.8], [0.8]) == [1, 1]


def test_a_request_may_ask_for_no_drafts() -> None:
    driver = _driver()
    driver.add(ask(make_request("a", PROMPT, 20), max_draft_tokens=0))
    driver.run()
    assert not any(plan.drafts for plan in driver.plans)
