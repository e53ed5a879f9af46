"""Any order of arrivals, steps, aborts and results: nothing leaks, starves or answers wrongly."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.backends.reference.null import expected_tokens
from paceline.core.config import PREEMPTION_MODES
from paceline.core.policies import POLICIES
from paceline.core.request import FinishReason
from paceline.core.slo import Slo
from paceline.errors import InvalidRequestError, NeverFitsError, QueueFullError
from tests.driving import Driver, ask, make_request

VOCAB = 7  # small, so that prefixes repeat and stop ids are hit


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler over the null backend with up to two steps in flight."""

    @initialize(
        num_blocks=st.integers(6, 40),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 20),
        policy=st.sampled_from(sorted(POLICIES)),
        paced=st.booleans(),
        caching=st.booleans(),
        max_idle_blocks=st.sampled_from([None, 0, 3]),
        watermark=st.sampled_from([0.0, 0.1]),
        max_skip_ahead=st.integers(0, 3),
        max_skips=st.integers(0, 3),
        future_memory_check=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 40]),
        preemption=st.sampled_from(PREEMPTION_MODES),
        pressure_threshold=st.sampled_from([0.5, 0.88, 1.0]),
        max_num_waiting=st.sampled_from([None, 4]),
        queue_timeout_s=st.sampled_from([None, 6.0]),
        best_effort_share=st.sampled_from([0.0, 0.05, 0.5]),
        num_speculative_tokens=st.sampled_from([0, 1, 5]),
        # places where a draft model is wrong; None: there is none
        draft_wrong=st.sampled_from([None, (), (1,)]),
        # of layers that have window blocks; 0: there are none
        window=st.sampled_from([0, 0, 1, 3, 9]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        policy: str,
        paced: bool,
        caching: bool,
        max_idle_blocks: int | None,
        watermark: float,
        max_skip_ahead: int,
        max_skips: int,
        future_memory_check: bool,
        num_host_blocks: int,
        preemption: str,
        pressure_threshold: float,
        max_num_waiting: int | None,
        queue_timeout_s: float | None,
        best_effort_share: float,
        num_speculative_tokens: int,
        draft_wrong: tuple[int, ...] | None,
        window: int,
    ) -> None:
        self.driver = Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            policy=policy,
            enable_prefix_caching=caching,
            max_idle_blocks=max_idle_blocks,
            watermark=watermark,
            vocab_size=VOCAB,
            max_skip_ahead=max_skip_ahead,
            max_skips=max_skips,
            priority_ageing_s=5.0,
            coalesce_window_s=3.0,
            coalesce_size=3,
            speculative_config={
                "method": "auto",
                "num_speculative_tokens": num_speculative_tokens,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 4,
                **({} if draft_wrong is None else {"model": "another"}),
            }
            if num_speculative_tokens
            else None,
            draft_wrong=draft_wrong,
            future_memory_check=future_memory_check,
            num_host_blocks=0 if window else num_host_blocks,
            window=window,
            preemption=preemption,
            swap_block_seconds=0.01,
            pressure_threshold=pressure_threshold,
            max_num_waiting=max_num_waiting,
            queue_timeout_s=queue_timeout_s,
            best_effort_share=best_effort_share,
            seconds=(lambda shape: 0.5 + 0.1 * shape.wide_tokens) if paced else None,
        )
        self.asked: dict[str, tuple[list[int], int, frozenset[int]]] = {}
        self.refused = 0
        self.aborted: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=24),
        max_tokens=st.integers(1, 16),
        priority=st.sampled_from([0, 1, 2, 3, 2**63 - 1, -(2**63)]),
        # some come late from another process, some at the same moment
        age=st.sampled_from([0.0, 0.0, 2.5]),
        salt=st.sampled_from([None, "a"]),
        forks=st.integers(0, 2),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        tenant=st.sampled_from("abc"),
        slo=st.builds(
            Slo,
            ttft=st.sampled_from([None, 0.1, 5.0, 30.0]),
            tpot=st.sampled_from([None, 0.01, 1.5, 4.0]),
            queue_ttl=st.sampled_from([None, None, 4.0]),
            deadline=st.sampled_from([None, 20.0]),
            best_effort=st.booleans(),
        ),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        age: float,
        salt: str | None,
        forks: int,
        stop: frozenset[int],
        tenant: str,
        slo: Slo,
    ) -> None:
        parent = f"r{len(self.asked) + self.refused}"
        for index in range(forks + 1):
            request = make_request(
                f"{parent}/{index}",
                prompt,
                max_tokens,
                arrival=self.driver.now - age,
                priority=priority,
                cache_salt=salt,
                fork_of=f"{parent}/0" if index else None,
                stop_token_ids=stop,
                tenant=tenant,
                slo=slo,
            )
            ask(request, num_forks=0 if index else forks)
            try:
                self.driver.add(request)
            except NeverFitsError:
                needed = -(-(len(prompt) + max_tokens - 1) // self.driver.cache.block_size)
                assert needed > self.driver.cache.num_blocks
                self.refused += 1
                return
            except QueueFullError as error:
                assert error.retry_after > 0.0
                assert index == 0, "its other choices were taken"
                self.refused += 1
                return
            except InvalidRequestError:
                # a fork of a parent that expired or was refused
                assert index > 0
                return
            self.asked[request.request_id] = (prompt, max_tokens, stop)

    @rule()
    def plan(self) -> None:
        if len(self.driver._flying) < 2:
            self.driver.plan()

    @precondition(lambda self: self.driver._flying)
    @rule(elapsed=st.sampled_from([1.0, 1.0, 0.0, 7.0, -0.5]))
    def settle(self, elapsed: float) -> None:
        # clocks stand still, jump, and where a machine is suspended even go back
        self.driver.now += elapsed
        self.driver.settle()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        if request_id not in self.driver.finished:
            self.aborted.add(request_id)
        self.driver.abort(request_id)

    @invariant()
    def answers_are_right(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request_id, (prompt, max_tokens, _) in self.asked.items():
            got = self.driver.tokens[request_id]
            assert got == expected_tokens(prompt, max_tokens, VOCAB)[: len(got)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.driver._flying:
            self.driver.settle()
        self.driver.run()
        expired = {each.request_id for each in self.driver.expired}
        for request_id, (prompt, max_tokens, stop) in self.asked.items():
            # with a request that was never started go the forks that wait for its prompt
            parent = request_id.partition("/")[0] + "/0"
            dropped = parent in expired and request_id not in self.driver.finished
            if request_id in expired or dropped:
                assert request_id not in self.driver.finished
                assert not self.driver.tokens[request_id], "it had been started"
                continue
            update = self.driver.finished[request_id]
            expected = expected_tokens(prompt, max_tokens, VOCAB)
            ends = [i for i, token in enumerate(expected) if token in stop]
            if ends:
                expected = expected[: ends[0] + 1]
            if request_id in self.aborted:
                assert update.finish_reason is FinishReason.ABORT
            else:
                assert self.driver.tokens[request_id] == expected
                assert update.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.thorough)])
def test_the_scheduler_after_any_events(examples: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
