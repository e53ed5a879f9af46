"""The virtual clock, by hand: when steps start and end, what callers see, who is woken when."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.routing import LeastOutstanding, PredictedRouter, make_router
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Disaggregation, Pool, ReplicaSpec
from paceline.sim.replica import Delays, ReplicaConfig
from paceline.sim.simulator import Simulator, Totals
from paceline.sim.step_times.base import FixedStepTimes, StepTimes
from paceline.sim.transfer import KVTransfer
from tests.sim.workloads import bursty


def engine(**fields: Any) -> ReplicaConfig:
    scheduler = SchedulerConfig(
        max_num_batched_tokens=fields.pop("budget", 100),
        max_num_seqs=8,
        max_model_len=4096,
        schedule_ahead_s=fields.pop("lead", 0.002),
    )
    cache = CacheConfig(
        block_size=16,
        num_blocks=fields.pop("num_blocks", 512),
        enable_prefix_caching=fields.pop("caching", False),
    )
    return ReplicaConfig(scheduler=scheduler, cache=cache, **fields)


def serve(
    workload: list[Arrival] | Iterator[Arrival], pools: Any, **options: Any
) -> tuple[list[Served], Totals]:
    """In order of arrival."""
    arrivals = list(workload)
    served: dict[int, Served] = {}

    def consume(record: Served) -> None:
        assert served.setdefault(id(record.arrival), record) is record, "told twice"

    totals = Simulator(pools, consume, **options).run(arrivals)
    return [served[id(arrival)] for arrival in arrivals], totals


def one(times: StepTimes, **fields: Any) -> Pool:
    return Pool.single(engine(**fields), times)


def test_one_request_by_hand() -> None:
    # 250 tokens in chunks of 100, 100, 50: the third step's token is the first; two more follow
    ((only,), totals) = serve([Arrival(1.0, 250, 3)], one(FixedStepTimes(0.5, 0.001)))
    chunks = 0.6 + 0.6 + 0.55
    assert only.first_scheduled == 1.0
    assert only.first_token == pytest.approx(1.0 + chunks)
    assert only.last_token == pytest.approx(1.0 + chunks + 2 * 0.501)
    assert only.ttft == pytest.approx(chunks)
    assert only.tpot == pytest.approx(0.501)
    assert only.e2e == pytest.approx(chunks + 1.002)
    assert (totals.num_steps, totals.num_arrivals, totals.num_refused) == (5, 1, 0)
    assert totals.busy_seconds == pytest.approx((chunks + 1.002,))


@pytest.mark.parametrize(
    ("depth", "lead", "planned", "first"),
    [(1, 0.002, 31.0, 32.0), (2, 99.0, 31.0, 33.0), (2, 0.002, 30.998, 32.0)],
)
def test_an_arrival_waits_for_the_step_and_for_what_is_planned_ahead(
    depth: int, lead: float, planned: float, first: float
) -> None:
    # steps of 1 s, known to be that; it comes in the middle of one. Where the next is planned at
    # once, it is in the one after that; where it is planned shortly before it begins, in that
    early, late = Arrival(0.0, 10, 60), Arrival(30.5, 10, 2)
    (_, second), _ = serve([early, late], one(FixedStepTimes(1.0), pipeline_depth=depth, lead=lead))
    assert second.first_scheduled == pytest.approx(planned, abs=1e-5)
    assert second.first_token == pytest.approx(first)


def test_delays_outside_the_steps() -> None:
    pool = one(FixedStepTimes(1.0), delays=Delays(inbound=0.25, outbound=0.5, loop=0.125))
    (only,), _ = serve([Arrival(0.0, 10, 1)], pool)
    assert only.first_scheduled == 0.375
    assert only.ttft == 1.875


def test_what_can_never_fit_is_refused() -> None:
    # of the second there are not even ids
    (only, vast, fine), totals = serve(
        [Arrival(0.0, 5000, 1), Arrival(0.0, 10**11, 1), Arrival(0.0, 10, 1)],
        one(FixedStepTimes(1.0)),
    )
    assert only.refused and only.first_token is None and only.ttft is None
    assert vast.refused and vast.reason == "context limit"
    assert not fine.refused
    assert totals.num_refused == 2


def test_outputs_that_end_by_themselves_are_as_long_as_they_were() -> None:
    workload = list(bursty(60))
    (served, _) = serve(workload, one(FixedStepTimes(0.01), max_tokens=400, caching=True))
    assert [s.output_tokens for s in served] == [a.output_tokens for a in workload]


def test_the_policy_does_not_know_lengths_that_callers_did_not_ask_for() -> None:
    # all at once, the longest first: shortest-job-first reorders them only if it can know
    workload = [Arrival(0.0, 10, 41 - n) for n in range(40)]

    def order(max_tokens: int | None) -> list[int]:
        config = engine(max_tokens=max_tokens)
        config = replace(config, scheduler=replace(config.scheduler, policy="sjf", max_num_seqs=1))
        ended: list[int] = []
        pool = Pool.single(config, FixedStepTimes(0.01))
        Simulator(pool, lambda s: ended.append(s.output_tokens)).run(workload)
        return ended

    assert order(None) == sorted(order(None))
    assert order(400)[:3] == [41, 40, 39]


def test_prefixes_are_found_in_the_cache() -> None:
    shared = Arrival(0.0, 80, 4, prefix=(5, 6))
    again = [replace(shared, at=1.0), replace(shared, at=2.0, prefix=(5, 7))]
    served, _ = serve([shared, *again], one(FixedStepTimes(0.01), caching=True), prefix_block=32)
    assert [s.cached_tokens for s in served] == [0, 64, 32]


def test_the_same_seeded_workload_gives_the_same_answer() -> None:
    runs = [serve(bursty(80), one(FixedStepTimes(0.01), caching=True))[0] for _ in range(2)]
    assert runs[0] == runs[1]


def test_arrivals_out_of_order_and_unknown_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"arrival 1 at 1\.0 s comes before"):
        serve([Arrival(2.0, 1, 1), Arrival(1.0, 1, 1)], one(FixedStepTimes(0.1)))
    with pytest.raises(ConfigError, match="no pool serves model 'b'"):
        serve([Arrival(0.0, 1, 1, model="b")], {"a": one(FixedStepTimes(0.1))})


def test_models_have_pools_of_their_own() -> None:
    pools = {"slow": one(FixedStepTimes(1.0)), "fast": one(FixedStepTimes(0.1))}
    workload = [Arrival(0.0, 10, 1, model="slow"), Arrival(0.0, 10, 1, model="fast")]
    (slow, fast), _ = serve(workload, pools)
    assert (slow.ttft, fast.ttft) == (1.0, 0.1)
    assert slow.replica != fast.replica


def test_affinity_finds_more_in_the_caches_than_taking_turns() -> None:
    workload = [Arrival(0.1 * n, 200, 2, prefix=(n % 3,) * 4) for n in range(60)]

    def cached(router: str) -> int:
        spec = ReplicaSpec(engine(caching=True, num_blocks=64), FixedStepTimes(0.01))
        served, _ = serve(workload, Pool((spec,) * 4, make_router(router)), prefix_block=48)
        assert {s.replica for s in served} <= {0, 1, 2, 3}
        return sum(s.cached_tokens for s in served)

    assert cached("prefix-affinity") > cached("round-robin")


def split(latency: float, *, num_blocks: int = 512, between_steps: bool = False) -> Pool:
    prefill = ReplicaSpec(engine(), FixedStepTimes(1.0))
    decode = ReplicaSpec(engine(caching=True, num_blocks=num_blocks), FixedStepTimes(0.1))
    transfer = KVTransfer(
        bytes_per_token=10.0, bandwidth=1000.0, latency=latency, between_steps=between_steps
    )
    router = LeastOutstanding()
    return Pool((prefill,), router, Disaggregation((decode,), transfer, LeastOutstanding()))


def test_disaggregation_by_hand() -> None:
    plans: list[tuple[int, SchedulerOutput]] = []
    (only,), totals = serve(
        [Arrival(0.0, 96, 4)],
        split(0.5),
        on_plan=lambda replica, plan, now, start, end: plans.append((replica, plan)),
    )
    # one step of 1 s, 0.5 s + 96 * 10 / 1000 s on the link, three steps of 0.1 s
    assert only.first_token == 1.0
    assert only.last_token == pytest.approx(1.0 + 0.5 + 0.96 + 3 * 0.1)
    assert (only.output_tokens, only.replica, only.cached_tokens) == (4, 1, 0)
    # six whole blocks arrived, so the decode replica computes the first output token alone
    assert [(r, plan.rows[0][1:3]) for r, plan in plans] == [
        (0, (0, 96)),
        (1, (96, 1)),
        (1, (97, 1)),
        (1, (98, 1)),
    ]
    assert totals.num_arrivals == 1


@pytest.mark.parametrize("between_steps", [False, True])
def test_a_prompt_may_leave_between_steps_alone(between_steps: bool) -> None:
    workload = [Arrival(0.0, 96, 4), Arrival(0.1, 96, 4)]
    (first, second), _ = serve(workload, split(0.0, between_steps=between_steps))
    assert [s.first_token for s in (first, second)] == [1.0, 2.0]
    # the next prompt's step is under way when the first one is asked for; nothing is behind it
    left = 2.0 if between_steps else 1.0
    assert first.last_token == pytest.approx(left + 0.96 + 3 * 0.1)
    assert second.last_token is not None and second.last_token >= 2.0 + 0.96 + 3 * 0.1


def test_disaggregated_requests_wait_where_there_is_no_room() -> None:
    # room for three such requests at once on the decode side: all end, none is preempted for room
    workload = [Arrival(0.0, 90, 20) for _ in range(12)]
    served, totals = serve(workload, split(0.0, num_blocks=24))
    assert [s.output_tokens for s in served] == [20] * 12
    assert not any(s.refused for s in served)
    assert totals.num_preemptions == 0


def test_short_prompts_are_not_handed_over() -> None:
    steps = FixedStepTimes(0.1, 0.001)
    prefill, decode = ReplicaSpec(engine(), steps), ReplicaSpec(engine(caching=True), steps)
    transfer = KVTransfer(bytes_per_token=1.0, bandwidth=1e6, latency=0.0)

    def pool(least: int | None) -> Pool:
        split = Disaggregation((decode,), transfer, PredictedRouter(), least)
        return Pool((prefill,), PredictedRouter(), split)

    # the first one is running when the others come
    workload = [Arrival(0.0, 16, 90), Arrival(3.0, 1000, 3), Arrival(3.05, 100, 3)]
    plans: list[tuple[int, int]] = []
    served, _ = serve(
        workload,
        pool(200),
        on_plan=lambda replica, plan, now, start, end: plans.extend(
            (replica, row.num_tokens) for row in plan.rows if row.num_tokens > 1
        ),
    )
    assert [s.output_tokens for s in served] == [90, 3, 3] and {s.replica for s in served} == {1}
    at = {replica: sum(n for r, n in plans if r == replica) for replica in (0, 1)}
    # with the rest of the last block
    assert at[0] == 1000 and 116 <= at[1] < 116 + 16
    everything, _ = serve(workload, pool(None))
    assert [s.output_tokens for s in everything] == [90, 3, 3]
    with pytest.raises(ConfigError, match="routers that predict"):
        Disaggregation((decode,), transfer, LeastOutstanding(), 200)
    with pytest.raises(ConfigError, match="routers that predict"):
        Pool((prefill,), LeastOutstanding(), pool(200).disaggregation)


def test_decode_replicas_need_a_prefix_cache() -> None:
    spec = ReplicaSpec(engine(), FixedStepTimes(0.1))
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        Disaggregation((spec,), KVTransfer(1.0, 1.0), LeastOutstanding())
    with pytest.raises(ConfigError, match="bandwidth above 0"):
        KVTransfer(1.0, 0.0)


def test_what_is_said_of_drafts_is_checked_where_none_are_made_too() -> None:
    config = engine()
    unknown = replace(config.scheduler, speculative_config={"method": "oracle"})
    with pytest.raises(ConfigError, match="speculative_config: method must be one of"):
        replace(config, scheduler=unknown)


def test_memory_does_not_grow_with_the_workload() -> None:
    kept: list[int] = []

    def workload() -> Iterator[Arrival]:
        for number in range(2001):
            if number % 1000 == 0:
                gc.collect()
                kept.append(sys.getallocatedblocks())
            yield Arrival(0.02 * number, 20, 2)

    Simulator(one(FixedStepTimes(0.01)), lambda _: None).run(workload())
    # less than a number of every second request; other threads of the test process have some too
    assert kept[2] < kept[1] + 500, kept


def test_the_gateways_router_is_told_what_becomes_of_requests() -> None:
    """Of engines that differ it learns which is which, and forgets nothing that has ended."""
    router = PredictedRouter(staleness=0.25)
    served: list[Served] = []
    config = ReplicaConfig(
        scheduler=SchedulerConfig(max_num_seqs=16),
        cache=CacheConfig(block_size=16, num_blocks=400),
    )
    pool = Pool(
        [ReplicaSpec(config, FixedStepTimes(0.01)), ReplicaSpec(config, FixedStepTimes(0.08))],
        router,
    )
    arrivals = [Arrival(0.1 * n, 64, 32, ttft=1.0, tpot=0.05) for n in range(300)]
    Simulator(pool, served.append).run(arrivals)
    assert len(served) == 300
    assert sum(each.replica == 0 for each in served) > 290
    for load in router.loads:
        assert not load.running and load.prefill_tokens == pytest.approx(0.0, abs=1e-6)
    assert router.waiting() == []


def test_a_client_that_is_refused_comes_back_when_it_is_told() -> None:
    # one place, room for one that waits, steps of 1 s: the third is refused
    config = engine(lead=99.0)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1, max_num_waiting=1))
    served: list[Served] = []

    def again(record: Served, now: float) -> Arrival | None:
        served.append(record)
        if not record.refused:
            return None
        assert record.retry_after is not None and record.reason == "queue-full"
        return replace(record.arrival, at=now + record.retry_after)

    workload = [Arrival(0.0, 10, 3), Arrival(0.0, 10, 3), Arrival(0.0, 11, 3), Arrival(9.0, 12, 1)]
    simulator = Simulator(Pool.single(config, FixedStepTimes(1.0)), lambda _: None, again=again)
    totals = simulator.run(workload)
    refused = [record for record in served if record.refused]
    came_back = [r for r in served if r.arrival.prompt_tokens == 11 and not r.refused]
    assert totals.num_refused == len(refused) >= 1
    assert totals.num_arrivals == len(workload) + len(refused) == len(served)
    assert [record.arrival.at for record in came_back] == [
        pytest.approx(sum(record.retry_after or 0.0 for record in refused))
    ]
    assert totals.most_waiting == (1,)


def test_what_is_asked_again_comes_between_what_the_workload_has() -> None:
    # the first asks again at its end, before the second comes and while the third is served
    asked = {1: 0.5, 3: 0.25}

    def again(record: Served, now: float) -> Arrival | None:
        gap = asked.pop(record.output_tokens, None)
        return None if gap is None else Arrival(now + gap, 10, 2)

    workload = [Arrival(0.0, 10, 1), Arrival(5.0, 10, 3), Arrival(5.0, 10, 9)]
    ended: list[tuple[float, int]] = []
    simulator = Simulator(
        one(FixedStepTimes(1.0)), lambda s: ended.append((s.arrival.at, s.output_tokens)),
        again=again,
    )  # fmt: skip
    simulator.run(workload)
    assert ended == [(0.0, 1), (1.5, 2), (5.0, 3), (8.25, 2), (5.0, 9)]


def test_a_run_may_be_over_before_all_have_ended() -> None:
    ended: list[float] = []
    workload = [Arrival(float(second), 10, 4) for second in range(100)]
    simulator = Simulator(one(FixedStepTimes(1.0)), lambda s: ended.append(s.arrival.at))
    totals = simulator.run(workload, until=20.5)
    assert totals.num_arrivals == 21 and totals.end <= 20.5
    assert ended == [float(second) for second in range(16)]


def test_what_was_predicted_on_arrival_is_told_with_what_came() -> None:
    # steps of 1 s, alike: once they are known every first token is one step away
    workload = [Arrival(10.0 * number, 10, 5) for number in range(20)]
    served, _ = serve(workload, one(FixedStepTimes(1.0)))
    assert served[0].predicted_ttft is None
    assert [s.predicted_ttft for s in served[10:]] == [pytest.approx(1.0, rel=0.05)] * 10
    assert [s.ttft for s in served] == [pytest.approx(1.0)] * 20
    assert not any(s.retry_after for s in served)


def test_who_is_dropped_for_having_waited_is_told_when_to_come_back() -> None:
    config = engine(lead=99.0)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1, queue_timeout_s=2))
    workload = [Arrival(0.0, 10, 30), Arrival(0.5, 10, 3)]
    (first, second), _ = serve(workload, Pool.single(config, FixedStepTimes(1.0)))
    assert not first.refused and first.retry_after is None
    assert second.refused and second.reason == "waited too long"
    assert second.retry_after is not None and second.retry_after > 0.0
