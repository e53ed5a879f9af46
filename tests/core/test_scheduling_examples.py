"""The examples of docs/understand/scheduling.md and docs/understand/policies.md, computed: if a
number here changes, the pages do too."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.memory.block_pool import BlockPool
from paceline.core.memory.kv_cache import KVCacheManager
from paceline.core.memory.outlook import capacity, future_peak
from paceline.core.memory.pressure import PressureValve
from paceline.core.pacing import deadlines
from paceline.core.pacing.budget import StepBudget, TpotGuard
from paceline.core.pacing.view import NO_VIEW, RunningView
from paceline.core.pacing.waiting_targets import all_in_time, triage
from paceline.core.policies import PolicyContext, make_policy
from paceline.core.predict.chunk import ChunkSize
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.queues.request_queue import RequestQueue
from paceline.core.queues.running import RunningList
from paceline.core.queues.waiting import WaitingQueues
from paceline.core.request import Request
from paceline.core.slo import NO_SLO, Slo
from paceline.core.step.in_flight import StepsInFlight
from paceline.errors import QueueFullError
from tests.core.machine import Machine
from tests.core.machine import seconds as takes
from tests.driving import make_request

PAGE = (Path(__file__).parent.parent.parent / "docs/understand/scheduling.md").read_text()


def says(*texts: str) -> None:
    """The page has these, wherever its lines end."""
    page = re.sub(r"\s+", " ", PAGE)
    for text in texts:
        assert text in page, f"docs/understand/scheduling.md does not say {text!r}"


class Known(StepTimeModel):
    """The page's machine: 10 ms a step, 1 ms a prompt token, 1 ms a row of one token."""

    def __init__(self) -> None:
        super().__init__(min_observations=0)

    def predict(self, shape: StepShape) -> float:
        return takes(shape)


@pytest.fixture
def model() -> StepTimeModel:
    return Known()


@pytest.fixture
def chunk(model: StepTimeModel) -> ChunkSize:
    return ChunkSize(model, 2048)


@pytest.fixture
def budget(model: StepTimeModel, chunk: ChunkSize) -> StepBudget:
    return StepBudget(
        model,
        chunk,
        WorkEstimator(model, LengthHistory()),
        SchedulerConfig(best_effort_step_s=0.03),
    )


def streams(count: int, slo: Slo) -> list[Request]:
    """Requests with a first token at 0 and nothing to compute but their next one."""
    requests = [make_request(f"r{i}", 1, 200, slo=slo) for i in range(count)]
    for request in requests:
        request.first_token_time = 0.0
        request.num_tokens = 2
        request.num_computed_tokens = 1
    return requests


def test_a_flood_fills_seven_eighths_of_the_queue() -> None:
    says("1,792 requests in the queue and 256 entries are left")
    machine = Machine(policy="fair", max_num_waiting=2048, max_num_seqs=1)

    def ask(tenant: str, number: int) -> None:
        machine.add(make_request(f"{tenant}{number}", 1, 2, tenant=tenant))

    ask("other", 0)
    # it runs
    machine.step()
    for number in range(1792):
        ask("flood", number)
    with pytest.raises(QueueFullError) as refused:
        ask("flood", 1792)
    assert refused.value.reason == "queue-share"
    ask("other", 1)


def test_triage_leaves_the_largest_out(budget: StepBudget) -> None:
    says("A token takes 1.02 ms", "they need 1.22 s", "the others end after 0.41 s")
    each = budget.seconds_per_token(NO_VIEW)
    assert each == pytest.approx(0.00102, abs=5e-6)
    requests = [
        make_request(name, size, 1) for name, size in zip("abc", (200, 800, 200), strict=True)
    ]
    seconds = [each * request.num_prompt_tokens for request in requests]
    assert sum(seconds) == pytest.approx(1.22, abs=0.005)
    assert triage(requests, 0.0, seconds, [1.1] * 3) == [requests[1]]
    assert seconds[0] + seconds[2] == pytest.approx(0.41, abs=0.005)


@pytest.mark.parametrize(
    ("size", "told"), [(10, 0.8525), pytest.param(240, None, id="as-large"), (400, None)]
)
def test_a_newcomer_is_told_what_triage_will_make_of_it(size: int, told: float | None) -> None:
    says("Eight prompts of 240 tokens wait, due in 1 s, in steps of 64", "and is told 0.85 s")
    machine = Machine(max_num_seqs=16, max_num_batched_tokens=64, max_predicted_ttft_s=60.0)
    for number in range(8):
        machine.add(make_request(f"r{number}", 240, 2, slo=Slo(ttft=1.0)))
    newcomer = make_request("new", size, 2, slo=Slo(ttft=1.0))
    machine.add(newcomer)
    forecast, seconds = newcomer.history.forecast, newcomer.history.predicted_ttft
    assert forecast is not None and seconds is not None
    assert forecast.kind.late is (told is None)
    assert seconds > 1.0 if told is None else seconds == pytest.approx(told)
    while not newcomer.output_token_ids:
        machine.step()
    assert (machine.now <= 1.0) is (told is not None)


def test_memory_peaks_below_the_sum() -> None:
    says("1,552 tokens", "that were 1,760 tokens", "held at once is 1,296")
    sequences = [(400, 96), (304, 400), (304, 256)]
    assert capacity(CacheConfig(block_size=16, num_blocks=100)) == 1552
    assert sum(map(sum, sequences)) == 1760
    assert future_peak(sorted((-to_come, now) for now, to_come in sequences)) == 1296


def test_the_36th_request_waits_for_the_pace(model: StepTimeModel) -> None:
    says("35 requests run, and the 36th waits with the reason `pace`")
    newcomer = make_request("new", 1, 10)
    slo = Slo(tpot=0.05)
    assert TpotGuard(RunningView.of(streams(34, slo)), model).allows(newcomer)
    assert not TpotGuard(RunningView.of(streams(35, slo)), model).allows(newcomer)


def test_a_chat_takes_the_place_of_the_later_line() -> None:
    says("the later one, is preempted, and the chat runs in the same step")
    machine = Machine(max_num_seqs=2)
    slo = Slo(slo_class="batch", best_effort=True)
    machine.add(make_request("line1", 8, 50, slo=slo), make_request("line2", 8, 50, slo=slo))
    for _ in range(3):
        machine.step()
    machine.add(make_request("chat", 8, 2, arrival=machine.now))
    machine.step()
    assert machine.plans[-1].released == ("line2",)
    assert "chat" in {row.request_id for row in machine.plans[-1].rows}


def test_the_knee(chunk: ChunkSize) -> None:
    says("in chunks of 32 tokens that is 512")
    assert chunk.knee() == 512


def test_a_step_while_tenants_share(budget: StepBudget) -> None:
    says("Three times that leaves a prompt 40 ms: a chunk of 32 tokens")
    view = replace(RunningView.of(streams(10, NO_SLO)), step_rows=3.0)
    assert budget.allow(view, 0.0)[:2] == (10 + 32, pytest.approx(0.06))


def test_steps_without_prompts() -> None:
    says("Each step would have time for 8 tokens", "may take 270 ms, with a chunk of 288")

    class Costly(StepTimeModel):
        wide_seconds = 0.04

        def predict(self, shape: StepShape) -> float:
            return 0.045 + (0.04 + 6e-4 * shape.wide_tokens if shape.wide_tokens else 0.0)

    costly = Costly(min_observations=0)
    assert costly.predict(StepShape(8)) < 0.09 < costly.predict(StepShape(9))
    work = WorkEstimator(costly, LengthHistory())
    budget = StepBudget(costly, ChunkSize(costly, 2048), work, SchedulerConfig())
    (chat,) = streams(1, Slo(tpot=0.1))
    found = []
    for step in range(5):
        found.append(budget.allow(RunningView.of([chat]), 0.045 * step, lacking=1_000))
        chat.num_tokens += 1
        chat.num_computed_tokens += 1
    assert [allowance.saved_for for allowance in found] == [256] * 4 + [0]
    assert found[-1][:2] == (1 + 288, pytest.approx(0.27))


def test_slack(model: StepTimeModel, chunk: ChunkSize) -> None:
    says("so the step may take 100 ms", "so the step may take 96.3 ms", "is kept at 90 ms")

    def seconds(now: float, to_come: int) -> float:
        (chat,) = streams(1, Slo(tpot=0.1))
        lengths = LengthHistory()
        for _ in range(8):
            lengths.observe(chat.label, 10 + to_come)
        chat.num_tokens, chat.num_computed_tokens = 11, 10
        budget = StepBudget(model, chunk, WorkEstimator(model, lengths), SchedulerConfig())
        return budget.allow(RunningView.of([chat]), now).seconds

    assert seconds(0.8, 40) == pytest.approx(0.1)
    assert seconds(0.95, 40) == pytest.approx(0.09625)
    assert seconds(0.95, 2) == pytest.approx(0.09)


def test_best_effort_lengthens_a_step_by_its_own(model: StepTimeModel, budget: StepBudget) -> None:
    says("their rows take 20 ms. A batch prompt may make that step 50 ms")
    rows = model.predict(StepShape(0, 0.0, 10, 0))
    assert rows + budget.best_effort_seconds == pytest.approx(0.05)


def test_a_step_beside_streams_is_bounded() -> None:
    scheduler = Machine(max_token_gap_s=0.25, max_num_batched_tokens=2048).scheduler
    scheduler.step_time.most_wide_tokens = 2000
    base = StepShape(0, 0.0, 8, 0)
    assert scheduler.step_time.predict(base) == pytest.approx(0.018, rel=1e-3)
    assert scheduler.state.chunk.within(base, 0, 2048, gap=0.25) == 224


def test_a_line_is_paid_for_every_four_and_a_half_seconds_beside_a_flood() -> None:
    says("100 steps of 18 ms, 1.8 s, and an eighth of that is 225 ms", "a line every 4.5 s")
    step = takes(StepShape(0, 0.0, 8, 0))
    assert 100 * step == pytest.approx(1.8)
    assert 100 * step / 8 / SchedulerConfig().best_effort_share == pytest.approx(4.5)

    machine = Machine(max_num_seqs=8)
    # the check takes longer than the steps
    machine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
    waiting: Request | None = None
    starts: list[float] = []
    number = 0
    while machine.now < 60.0:
        if waiting is None or waiting.first_scheduled_time is not None:
            name = f"line{len(starts)}"
            waiting = make_request(name, 1, 100, arrival=machine.now, slo=Slo(best_effort=True))
            machine.add(waiting)
        while len(machine.scheduler.state.waiting.ordinary) < 4:
            number += 1
            machine.add(make_request(f"chat{number}", 1, 40, arrival=machine.now))
        machine.step()
        if waiting.first_scheduled_time is not None:
            starts.append(waiting.first_scheduled_time)
    # without the places that are free at first, which take seconds to be paid for
    paid = [after for before, after in pairwise(starts) if after - before > 1.0 and after > 10.0]
    served = sum(paid[0] <= start < paid[-1] for start in starts)
    assert served
    assert (paid[-1] - paid[0]) / served == pytest.approx(4.5, rel=0.15)


def test_deadlines_press_and_rows_must_run() -> None:
    says("Twice 20 is more than 30, so deadlines press", "twice (300 + 8) steps of 50 ms is 30.8 s")
    assert not all_in_time(0.0, [deadlines._HASTE * 20.0], [30.0])
    assert all_in_time(0.0, [deadlines._HASTE * 20.0], [50.0])
    steps = 300 + deadlines._STEPS_BETWEEN_LOOKS
    assert deadlines._HASTE * steps * 0.05 == pytest.approx(30.8)


def test_the_next_step_is_planned_at_96_ms() -> None:
    says("The next step is planned at 96 ms")

    class Early(Known):
        def quantile(self, q: float) -> float:
            return {0.1: 0.95}[q]

    steps = StepsInFlight(Early(), SchedulerConfig().schedule_ahead_s)
    steps.push(0, [], StepShape(), 0.06, 0.04, None)
    assert steps.plan_at == pytest.approx(0.096)


def test_victims_and_swaps(model: StepTimeModel) -> None:
    says("100 tokens (110 ms of work), one 500 (510 ms)", "it would count 550 ms")

    def preemption(block_seconds: float) -> tuple[RunningList, KVCacheManager]:
        cache = CacheConfig(
            block_size=16,
            num_blocks=100,
            num_host_blocks=100,
            swap_block_seconds=block_seconds,
            enable_prefix_caching=False,
        )
        kv = KVCacheManager(cache)
        work = WorkEstimator(model, LengthHistory())
        waiting = WaitingQueues(RequestQueue, kv, newest_first=False)
        return RunningList(SchedulerConfig(), cache, kv, waiting, work), kv

    def running(tokens: int) -> Request:
        request = make_request(f"of {tokens}", tokens, 10)
        request.num_computed_tokens = tokens
        return request

    # moving is too slow to count
    slow, _ = preemption(1.0)
    small, large = running(100), running(500)
    assert slow.seconds_lost(small) == pytest.approx(0.11)
    assert slow.seconds_lost(large) == pytest.approx(0.51)
    spared = running(16)
    assert slow.victim([spared, small, large], lambda those: those) is small
    small.num_preemptions = 4
    assert slow.seconds_lost(small) == pytest.approx(0.55)
    assert slow.victim([spared, small, large], lambda those: those) is large

    says("At 1 ms a block, moving them there and back takes 40 ms: they are moved", "400 ms")
    for block_seconds, moved in ((0.001, 20), (0.01, 0)):
        chosen, kv = preemption(block_seconds)
        request = make_request("swapped", 320, 10)
        assert kv.admit(request, beside_others=False)
        request.num_computed_tokens = 320
        chosen.start(request)
        chosen.preempt(request, 0.0)
        assert kv.host.num_swapped_out == moved


def test_four_blocks_cost_one_prefix_and_the_tail_of_the_next() -> None:
    says("it gets A's third, second and first block, then B's third")
    pool = BlockPool(6)
    a, b = pool.allocate(3), pool.allocate(3)
    for table, names in ((a, (b"a0", b"a1", b"a2")), (b, (b"b0", b"b1", b"b2"))):
        pool.register(table, names)
        pool.release(table)
    assert pool.allocate(4) == [a[2], a[1], a[0], b[2]]
    assert (pool.lookup(b"b0"), pool.lookup(b"b1")) == (b[0], b[1])


def test_the_valve_closes_later_than_it_opened() -> None:
    says("915 of 1,000 blocks are in use: level 2. It is left when fewer than 860 are")
    valve = PressureValve(0.88)
    levels = [valve.update(used / 1000) for used in (879, 880, 915, 860, 859, 830, 829)]
    assert levels == [0, 1, 2, 2, 1, 1, 0]


class Work(WorkEstimator):
    """Predictions as the examples of docs/understand/policies.md have them, by request id."""

    def __init__(self, prompt: dict[str, float], whole: dict[str, float]) -> None:
        super().__init__(StepTimeModel(), LengthHistory())
        self._prompt, self._whole = prompt, whole

    def prompt_seconds(self, num_tokens: int) -> float:
        return self._prompt[str(num_tokens)]

    def seconds(self, request: Request) -> float:
        return self._whole[request.request_id]


def keys(policy: str, work: WorkEstimator, *requests: Request) -> list[float]:
    made = make_policy(PolicyContext(SchedulerConfig(policy=policy), work))
    return [made.key(request) for request in requests]


def test_the_keys_of_the_policies_page() -> None:
    a, b = make_request("a", 1, 1, arrival=0.0), make_request("b", 1, 1, arrival=1.0)
    assert keys("sjf", Work({}, {"a": 10.0, "b": 0.1}), a, b) == [500.0, 6.0]
    work = Work({"7": 0.2}, {"report": 4.0})
    a = make_request("a", 1, 1, arrival=0.0, priority=1)
    b, c = (make_request(f"at{at}", 1, 1, arrival=at, priority=0) for at in (50.0, 61.0))
    old, urgent, later = keys("priority", work, a, b, c)
    assert (old, round(urgent, 2)) == (1.0, 0.83)
    assert urgent < old < later
    chat = make_request("chat", 7, 1, arrival=5.0, slo=Slo(ttft=1.0))
    report = make_request("report", 1, 1, arrival=0.0, slo=Slo(deadline=20.0))
    plain = make_request("plain", 1, 1, arrival=0.0)
    assert keys("deadline", work, chat, plain, report) == pytest.approx([5.8, 10.0, 16.0])
