"""One step as passes: who is served in which pass, what is kept for later ones, and what held the
head of the queue up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.queues.wait_clocks import Reason
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from paceline.core.step.limits import Pass, Step
from paceline.core.step.planner import Planner
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier
from tests.core.parts import computed, numbered, parts, rows_of, run, step_of

NIGHT = Slo(best_effort=True)


class Counting(Step):
    """Admits from every tier, and counts what passes tell it."""

    told: Sequence[int] = ()

    def next(self, last: Tier, passed: Sequence[Request]) -> Request | Reason | None:
        head = self.state.waiting.first(pressing=False)
        if head is None or head.tier > last:
            return None
        return Reason.BUDGET if self.budget <= 0 else head

    def first_pass_done(self, num_must_run: int) -> None:
        self.told = (*self.told, len(self.rows), num_must_run)


def fill(
    state: SchedulerState,
    *passes: Pass,
    tokens: int = 64,
    held: bool = False,
    reserved: int = 0,
    evicted: Request | None = None,
    kind: type[Counting] = Counting,
) -> tuple[Counting, Reason | None]:
    step = step_of(
        state,
        tokens,
        kind,
        now=5.0,
        passes=passes or (Pass(list(state.running.requests), [], Tier.BACKGROUND),),
        reserved=reserved,
        evicted=evicted,
    )
    assert isinstance(step, kind)
    blocked_by = Planner(state).fill(step, held=held)
    state.kv.check_integrity([*state.running.requests, *state.waiting])
    return step, blocked_by


def waits(state: SchedulerState, *requests: Request) -> None:
    for request in requests:
        state.waiting.arrive(request)


def test_rows_come_before_admissions_and_the_head_is_held_up_by_what_is_short() -> None:
    state = parts()
    stream, long = numbered("stream", 0, 5), numbered("long", 1, 30)
    run(state, stream, long)
    computed(state, stream)
    waits(state, numbered("new", 2, 20), numbered("next", 3, 20))
    step, blocked_by = fill(state, tokens=40)
    assert rows_of(step) == {"stream": (5, 1), "long": (0, 30), "new": (0, 9)}
    assert [new.request_id for new in step.new] == ["new"]
    assert blocked_by is Reason.BUDGET and len(state.waiting) == 1


def test_a_policy_that_holds_requests_back_lets_none_in() -> None:
    state = parts()
    waits(state, numbered("new", 0, 20))
    step, blocked_by = fill(state, held=True)
    assert blocked_by is Reason.POLICY and not step.rows and len(state.waiting) == 1
    step, blocked_by = fill(state)
    assert blocked_by is None and rows_of(step) == {"new": (0, 20)}


def test_what_is_reserved_for_a_newcomer_is_not_given_to_those_that_run() -> None:
    for reserved, share in ((0, 20), (7, 13)):
        state = parts()
        run(state, numbered("long", 0, 60))
        step, _ = fill(state, tokens=20, reserved=reserved)
        assert rows_of(step) == {"long": (0, share)}


def test_a_later_pass_gets_the_tokens_that_were_kept_for_it() -> None:
    state = parts()
    chat = numbered("chat", 0, 60)
    nights = [numbered(f"night{i}", 1 + i, 5, slo=NIGHT) for i in range(2)]
    run(state, chat, *nights)
    computed(state, *nights)
    waits(state, numbered("new", 4, 30))
    step, blocked_by = fill(
        state,
        Pass([chat], [], Tier.ORDINARY),
        Pass(list(nights), [], Tier.BACKGROUND),
        tokens=40,
    )
    # two tokens are kept from the admission too
    assert rows_of(step) == {"chat": (0, 38), "night0": (5, 1), "night1": (5, 1)}
    assert blocked_by is Reason.BUDGET
    assert step.told == (1, 0)


def test_rows_that_must_run_come_in_the_first_pass() -> None:
    state = parts()
    chat, night = numbered("chat", 0, 60), numbered("night", 1, 5, slo=NIGHT)
    run(state, chat, night)
    computed(state, night)
    step, _ = fill(
        state,
        Pass([chat], [night], Tier.ORDINARY),
        Pass([], [], Tier.BACKGROUND),
        tokens=20,
    )
    assert rows_of(step) == {"chat": (0, 19), "night": (5, 1)}
    assert step.told == (2, 1)


def test_memory_holds_the_head_up_in_the_step_that_preempts() -> None:
    state = parts(num_blocks=6)
    grows, other, last = (numbered(f"r{i}", i, 7) for i in range(3))
    run(state, grows, other, last)
    computed(state, grows, other, last)
    grows.output_token_ids.append(1)
    grows.num_tokens += 1
    grows.num_computed_tokens += 1
    waits(state, numbered("new", 3, 1))
    step, blocked_by = fill(state)
    assert "new" not in rows_of(step) and len(step.rows) == 2
    assert state.kv.pool.num_free == 1
    assert blocked_by is Reason.MEMORY, "the block that is left is not the newcomer's"


def test_the_evicted_make_way_before_anything_is_planned() -> None:
    state = parts(num_blocks=4)
    night = numbered("night", 0, 13, slo=NIGHT)
    run(state, night)
    waits(state, numbered("new", 1, 9))
    step, blocked_by = fill(state, Pass([], [], Tier.ORDINARY), evicted=night)
    assert rows_of(step) == {"new": (0, 9)} and blocked_by is None
    assert night.status is RequestStatus.WAITING


def test_a_request_that_made_way_in_the_first_pass_has_no_row_in_a_later_one() -> None:
    state = parts(num_blocks=4)
    chat, night = numbered("chat", 0, 7), numbered("night", 1, 7, slo=NIGHT)
    run(state, chat, night)
    computed(state, chat, night)
    chat.output_token_ids.append(1)
    chat.num_tokens += 1
    chat.num_computed_tokens += 1
    step, _ = fill(
        state, Pass([chat], [], Tier.ORDINARY), Pass([night], [], Tier.ORDINARY), tokens=20
    )
    assert rows_of(step) == {"chat": (8, 1)}
    assert night.status is RequestStatus.WAITING


def test_forks_of_a_step_wait_from_then_on() -> None:
    state = parts()
    parent, child = numbered("p", 0, 10), numbered("c", 1, 10, fork_of="p")
    run(state, parent)
    state.forks.add(parent, child)
    _, blocked_by = fill(state)
    assert child in state.waiting and child.history.waiting_since == 5.0
    assert blocked_by is None, "it came after admissions"


@pytest.mark.parametrize(
    ("running", "waiting", "options", "wide"),
    [
        # one token behind, and no prompt in sight
        (1, 0, {}, False),
        # a prompt waits and there is room
        (1, 1, {}, True),
        # it waits, and there is no place
        (1, 1, {"max_num_seqs": 1}, False),
        # or no memory
        (1, 1, {"num_blocks": 4}, False),
        # nothing runs
        (0, 1, {}, True),
    ],
)
def test_policies_that_do_not_mix_compute_prompts_first(
    running: int, waiting: int, options: dict[str, Any], wide: bool
) -> None:
    state = parts(policy="phase-aligned", **options)
    streams = [numbered(f"s{i}", i, 5) for i in range(running)]
    run(state, *streams)
    computed(state, *streams)
    waits(state, *(numbered(f"w{i}", 5 + i, 9) for i in range(waiting)))
    step, blocked_by = fill(state)
    assert rows_of(step) == ({"w0": (0, 9)} if wide else {"s0": (5, 1)})
    assert (blocked_by is Reason.POLICY) == (not wide)


def test_a_step_for_a_prompt_that_does_not_fit_after_all_is_not_wasted() -> None:
    """Its memory seems to be there, but the limits let nobody in."""

    class Closed(Counting):
        def next(self, *_: object) -> Reason:
            return Reason.PACE

    state = parts(policy="phase-aligned")
    stream, night = numbered("s", 0, 5), numbered("n", 1, 5, slo=NIGHT)
    run(state, stream, night)
    computed(state, stream, night)
    waits(state, numbered("w", 5, 9))
    step, blocked_by = fill(
        state, Pass(list(state.running.requests), [], Tier.ORDINARY), kind=Closed
    )
    assert rows_of(step) == {"s": (5, 1), "n": (5, 1)} and blocked_by is Reason.PACE
