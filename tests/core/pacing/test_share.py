"""What best effort gets beside promised work that would fill the engine, and what that costs."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.policies import POLICIES
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.core.tier import Tier
from paceline.errors import QueueFullError
from tests.core.machine import Machine
from tests.driving import make_request

NIGHT = Slo(slo_class="batch", best_effort=True)
CHAT = Slo(slo_class="chat", ttft=1.0)


class Flood:
    """An engine whose places are always wanted by requests with a target."""

    def __init__(self, **config: object) -> None:
        self.machine = Machine(**({"queue_timeout_s": 30.0} | config))  # type: ignore[arg-type]
        self.check = self.machine.scheduler.check_integrity
        self.machine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
        self.number = 0
        # (when, rows of one token of best effort, and of all)
        self.served: deque[tuple[float, int, int]] = deque()
        self.nights: dict[str, Request] = {}

    def night(self, prompt: int = 5, output: int = 40) -> Request:
        request = make_request(
            f"night{len(self.nights)}", prompt, output, arrival=self.machine.now, slo=NIGHT
        )
        self.nights[request.request_id] = request
        self.machine.add(request)
        return request

    def step(self, prompt: int = 5, output: int = 40, waiting: int = 12) -> None:
        machine = self.machine
        while len(machine.scheduler.state.waiting.ordinary) < waiting:
            self.number += 1
            name = f"chat{self.number}"
            machine.add(make_request(name, prompt, output, arrival=machine.now, slo=CHAT))
        machine.step()
        rows = machine.plans[-1].rows
        narrow = [row.request_id for row in rows if row.num_tokens == 1]
        own = sum(name in self.nights for name in narrow)
        self.served.append((machine.now, own, len(narrow)))

    def shares(self, seconds: float) -> list[float]:
        """The share of output tokens that best effort got in each of so many seconds."""
        found: dict[int, list[int]] = {}
        for at, own, every in self.served:
            sums = found.setdefault(int(at / seconds), [0, 0])
            sums[0] += own
            sums[1] += every
        # the last one is not whole
        return [own / every for _, (own, every) in sorted(found.items())][:-1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_beside_a_flood_best_effort_gets_its_share_of_places_and_no_more(policy: str) -> None:
    flood = Flood(max_num_seqs=8, policy=policy, best_effort_share=0.1, coalesce_window_s=0.0)
    while flood.machine.now < 31.0:
        if not flood.machine.scheduler.state.waiting.num_tokens[Tier.BACKGROUND]:
            flood.night()
        flood.step()
    shares = flood.shares(10.0)
    assert min(shares) >= 0.08, shares
    # whose places stay empty until a batch has ended, which is left over
    if policy != "static":
        assert sum(shares) / len(shares) <= 0.12, shares


def test_without_a_share_best_effort_gets_what_is_left_over_alone() -> None:
    flood = Flood(max_num_seqs=4, best_effort_share=0.0)
    night = flood.night()
    while flood.machine.now < 20.0:
        flood.step()
    assert night.first_scheduled_time is None


def test_prompts_in_every_step_leave_best_effort_its_share_of_the_time() -> None:
    """Places are plenty here; what is short is the time of steps, all of which prompts with a
    target would take."""
    flood = Flood(max_num_seqs=64, best_effort_share=0.1)
    night = flood.night(prompt=2000, output=4)
    while night.request_id not in flood.machine.finished and flood.machine.now < 60.0:
        flood.step(prompt=300, output=2, waiting=30)
    # 2,000 tokens of 1 ms are 2 s: ten times that, and a start
    assert flood.machine.now <= 26.0


def test_streams_do_not_keep_a_best_effort_stream_from_going_on() -> None:
    flood = Flood(max_num_seqs=64, best_effort_share=0.05)
    night = flood.night(output=20)
    flood.step(prompt=300, output=2, waiting=30)
    while night.request_id not in flood.machine.finished and flood.machine.now < 60.0:
        flood.step(prompt=300, output=2, waiting=30)
    # a row in each step, of 0.65 s at most
    assert flood.machine.now <= 20 * 0.65


def test_a_best_effort_request_keeps_its_place_beside_a_flood_for_its_share() -> None:
    flood = Flood(max_num_seqs=4, best_effort_share=0.2)
    night = flood.night(output=3000)
    turns = []
    while flood.machine.now < 40.0:
        was = night.granted
        flood.step()
        if night.granted and not was:
            turns.append(flood.machine.now)
    # it has a quarter of the engine while it runs, and waits once it owes five seconds' share
    assert night.num_preemptions >= 1
    assert 0.15 <= sum(own for _, own, _ in flood.served) / sum(n for *_, n in flood.served) <= 0.25
    assert max(b - a for a, b in pairwise(turns)) <= 35.0


def test_what_nothing_promised_leaves_is_free() -> None:
    machine = Machine(max_num_seqs=4)
    for index in range(6):
        machine.add(make_request(f"night{index}", 5, 40, slo=NIGHT))
    for _ in range(20):
        machine.step()
    share = machine.scheduler._paced.share
    assert share.credit == 0.0
    assert not any(request.granted for request in machine.scheduler.requests)
    # a chat has a place in the step after it came
    machine.add(make_request("chat", 5, 4, arrival=machine.now, slo=CHAT))
    machine.step()
    assert "chat" in {row.request_id for row in machine.plans[-1].rows}


@pytest.mark.parametrize("deadline", [None, 500.0])
def test_what_is_left_over_pays_for_seconds_to_come(deadline: float | None) -> None:
    """Work with a deadline was served for ten seconds, so the flood that follows pays nothing for
    as long; nothing is paid in advance for background work, which nothing else bounds."""
    flood = Flood(max_num_seqs=4, best_effort_share=0.2)
    slo = Slo(slo_class="batch", best_effort=True, deadline=deadline)
    for index in range(4):
        flood.machine.add(make_request(f"first{index}", 5, 4000, slo=slo))
    while flood.machine.now < 10.0:
        # one chat at a time: there is promised work, which leaves nearly all
        if not flood.machine.scheduler.state.running.most_tokens[Tier.ORDINARY]:
            flood.number += 1
            name = f"one{flood.number}"
            flood.machine.add(make_request(name, 5, 4, arrival=flood.machine.now, slo=CHAT))
        flood.machine.step()
    share = flood.machine.scheduler._paced.share
    if deadline is None:
        # what a place of its own cost it
        assert share.credit > -0.5
    else:
        assert share.credit == pytest.approx(-2.0, abs=0.1)


def test_a_late_request_has_no_share_where_the_queue_timeout_bounds_its_wait() -> None:
    for timeout, served in ((30.0, False), (None, True)):
        flood = Flood(max_num_seqs=4, best_effort_share=0.1, queue_timeout_s=timeout)
        late = make_request("late", 5, 4, arrival=flood.machine.now - 2.0, slo=CHAT)
        flood.step()
        flood.machine.add(late)
        while flood.machine.now < 20.0:
            flood.step()
        assert (late.first_scheduled_time is not None) is served
        if timeout is not None:
            while flood.machine.now < 32.0:
                flood.step()
            assert "late" not in {r.request_id for r in flood.machine.scheduler.requests}


def test_a_late_answer_longer_than_the_queue_timeout_keeps_its_rows() -> None:
    """The timeout bounds the wait for a first token, not the answer behind it."""
    flood = Flood(max_num_seqs=4, best_effort_share=0.1, queue_timeout_s=10.0)
    flood.step()
    late = make_request("late", 5, 1500, arrival=flood.machine.now - 2.0, slo=CHAT)
    flood.machine.add(late)
    while late.first_scheduled_time is None:
        # the flood ebbs away, and what it leaves is the late request's
        flood.step(waiting=0)
    assert late.tier is Tier.DEMOTED
    began, steps = flood.machine.now, 0
    while "late" not in flood.machine.finished and steps < 3000:
        flood.step()
        steps += 1
    assert flood.machine.now > began + 10.0 and late.num_preemptions == 0
    # it sits out one step in forty at most, where prompts take the step's time
    assert steps <= 1540


@pytest.mark.parametrize("slots, others", [(1, 0), (2, 1), (4, 2), (8, 5), (16, 12)])
def test_late_requests_leave_free_the_root_of_the_slots_of_others(slots: int, others: int) -> None:
    """One that began would keep its slot while requests come that can still be on time."""
    machine = Machine(max_num_seqs=slots, queue_timeout_s=60.0)
    for index in range(slots):
        name = f"chat{index}"
        machine.add(make_request(name, 5, 10 * index + 10, arrival=machine.now, slo=CHAT))
    machine.step()
    share = machine.scheduler._paced.share
    # ordinary work has taken all of the engine for minutes
    share._ordinary_seconds, share._as_of = 60.0, machine.now
    late = make_request("late", 5, 4, arrival=machine.now - 2.0, slo=CHAT)
    # it is demoted for this one
    machine.add(late, make_request("on time", 5, 2, arrival=machine.now, slo=CHAT))
    while late.first_scheduled_time is None:
        machine.step()
    assert late.history.demoted
    assert len(machine.plans[-1].rows) - 1 == others


@pytest.mark.parametrize("tenants", [1, 3])
def test_no_tier_waits_for_ever_behind_another(tenants: int) -> None:
    """An endless flood of best effort with deadlines, and one request that asked for nothing."""
    machine = Machine(max_num_seqs=2, best_effort_share=0.1, policy="fair")
    night = make_request("night", 5, 4, arrival=machine.now, slo=NIGHT)
    number, added = 0, False
    while night.request_id not in machine.finished and machine.now < 120.0:
        state = machine.scheduler.state
        while len(state.waiting.ordinary) < 3 or state.waiting.num_tokens[Tier.DEADLINE_BATCH] < 20:
            number += 1
            name, tenant = f"r{number}", f"t{number % tenants}"
            promised = Slo(slo_class="b", best_effort=True, deadline=1000.0)
            for slo in (CHAT, promised):
                request = make_request(
                    name + (slo.slo_class), 5, 20, arrival=machine.now, slo=slo, tenant=tenant
                )
                machine.add(request)
        if not added and number > 9:
            added = True
            machine.add(night)
        machine.step()
    assert night.request_id in machine.finished


def bound(request: Request, before: float, share: float, longest: float) -> float:
    """Seconds in which a best-effort request has its place: the work of best effort before it and
    what is saved up or owed at the share, and one of the longest requests that run."""
    return (before + 2.0 * longest) / share + 22.0 + longest


def endless(policy: str, seed: int, num_events: int) -> int:
    """Random promised requests beyond capacity and random best effort; each of these has its place
    in bounded time. Returns how many there were."""
    rng = random.Random(seed)
    share = rng.choice((0.05, 0.2))
    machine = Machine(
        max_num_seqs=rng.choice((1, 2, 6)),
        policy=policy,
        best_effort_share=share,
        num_blocks=rng.choice((60, 8000)),
        priority_ageing_s=5.0,
        coalesce_window_s=0.05,
        queue_timeout_s=20.0,
        max_num_waiting=40,
    )
    machine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
    waiting: dict[str, tuple[Request, float]] = {}
    began = number = 0
    longest = 60 * 0.018 + 0.2
    for _ in range(num_events):
        while len(machine.scheduler.state.waiting.ordinary) < 4:
            number += 1
            slo = rng.choice((CHAT, CHAT, Slo()))
            chat = make_request(
                f"c{number}", rng.randint(1, 90), rng.randint(1, 60),
                arrival=machine.now, slo=slo, priority=rng.randrange(2),
            )  # fmt: skip
            try:
                machine.add(chat)
            except QueueFullError:
                break
        if len(waiting) < 3 and rng.random() < 0.02:
            number += 1
            night = make_request(
                f"n{number}", rng.randint(1, 90), rng.randint(1, 60), arrival=machine.now, slo=NIGHT
            )
            try:
                machine.add(night)
            except QueueFullError:
                continue
            before = longest * (len(waiting) + 1)
            waiting[night.request_id] = night, machine.now + bound(night, before, share, longest)
        machine.step()
        for name, (request, latest) in list(waiting.items()):
            if request.first_scheduled_time is not None:
                del waiting[name]
                began += 1
            else:
                assert machine.now <= latest, f"{policy} {seed}: {name} waits for too long"
    return began


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_best_effort_waits_no_longer_than_its_share_allows(policy: str, seed: int) -> None:
    assert endless(policy, seed, 1000)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_best_effort_waits_no_longer_over_a_hundred_thousand_events(policy: str) -> None:
    assert sum(endless(policy, seed, 12_500) for seed in range(8)) > 100
