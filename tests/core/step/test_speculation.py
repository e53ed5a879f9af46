"""The seam to what drafts: when the scheduler asks it, with a ``Speculation`` that notes it."""

from __future__ import annotations

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import Draft, SchedulerOutput, StepResult
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.core.step.limits import Step
from paceline.core.step.speculation import Speculation
from paceline.core.step.state import SchedulerState
from paceline.errors import ConfigError
from tests.driving import ask, make_request

CACHE = CacheConfig(block_size=4, num_blocks=64)


class Noting:
    """Drafts nothing."""

    def __init__(self, *, begins: bool = False) -> None:
        self.awaits_tokens = False
        self.making_seconds = 0.0
        self.calls: list[str] = []
        self._begins = begins

    def __call__(self, state: SchedulerState) -> Speculation:
        self.calls.append(f"made for {state.config.speculative_config}")
        return self

    def begins(self, request: Request | None) -> bool:
        self.calls.append("begins" if request is None else f"begins with {request.request_id}")
        return request is not None or self._begins

    def add(self, step: Step) -> tuple[Draft, ...]:
        self.calls.append(f"add to {len(step.rows)} rows")
        self.awaits_tokens = True
        return ()

    def forces(self, step: Step) -> tuple[int, ...]:
        self.calls.append("forces")
        return ()

    def apply_result(
        self, plan: SchedulerOutput, requests: list[Request], result: StepResult, now: float
    ) -> None:
        self.calls.append(f"take in {plan.step_id} of {requests[0].num_output_tokens} tokens")


def step(scheduler: Scheduler, backend: NullBackend) -> None:
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, backend.execute(plan).result(), 0.0)


def test_nothing_but_begins_is_called_until_a_request_brings_something_to_draft_from() -> None:
    noting, backend = Noting(), NullBackend(vocab_size=97, num_blocks=64, block_size=4)
    scheduler = Scheduler(SchedulerConfig(), CACHE, speculation=noting)
    scheduler.add_request(make_request("plain", [1, 2, 3], 9))
    step(scheduler, backend)
    assert noting.calls == ["made for None", "begins"]
    assert not scheduler.awaits_tokens
    noting.calls.clear()
    scheduler.add_request(ask(make_request("told", [4, 5], 9), prediction_token_ids=(7, 8)))
    step(scheduler, backend)
    assert noting.calls == ["begins with told", "add to 2 rows", "forces", "take in 1 of 1 tokens"]
    assert scheduler.awaits_tokens
    noting.calls.clear()
    scheduler.add_request(ask(make_request("also", [6], 9), prediction_token_ids=(7, 8)))
    assert not noting.calls, "it has begun and is not asked again"


def test_it_may_begin_with_the_scheduler() -> None:
    noting, backend = Noting(begins=True), NullBackend(vocab_size=97, num_blocks=64, block_size=4)
    config = SchedulerConfig(speculative_config={"method": "its own"})
    scheduler = Scheduler(config, CACHE, speculation=noting)
    scheduler.add_request(make_request("plain", [1, 2, 3], 9))
    step(scheduler, backend)
    assert noting.calls == [
        "made for {'method': 'its own'}", "begins", "add to 1 rows", "forces",
        "take in 0 of 0 tokens",
    ]  # fmt: skip


def test_a_scheduler_that_is_given_none_serves_and_refuses_to_be_told_how_to_draft() -> None:
    backend = NullBackend(vocab_size=97, num_blocks=64, block_size=4)
    scheduler = Scheduler(SchedulerConfig(), CACHE)
    scheduler.add_request(ask(make_request("told", [4, 5], 9), prediction_token_ids=(7, 8)))
    step(scheduler, backend)
    assert not scheduler.awaits_tokens and not scheduler.schedule(0.0).drafts
    with pytest.raises(ConfigError, match=r"\{'method': 'off'\} says how to draft"):
        Scheduler(SchedulerConfig(speculative_config={"method": "off"}), CACHE)
