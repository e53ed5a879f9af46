"""Under ``fair`` who was served least goes first, and nobody waits for all others."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.policies import POLICIES, FairPolicy
from paceline.core.policies.fair import _SAVED_STEPS, OUTPUT_WEIGHT, PROMPT_WEIGHT
from paceline.core.queues.request_queue import RequestQueue, WaitingQueue
from paceline.core.slo import Slo
from paceline.core.tier import Tier
from tests.core.machine import Machine
from tests.driving import Driver, adapter_use, ask, make_request


def counter_of(policy: FairPolicy, tenant: str, tier: Tier = Tier.ORDINARY) -> float:
    """Weighted tokens served to a tenant's requests of one tier."""
    return policy._queues[tier].counter(tenant)


def test_a_light_tenant_is_not_held_up_by_a_flood() -> None:
    def position(policy: str) -> int:
        driver = Driver(max_num_seqs=2, policy=policy, num_blocks=256)
        driver.add(*(make_request(f"flood-{i}", [i, 1, 2], 6, tenant="heavy") for i in range(50)))
        for _ in range(3):
            driver.step()
        driver.add(make_request("light", [7, 7], 6, arrival=3.0, tenant="light"))
        driver.run()
        return [n.request_id for p in driver.plans for n in p.new_requests].index("light")

    assert position("fcfs") == 50
    assert position("fair") <= 4


def test_a_flood_of_one_adapter_holds_no_other_up() -> None:
    """One tenant asks for all of them, and for the model itself."""

    def positions(policy: str) -> list[int]:
        driver = Driver(max_num_seqs=2, policy=policy, num_blocks=256)
        for index in range(50):
            request = make_request(f"flood-{index}", [index, 1, 2], 6)
            driver.add(ask(request, adapter=adapter_use(1)))
        for _ in range(3):
            driver.step()
        driver.add(ask(make_request("rare", [7, 7], 6, arrival=3.0), adapter=adapter_use(2)))
        driver.add(make_request("base", [7, 8], 6, arrival=3.0))
        driver.run()
        order = [n.request_id for p in driver.plans for n in p.new_requests]
        return [order.index("rare"), order.index("base")]

    assert positions("fcfs") == [50, 51]
    assert max(positions("fair")) <= 5


def test_cached_prefixes_are_not_charged() -> None:
    driver = Driver(policy="fair", block_size=4)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    driver.add(make_request("a", 13, 1, tenant="x"))
    driver.run()
    assert counter_of(policy, "x") == PROMPT_WEIGHT * 13 + OUTPUT_WEIGHT * 1
    driver.add(make_request("b", 13, 1, tenant="y"))
    driver.run()
    # nobody waited, so it began where the other one was
    cost = counter_of(policy, "y") - counter_of(policy, "x")
    assert cost == PROMPT_WEIGHT * 1 + OUTPUT_WEIGHT * 1


def test_output_is_charged_once_a_step_however_many_tokens_it_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or a step's decision costs a third more."""
    driver = Driver(policy="fair", max_num_seqs=8, num_blocks=400)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    for number in range(8):
        driver.add(make_request(f"r{number}", 4, 9, tenant=f"t{number % 2}"))
    while len(driver.scheduler._running.requests) < 8:
        driver.step()
    turns = policy._queues[Tier.ORDINARY]
    before = counter_of(policy, "t0"), counter_of(policy, "t1")
    charged = []
    charge = turns.charge
    monkeypatch.setattr(turns, "charge", lambda tokens: charged.append(tokens) or charge(tokens))
    driver.step()
    assert charged == [{"t0": 4 * OUTPUT_WEIGHT, "t1": 4 * OUTPUT_WEIGHT}]
    assert counter_of(policy, "t0") == before[0] + 4 * OUTPUT_WEIGHT
    assert counter_of(policy, "t1") == before[1] + 4 * OUTPUT_WEIGHT
    driver.run()


def test_what_a_step_gave_to_many_raises_the_level_as_if_it_came_token_by_token() -> None:
    levels = []
    for at_once in (True, False):
        driver = Driver(policy="fair", max_num_seqs=3, num_blocks=400)
        policy = driver.scheduler.policy
        assert isinstance(policy, FairPolicy)
        for name in "abc":
            driver.add(make_request(name, 30, 40, tenant=name))
        driver.step()
        for name in "cde":
            driver.add(make_request(f"waiting-{name}", 8, 2, tenant=name))
        spent = [driver.scheduler._requests[name] for name in "abcabcaab"]
        for requests in [spent] if at_once else [[request] for request in spent]:
            policy.sampled(requests)
        turns = policy._queues[Tier.ORDINARY]
        assert turns._ahead
        levels.append([turns._level, *(counter_of(policy, name) for name in "abcde")])
        driver.run()
    assert levels[0] == pytest.approx(levels[1])


@pytest.mark.parametrize("steps", [1, 2, 9])
def test_a_preempted_request_is_charged_once(steps: int) -> None:
    """Its prompt takes seven steps."""
    driver = Driver(policy="fair", enable_prefix_caching=False, max_num_batched_tokens=16)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    driver.add(make_request("a", 100, 5, tenant="x"))
    for _ in range(steps):
        driver.step()
    running = driver.scheduler._running
    running.preempt(running.requests[0], driver.now)
    driver.run()
    assert counter_of(policy, "x") == PROMPT_WEIGHT * 100 + OUTPUT_WEIGHT * 5


class _CountsOnly(FairPolicy):
    """First come, first served; counts what tenants were served, and never looks at it."""

    def make_queue(self) -> WaitingQueue:
        super().make_queue()
        return RequestQueue()


# prompts of a and c, and of b
_LONG, _SHORT = 40, 4


def widest_gap(
    seed: int,
    num_seqs: int,
    num_blocks: int,
    *,
    steps: int = 150,
    fair: bool = True,
    weights: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Between the counters of two tenants that always have requests waiting, the widest, as part of
    what it may be. The one asks for ten times the other's tokens; others come once, or now and
    then."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "fair", FairPolicy if fair else _CountsOnly)
        driver = Driver(
            policy="fair",
            max_num_seqs=num_seqs,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            max_num_batched_tokens=64,
            tenant_weights=dict(zip("ab", weights, strict=True)),
        )
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    most = max(PROMPT_WEIGHT * _LONG, OUTPUT_WEIGHT * num_blocks * driver.cache.block_size)
    bound = sum(most / weight for weight in weights)
    bound += PROMPT_WEIGHT * _SAVED_STEPS * driver.config.max_num_batched_tokens / min(weights)
    once = rng.random() < 0.5
    num_added = 0
    widest = 0.0
    for _ in range(steps):
        waiting = {r.asked.tenant for r in driver.scheduler._waiting}
        for tenant in ("a", "b", "c"):
            if tenant not in waiting and (tenant != "c" or rng.random() < 0.05):
                longest = _SHORT if tenant == "b" else _LONG
                name = f"c{num_added}" if tenant == "c" and once else tenant
                for _ in range(3 if tenant == name else 1):
                    prompt = [rng.randrange(997) for _ in range(rng.randint(longest // 2, longest))]
                    output = rng.randint(1, longest // 2)
                    request = make_request(
                        f"{tenant}{num_added}", prompt, output, arrival=driver.now, tenant=name
                    )
                    driver.add(request)
                    num_added += 1
        driver.step()
        widest = max(widest, abs(counter_of(policy, "a") - counter_of(policy, "b")) / bound)
    driver.run()
    return widest


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.thorough)])
def test_the_vtc_bound_holds_between_backlogged_tenants(examples: int) -> None:
    """OSDI'24, theorem 1: |c_i - c_j| <= 2 max(w_p L, w_q M) while both have requests waiting, each
    part divided by its tenant's weight; and what one of them had saved up when its last request had
    just been let in: some steps' tokens."""

    @settings(max_examples=examples, deadline=None)
    @given(
        seed=st.integers(0, 10**6),
        num_seqs=st.integers(1, 6),
        num_blocks=st.integers(16, 60),
        weights=st.sampled_from([(1.0, 1.0), (1.0, 1.0), (4.0, 1.0), (0.25, 1.0), (3.0, 7.0)]),
    )
    def holds(seed: int, num_seqs: int, num_blocks: int, weights: tuple[float, float]) -> None:
        assert widest_gap(seed, num_seqs, num_blocks, weights=weights) <= 1.0

    holds()


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
def test_tokens_are_served_by_weight(weight: float) -> None:
    """Two floods, alike but for the weight: after a while their tokens are as their weights."""
    driver = Driver(policy="fair", max_num_seqs=2, tenant_weights={"a": weight})
    for number in range(800):
        for tenant in "ab":
            if sum(r.asked.tenant == tenant for r in driver.scheduler._waiting) < 3:
                name = f"{tenant}{number}"
                driver.add(make_request(name, 8, 4, arrival=driver.now, tenant=tenant))
        driver.step()
    served = {
        tenant: sum(len(tokens) for name, tokens in driver.tokens.items() if name[0] == tenant)
        for tenant in "ab"
    }
    assert served["a"] / served["b"] == pytest.approx(weight, rel=0.1)


def test_order_of_arrival_does_not_keep_the_vtc_bound() -> None:
    """Or the test above would tell nothing."""
    gaps = [widest_gap(seed, 4, 40, steps=600, fair=False) for seed in range(4)]
    assert min(gaps) > 1.5


def busy(policy: str, num_tokens: int = 60, **config: float) -> tuple[Machine, Callable[[], None]]:
    """A machine with two places, and what keeps four requests waiting there, each of a tenant that
    never asks again."""
    machine = Machine(policy=policy, max_num_seqs=2, **config)
    names = (f"once{number}" for number in count())

    def fill() -> None:
        others = sum(r.asked.tenant.startswith("once") for r in machine.scheduler._waiting)
        for _, name in zip(range(4 - others), names, strict=False):
            machine.add(make_request(name, num_tokens, 2, arrival=machine.now, tenant=name))

    return machine, fill


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
@pytest.mark.parametrize("slo", [Slo(), Slo(ttft=5.0)])
def test_who_asks_again_does_not_wait_for_all_who_ask_once(policy: str, slo: Slo) -> None:
    """There is always another one with nothing to his account. Twice as many as wait go first."""
    machine, fill = busy(policy)
    for number in range(20):
        start = machine.now
        machine.add(make_request(f"{number}", 60, 2, arrival=start, tenant="regular", slo=slo))
        while f"{number}" not in machine.finished:
            fill()
            machine.step()
            assert machine.now < start + 2.0, f"request {number} starves"


def test_what_a_tenant_takes_beside_others_is_not_held_against_it_by_those_who_ask_once() -> None:
    """Its best effort took what others left, its own requests what nobody else asked for."""
    machine, fill = busy("fair")
    for index in range(20):
        slo = Slo(best_effort=bool(index % 2))
        machine.add(make_request(f"r{index}", 60, 20, arrival=machine.now, tenant="r", slo=slo))
        machine.until_done()
    fill()
    machine.add(make_request("again", 60, 2, arrival=machine.now, tenant="r"))
    start = machine.now
    while "again" not in machine.finished:
        fill()
        machine.step()
        assert machine.now < start + 2.0


def test_tenants_without_number_are_not_remembered_for_ever() -> None:
    driver = Driver(policy="fair", max_num_seqs=1, num_blocks=400)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    driver.add(make_request("heavy", 300, 40, tenant="heavy"))
    driver.step()
    driver.add(make_request("waiting", 8, 2, tenant="waiting"))
    policy.served(driver.scheduler._requests["waiting"], 1, 0)
    before = counter_of(policy, "heavy"), counter_of(policy, "waiting")
    for number in range(25_000):
        policy.served(make_request("r", 2, tenant=f"t{number}"), 2, 0)
    assert sum(counter_of(policy, f"t{number}") > 0 for number in range(25_000)) <= 10_000
    assert (counter_of(policy, "heavy"), counter_of(policy, "waiting")) == before
    driver.scheduler.check_integrity()
    driver.run()


def test_half_of_those_who_do_not_wait_are_forgotten_however_many_wait() -> None:
    driver = Driver(policy="fair", max_num_seqs=1, num_blocks=400)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    driver.add(make_request("heavy", 300, 40, tenant="heavy"))
    driver.step()
    for number in range(6):
        driver.add(make_request(f"w{number}", 8, 2, tenant=f"w{number}"))
        policy.served(driver.scheduler._requests[f"w{number}"], 1, 0)
    policy._queues[Tier.ORDINARY]._most = 11
    # those who wait were served least of all; with the fifth of these there are too many
    for number in range(5):
        policy.served(make_request("r", 2, tenant=f"idle{number}"), 1000 + number, 0)
    assert [counter_of(policy, f"idle{number}") for number in range(5)] == [0, 0, 1002, 1003, 1004]
    assert all(counter_of(policy, f"w{number}") > 0 for number in range(6))
    driver.run()


def test_a_tenant_saves_up_a_few_steps_and_no_more_while_it_is_idle() -> None:
    driver = Driver(policy="fair", max_num_seqs=1, num_blocks=400, enable_prefix_caching=False)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    # a good deal more than four steps' 64 tokens is spent on one of them
    for index in range(40):
        driver.add(make_request(f"heavy{index}", 30, 2, tenant="heavy"))
    for _ in range(40):
        driver.step()
    spent = counter_of(policy, "heavy")
    assert spent > 600
    names = []
    for index in range(12):
        names.append(f"light{index}")
        driver.add(make_request(names[-1], 30, 2, arrival=driver.now, tenant="light"))
    saved = PROMPT_WEIGHT * _SAVED_STEPS * 64
    assert spent - saved <= counter_of(policy, "light") < spent
    driver.run()
    admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
    first = admitted.index("light0")
    # 34 each
    assert admitted[first : first + 7] == names[:7], "who saved up goes first"
    assert "light8" not in admitted[: first + 9], "but it does not push others aside"


@pytest.mark.parametrize("known", [True, False])
def test_who_had_the_machine_alone_does_not_wait_for_that_when_others_come(known: bool) -> None:
    driver = Driver(policy="fair", max_num_seqs=2, num_blocks=400, enable_prefix_caching=False)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    if known:
        driver.add(make_request("early", 8, 2, tenant="heavy"))
        driver.run()
    for index in range(20):
        driver.add(make_request(f"alone{index}", 30, 4, arrival=driver.now, tenant="light"))
        driver.run()
    alone = counter_of(policy, "light")
    assert alone >= 20 * (PROMPT_WEIGHT * 30 + OUTPUT_WEIGHT * 4)
    for index in range(20):
        driver.add(make_request(f"heavy{index}", 30, 4, arrival=driver.now, tenant="heavy"))
    # whoever floods has saved up nothing
    assert counter_of(policy, "heavy") == alone
    driver.step()
    driver.add(make_request("light", 30, 4, arrival=driver.now, tenant="light"))
    driver.run()
    admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
    assert "light" in admitted[-19:-16], "after the two that ran, before all the others"


def test_tenants_that_come_back_share_what_can_be_saved_and_go_in_that_order() -> None:
    driver = Driver(policy="fair", max_num_seqs=1, num_blocks=400, enable_prefix_caching=False)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    for index in range(60):
        driver.add(make_request(f"heavy{index}", 30, 2, tenant="heavy"))
    for _ in range(40):
        driver.step()
    spent = counter_of(policy, "heavy")
    assert spent > 5 * 64
    names = ["first", "second", "third", "fourth"]
    for name in names:
        driver.add(make_request(name, 30, 2, arrival=driver.now, tenant=name))
    saved = [spent - counter_of(policy, name) for name in names]
    # one of the others waits before the first comes, and so on
    most = PROMPT_WEIGHT * _SAVED_STEPS * 64
    assert saved == pytest.approx([most / others for others in (1, 2, 3, 4)])
    driver.run()
    admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
    assert [name for name in admitted if name in names] == names


@pytest.mark.parametrize("num_tokens", [60, 400])
def test_who_has_many_waiting_does_not_wait_for_all_who_ask_once(num_tokens: int) -> None:
    """These are light, each of them, and all together more than the machine can do."""
    machine, fill = busy("fair", num_tokens)
    fill()
    own = [f"own{index}" for index in range(20)]
    machine.add(
        *(make_request(name, num_tokens, 2, arrival=machine.now, tenant="own") for name in own)
    )
    fill()
    machine.step()
    fill()
    assert any(r.boosted for r in machine.scheduler._waiting if r.asked.tenant != "own")
    before = 0
    for name in own[:10]:
        while name not in machine.finished:
            fill()
            machine.step()
            assert len(machine.finished) - before <= 50, f"{name} waits for all others"
        before = len(machine.finished)


def test_what_one_kind_of_requests_was_served_lifts_nobody_of_another_kind() -> None:
    """Ordinary and best-effort requests wait in queues of their own."""
    driver = Driver(policy="fair", max_num_seqs=1, num_blocks=400, enable_prefix_caching=False)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    night = Slo(best_effort=True)
    for index in range(40):
        driver.add(make_request(f"night{index}", 30, 2, tenant="night", slo=night))
    for _ in range(40):
        driver.step()
    assert counter_of(policy, "night", Tier.BACKGROUND) > 7 * 64
    # the level of that queue is high now
    driver.add(make_request("other", 30, 2, arrival=driver.now, tenant="other", slo=night))
    driver.add(make_request("a", 30, 2, arrival=driver.now, tenant="a"))
    driver.add(make_request("b", 30, 2, arrival=driver.now, tenant="b"))
    assert counter_of(policy, "other", Tier.BACKGROUND) > 3 * 64
    assert counter_of(policy, "a") == counter_of(policy, "b") == counter_of(policy, "night") == 0.0
    driver.run()


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.thorough)])
def test_service_goes_to_whoever_was_served_least_as_if_each_were_served_at_once(
    examples: int,
) -> None:
    settings(max_examples=examples, deadline=None)(given(st.integers(0, 10**6))(_serve_in_order))()


def _serve_in_order(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(policy="fair", max_num_seqs=2, num_blocks=400)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    for index in range(30):
        slo = rng.choice((Slo(), Slo(ttft=9e3), Slo(ttft=9e3, best_effort=True)))
        tenant = rng.choice("abcdef")
        driver.add(make_request(f"r{index}", rng.randint(1, 40), 9, tenant=tenant, slo=slo))
        if rng.random() < 0.3:
            driver.step()
    waiting = driver.scheduler._paced.waiting_targets.targeted
    served = {tenant: counter_of(policy, tenant) for tenant in waiting}
    left = {tenant: list(own) for tenant, own in waiting.items()}
    expected = []
    while left:
        tenant = min(left, key=lambda name: (served[name], left[name][0].order))
        request = left[tenant].pop(0)
        expected.append(request.request_id)
        output = driver.scheduler.state.work.output_tokens(request)
        served[tenant] += PROMPT_WEIGHT * request.num_new_tokens + OUTPUT_WEIGHT * output
        if not left[tenant]:
            del left[tenant]
    assert [request.request_id for request in policy.service_order(waiting)] == expected
    driver.scheduler.check_integrity()
    driver.run()


def test_service_order_looks_at_no_more_tenants_than_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(policy="fair", max_num_seqs=1)
    policy = driver.scheduler.policy
    assert isinstance(policy, FairPolicy)
    for index in range(500):
        driver.add(make_request(f"r{index}", 4, 1, tenant=f"t{index}", slo=Slo(ttft=9e3)))
    looks = []
    turns = policy._queues[Tier.ORDINARY]
    counter = turns.counter
    monkeypatch.setattr(turns, "counter", lambda tenant: looks.append(tenant) or counter(tenant))
    first = list(islice(policy.service_order(driver.scheduler._paced.waiting_targets.targeted), 10))
    assert [request.request_id for request in first] == [f"r{index}" for index in range(10)]
    assert len(looks) < 30
    # and of many tenants, the first alone: the others are told when their turn comes nearer
    first = list(policy.service_order(driver.scheduler._paced.waiting_targets.targeted))
    assert [request.request_id for request in first] == [f"r{index}" for index in range(64)]


# ---------------------------------------------------------------- phase-aligned
