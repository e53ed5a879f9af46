"""Rows for running requests: who gets how many tokens, and who gives its memory up."""

from __future__ import annotations

import pytest

from paceline.core.predict.step_time import StepShape
from paceline.core.request import Request, RequestStatus
from paceline.core.slo import Slo
from paceline.core.step.limits import Step
from paceline.core.step.rows import Rows
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier
from tests.core.parts import computed, numbered, parts, rows_of, run, step_of


def extend(
    state: SchedulerState,
    step: Step,
    running: list[Request],
    later: int = 0,
    *,
    limited: bool = False,
) -> bool:
    preempted = Rows(state).extend(step, running, later, limited=limited)
    state.kv.check_integrity([*state.running.requests, *state.waiting])
    return preempted


def test_the_first_far_behind_takes_what_the_others_do_not_need() -> None:
    state = parts()
    long, other, short = numbered("long", 0, 50), numbered("other", 1, 50), numbered("short", 2, 5)
    run(state, long, other, short)
    computed(state, short)
    step = step_of(state, 20)
    assert not extend(state, step, list(state.running.requests), later=3)
    # one for each of two behind it, and three for later ones
    assert rows_of(step) == {"long": (0, 15), "other": (0, 1), "short": (5, 1)}
    assert step.budget == 3
    assert [row.samples for row in step.rows] == [False, False, True]
    assert step.wide_tokens == 15 and step.narrow_rows == 2


@pytest.mark.parametrize("num_blocks", [64, 8])
def test_the_short_way_of_a_row_is_the_long_way(num_blocks: int) -> None:
    """Rows of one token are written by the short way unless forks wait; with 8 blocks memory ends
    on the way, which the short way leaves to the long one."""

    def steps(waiting_fork: bool) -> list[tuple[dict[str, tuple[int, int]], StepShape, list[int]]]:
        state = parts(num_blocks=num_blocks)
        requests = [numbered(f"r{i}", i, 5 + i, 20) for i in range(4)]
        run(state, *requests[: 4 if num_blocks == 64 else 3])
        computed(state, *state.running.requests)
        if waiting_fork:
            state.forks.add(numbered("parent", 8, 3), numbered("child", 9, 3, fork_of="parent"))
        seen = []
        for _ in range(9):
            step = step_of(state)
            extend(state, step, list(state.running.requests))
            hashed = [request.num_hashed_blocks for request in step.requests]
            seen.append((rows_of(step), step.shape, hashed))
            for request in step.requests:
                request.output_token_ids.append(7)
                request.num_tokens += 1
                request.num_pending_tokens -= 1
        return seen

    short = steps(waiting_fork=False)
    assert short == steps(waiting_fork=True)
    first, last = short[0], short[-1]
    assert (len(last[0]) < len(first[0])) == (num_blocks == 8)
    assert sum(last[2]) > sum(first[2]) > 0, "blocks were filled, and offered to the cache"


def test_who_has_nothing_to_compute_has_no_row() -> None:
    state = parts()
    last, ready = numbered("last", 0, 4, 2), numbered("ready", 1, 4, 2)
    run(state, last, ready)
    computed(state, last, ready)
    # its last token is under way: the answer ends with it
    last.num_pending_tokens = 1
    step = step_of(state, 10)
    extend(state, step, [last, ready])
    assert rows_of(step) == {"ready": (4, 1)}


def test_without_memory_the_last_in_order_gives_way_and_leaves_the_list() -> None:
    state = parts(num_blocks=6)
    first, second, third = (numbered(f"r{i}", i, 7) for i in range(3))
    run(state, first, second, third)
    computed(state, first, second, third)
    for request in (first, second, third):
        request.output_token_ids.append(1)
        request.num_tokens += 1
        request.num_computed_tokens += 1
    running = list(state.running.requests)
    step = step_of(state)
    assert extend(state, step, running)
    assert rows_of(step) == {"r0": (8, 1), "r1": (8, 1)}
    assert running == [first, second] == state.running.requests
    assert third.status is RequestStatus.WAITING and not third.block_ids
    assert state.running.num_preemptions == third.num_preemptions == 1


def test_a_request_that_has_its_row_gives_nothing_up() -> None:
    """The last needs a block, and all before it have their rows: it gives its own up."""
    state = parts(num_blocks=4)
    first, last = numbered("first", 0, 5), numbered("last", 1, 7)
    run(state, first, last)
    computed(state, first, last)
    last.output_token_ids.append(1)
    last.num_tokens += 1
    last.num_computed_tokens += 1
    running = list(state.running.requests)
    step = step_of(state)
    assert extend(state, step, running)
    assert rows_of(step) == {"first": (5, 1)}
    assert running == [first] and last.status is RequestStatus.WAITING


def test_best_effort_gives_way_before_any_ordinary_request() -> None:
    state = parts(num_blocks=4)
    night = numbered("night", 0, 7, slo=Slo(best_effort=True))
    chat = numbered("chat", 1, 7)
    run(state, night, chat)
    computed(state, night, chat)
    chat.output_token_ids.append(1)
    chat.num_tokens += 1
    chat.num_computed_tokens += 1
    step = step_of(state)
    # a pass over ordinary requests alone
    assert extend(state, step, [chat])
    assert night.tier is Tier.BACKGROUND and night.status is RequestStatus.WAITING
    assert rows_of(step) == {"chat": (8, 1)}


def test_a_limited_pass_asks_before_each_row() -> None:
    class Every(Step):
        asked: int = 0

        def takes(self, request: Request) -> bool:
            # what the step has so far is known whenever it is asked
            assert self.narrow_rows == len(self.rows)
            self.asked += 1
            return request.request_id != "r1"

    state = parts()
    requests = [numbered(f"r{i}", i, 5, slo=Slo(best_effort=True)) for i in range(3)]
    run(state, *requests)
    computed(state, *requests)
    step = step_of(state, kind=Every, seconds=1.0)
    extend(state, step, list(state.running.requests), limited=True)
    assert rows_of(step) == {"r0": (5, 1), "r2": (5, 1)}
    assert isinstance(step, Every) and step.asked == 3


def test_forks_take_over_the_prompt_in_the_step_that_computes_it() -> None:
    state = parts()
    parent, child = numbered("p", 0, 10), numbered("c", 1, 10, fork_of="p")
    run(state, parent)
    state.forks.add(parent, child)
    step = step_of(state, 6)
    Rows(state).extend(step, [parent], 0, limited=False)
    assert not step.forked and not child.block_ids
    step = step_of(state, 6)
    Rows(state).extend(step, [parent], 0, limited=False)
    assert step.forked == [child] and not state.forks.by_parent
    assert child.block_ids == parent.block_ids
    assert child.num_computed_tokens == 9
    # both may write the last block of the prompt next: the first of them copies it
    step = step_of(state, 6)
    Rows(state).extend(step, [parent], 0, limited=False)
    assert rows_of(step) == {"p": (10, 1)}
    assert [copy.request_id for copy in step.copies] == ["p"]


def test_a_policy_that_does_not_mix_gets_rows_of_one_kind() -> None:
    state = parts(policy="phase-aligned")
    wide, narrow = numbered("wide", 0, 9), numbered("narrow", 1, 5)
    run(state, wide, narrow)
    computed(state, narrow)
    # a token is left for the request behind, though its row is of the other kind
    for kind, expected in ((True, {"wide": (0, 3)}), (False, {"narrow": (5, 1)})):
        step = step_of(state, 4, wide=kind)
        extend(state, step, list(state.running.requests))
        assert rows_of(step) == expected
