"""Each policy's own promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.outputs import StepResult
from paceline.core.policies import POLICIES, FcfsPolicy, PolicyContext
from paceline.core.request import Request
from paceline.core.slo import Slo
from paceline.errors import ConfigError
from tests.core.machine import Machine
from tests.driving import Driver, make_request


def order_of_admission(policy: str, *requests: Request, **settings: float) -> list[str]:
    """One slot, held by a blocker until all of ``requests`` wait."""
    driver = Driver(max_num_seqs=1, policy=policy, num_blocks=256, max_model_len=900, **settings)
    driver.add(make_request("blocker", [999], 2, arrival=-1.0))
    driver.step()
    driver.add(*requests)
    driver.run()
    return [new.request_id for plan in driver.plans for new in plan.new_requests][1:]


@pytest.mark.parametrize("by_step", [True, False])
def test_a_policy_is_told_all_tokens_by_the_step_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch, by_step: bool
) -> None:
    told: list[tuple[str, int, int]] = []
    steps: list[int] = []

    class Counting(FcfsPolicy):
        def served(self, request: Request, num_prompt: int, num_output: int) -> None:
            told.append((request.request_id, num_prompt, num_output))

    class CountingSteps(FcfsPolicy):
        def sampled(self, requests: Sequence[Request]) -> None:
            steps.append(len(requests))

    monkeypatch.setitem(POLICIES, "counting", CountingSteps if by_step else Counting)
    driver = Driver(policy="counting", enable_prefix_caching=False)
    driver.add(make_request("a", 7, 3), make_request("b", 4, 2))
    driver.run()
    prompts = [entry for entry in told if entry[1]]
    if by_step:
        assert (told, steps) == ([], [2, 2, 1])
    else:
        assert prompts == [("a", 7, 0), ("b", 4, 0)]
        assert sorted(entry for entry in told if entry not in prompts) == [
            *3 * [("a", 0, 1)],
            *2 * [("b", 0, 1)],
        ]


def test_a_policy_is_told_each_token_of_a_step_that_brings_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[list[str]] = []

    class CountingSteps(FcfsPolicy):
        def sampled(self, requests: Sequence[Request]) -> None:
            steps.append([request.request_id for request in requests])

    monkeypatch.setitem(POLICIES, "counting", CountingSteps)
    driver = Driver(policy="counting")
    driver.add(make_request("a", 7, 9), make_request("b", 4, 9))
    plan = driver.scheduler.schedule(0.0)
    driver.scheduler.update(plan, StepResult(plan.step_id, ((1, 2, 3), (4,))), 1.0)
    assert steps == [["a", "a", "a", "b"]]


def test_a_policy_of_another_package_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FcfsPolicy

    class Partial:
        """As one that was written before ``later`` and ``sampled`` came."""

        def __init__(self, context: PolicyContext) -> None:
            self._policy = whole(context)

        def __getattr__(self, name: str) -> Any:
            if name in ("sampled", "served"):
                raise AttributeError(name)
            return getattr(self._policy, name)

    monkeypatch.setitem(POLICIES, "partial", Partial)
    with pytest.raises(ConfigError, match=r"'partial' \(.*Partial\) has no sampled, served;"):
        Driver(policy="partial")


def test_sjf_runs_short_work_first_but_not_for_ever() -> None:
    def order(policy: str) -> list[str]:
        return order_of_admission(
            policy,
            make_request("long", range(100, 500), 64, arrival=0.0),
            make_request("much later", 4, 2, arrival=1000.0),
            make_request("short", 4, 2, arrival=1.0),
        )

    assert order("sjf") == ["short", "long", "much later"]
    assert order("fcfs") == ["long", "short", "much later"]


def test_sjf_learns_which_requests_are_short() -> None:
    driver = Driver(max_num_seqs=1, policy="sjf", num_blocks=256, vocab_size=5)
    ends_soon = {"stop_token_ids": frozenset(range(5))}
    for index in range(10):
        # equal prompts and max_tokens: only the class tells them apart
        driver.add(
            make_request(f"s{index}", [index], 40, slo=Slo(slo_class="snappy"), **ends_soon),
            make_request(f"w{index}", [index], 40, slo=Slo(slo_class="wordy")),
        )
    driver.run()
    driver.add(make_request("blocker", [7], 2))
    driver.step()
    wordy = make_request("wordy", [3], 40, slo=Slo(slo_class="wordy"))
    snappy = make_request("snappy", [3], 40, slo=Slo(slo_class="snappy"), **ends_soon)
    driver.add(wordy, snappy)
    driver.run()
    assert [n.request_id for p in driver.plans for n in p.new_requests][-2:] == ["snappy", "wordy"]


def test_deadline_runs_the_least_slack_first() -> None:
    patient = make_request("patient", 4, 2, arrival=0.0)
    urgent = make_request("urgent", 4, 2, arrival=0.3, slo=Slo(ttft=0.5))
    long_and_urgent = make_request("long", range(100, 800), 2, arrival=0.3, slo=Slo(ttft=0.5))
    batch = make_request("batch", 4, 2, arrival=0.0, slo=Slo(deadline=500.0))
    assert order_of_admission("deadline", batch, patient, urgent, long_and_urgent) == [
        "long",
        "urgent",
        "patient",
        "batch",
    ]


# static preempts none for a request that waits
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"static"}))
def test_best_effort_gives_up_its_place_and_its_slot_but_does_not_starve(policy: str) -> None:
    machine = Machine(max_num_seqs=1, policy=policy, num_blocks=128, coalesce_window_s=0.0)
    batch = make_request("batch", 4, 30, arrival=machine.now, slo=Slo(best_effort=True), tenant="b")
    machine.add(batch)
    machine.step()
    for index in range(60):
        machine.add(make_request(f"r{index}", 4, 2, arrival=machine.now, tenant="a"))
        machine.step()
        machine.step()
    admitted = [n.request_id for p in machine.plans for n in p.new_requests]
    assert admitted[0] == "batch"
    assert admitted[1] == "r0", "a request that is not best-effort takes the slot"
    assert "batch" in admitted[2:], "it has its share of the places that come free"
    machine.run()


# ---------------------------------------------------------------- fair


def test_phase_aligned_never_mixes() -> None:
    driver = Driver(policy="phase-aligned", coalesce_window_s=2.0, coalesce_size=3)
    for index in range(12):
        driver.add(make_request(f"r{index}", range(index, index + 20), 6, arrival=driver.now))
        driver.step()
    driver.run()
    for plan in driver.plans:
        kinds = {row.num_tokens == 1 for row in plan.rows}
        assert len(kinds) == 1, "single tokens and prompts in one step"


def test_arrivals_are_held_for_the_window_or_until_enough_are_there() -> None:
    def admissions(window: float, size: int) -> list[int]:
        driver = Driver(policy="phase-aligned", coalesce_window_s=window, coalesce_size=size)
        driver.add(make_request("stream", 4, 60))
        driver.step()
        for index in range(6):
            driver.add(make_request(f"r{index}", range(index, index + 9), 2, arrival=driver.now))
            driver.step()
        driver.run()
        return [len(p.new_requests) for p in driver.plans if p.new_requests][1:]

    assert admissions(0.0, 16) == [1] * 6
    # in phase: where no stream runs that they would interrupt, nobody waits for anybody
    alone = Driver(policy="phase-aligned", coalesce_window_s=1000.0, coalesce_size=16)
    alone.add(make_request("alone", 9, 2))
    assert [new.request_id for new in alone.plan().new_requests] == ["alone"]
    assert admissions(4.0, 16)[0] == 5, "the first waited for four seconds' worth of others"
    assert admissions(1000.0, 3) == [3, 3]


def test_static_admits_only_when_the_batch_is_empty() -> None:
    driver = Driver(policy="static", max_num_seqs=3, num_blocks=256)
    driver.add(*(make_request(f"r{index}", 4, 2 + 4 * index) for index in range(7)))
    driver.add(make_request("nightly", 4, 2, slo=Slo(best_effort=True)))
    driver.run()
    batches = [(step, [new.request_id for new in plan.new_requests])
               for step, plan in enumerate(driver.plans) if plan.new_requests]  # fmt: skip
    # each batch lasts for its longest output: 10, 22 and 26 tokens
    assert batches == [
        (0, ["r0", "r1", "r2"]),
        (10, ["r3", "r4", "r5"]),
        (32, ["r6", "nightly"]),
    ]
    # a batch is those that waited then, though their prompts take several steps
    driver = Driver(policy="static", max_num_batched_tokens=16, num_blocks=256)
    driver.add(*(make_request(f"r{index}", range(index, index + 14), 9) for index in range(3)))
    driver.step()
    driver.add(make_request("later", range(50, 60), 2, arrival=driver.now))
    driver.run()
    began = {new.request_id: step for step, plan in enumerate(driver.plans)
             for new in plan.new_requests}  # fmt: skip
    assert max(began[f"r{index}"] for index in range(3)) < 5 < 9 <= began["later"]
    # one of them that ends before it is started leaves no place to those that came later
    driver = Driver(policy="static", max_num_batched_tokens=16, num_blocks=256)
    driver.add(*(make_request(f"r{index}", range(index, index + 14), 9) for index in range(3)))
    driver.step()
    driver.scheduler.abort(["r2"])
    driver.add(make_request("later", range(50, 60), 2, arrival=driver.now))
    driver.run()
    began = {new.request_id: step for step, plan in enumerate(driver.plans)
             for new in plan.new_requests}  # fmt: skip
    assert began["r1"] + 8 < began["later"]
    # and urgent requests wait like others
    driver = Driver(policy="static", num_blocks=256)
    driver.add(make_request("long", 4, 30, slo=Slo(best_effort=True)))
    driver.step()
    driver.add(make_request("urgent", 4, 2, arrival=driver.now, slo=Slo(ttft=1.0)))
    driver.run()
    assert driver.finished["urgent"].first_scheduled_time >= 30.0


def test_deadline_halves_or_doubles_the_patience_of_a_request_with_its_priority() -> None:
    policy = Driver(policy="deadline").scheduler.policy
    keys = {p: policy.key(make_request("r", 8, priority=p)) for p in (-9, -4, -1, 0, 1, 4, 9)}
    assert (keys[-1], keys[0], keys[1]) == (5.0, 10.0, 20.0)
    assert keys[-9] == keys[-4] > 0.0 and keys[9] == keys[4], "no level starves another"
    aimed = Slo(ttft=1.0)
    with_target = {policy.key(make_request("r", 8, priority=p, slo=aimed)) for p in (-4, 0, 4)}
    assert len(with_target) == 1
