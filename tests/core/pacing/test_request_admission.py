"""Refusals that say when to come back, limits on waiting, demotion, and memory looked ahead."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.predict.step_time import StepShape
from paceline.core.slo import Slo
from paceline.errors import ConfigError, QueueFullError
from tests.driving import Driver, ask, make_request


def seconds(shape: StepShape) -> float:
    """1 s a step and 0.1 s a prompt token; the driver's clock moves 1 s a step."""
    return 1.0 + 0.1 * shape.wide_tokens


def warm(**options: object) -> Driver:
    """A driver whose step-time model is ready."""
    driver = Driver(seconds=seconds, num_blocks=400, enable_prefix_caching=False, **options)
    for index in range(20):
        driver.add(make_request(f"warm{index}", 5 + index, 2))
        driver.run()
    return driver


def test_the_queue_is_bounded() -> None:
    driver = Driver(max_num_seqs=1, max_num_waiting=2)
    driver.add(make_request("a", 4))
    driver.step()
    driver.add(make_request("b", 4), make_request("c", 4))
    with pytest.raises(QueueFullError, match="2 requests wait already, the limit is 2") as error:
        driver.add(make_request("d", 4))
    assert error.value.reason == "queue-full"
    driver.run()
    assert set(driver.finished) == {"a", "b", "c"}
    assert dict(driver.scheduler.stats().refused) == {"queue-full": 1}


def test_what_an_arrival_would_get_is_foreseen() -> None:
    driver = warm(max_num_seqs=1, max_num_waiting=1)
    idle, runs = make_request("idle", 10), make_request("runs", 10)
    assert driver.scheduler.foresee(idle) is None
    driver.add(runs)
    assert idle.history.predicted_ttft == runs.history.predicted_ttft is not None
    driver.step()
    driver.add(make_request("waits", 4))
    error = driver.scheduler.foresee(make_request("c", 4))
    assert error is not None and error.reason == "queue-full"
    assert not driver.scheduler.stats().refused, "it was only asked"
    assert driver.scheduler.foresee(make_request("d", 4), counts=True) is not None
    assert dict(driver.scheduler.stats().refused) == {"queue-full": 1}
    driver.run()
    assert not {"idle", "c", "d"} & set(driver.finished)


def test_forks_count_before_they_come() -> None:
    """The choices of one request find places together or not at all."""
    driver = Driver(max_num_seqs=1, max_num_waiting=4, num_blocks=200)
    driver.add(make_request("runs", 4))
    driver.step()
    driver.add(make_request("waits", 4))
    four, three = make_request("four", 9), make_request("three", 9)
    ask(four, num_forks=3)
    ask(three, num_forks=2)
    with pytest.raises(QueueFullError, match=r"1 requests wait .* limit is 4, .* n=4 choices"):
        driver.add(four)
    driver.add(three, *(make_request(f"fork{i}", 9, fork_of="three") for i in range(2)))
    assert driver.scheduler.stats().num_waiting == 4
    driver.run()
    assert len(driver.finished) == 5


def test_more_forks_than_places_are_taken_where_nobody_waits() -> None:
    """Or they would be told to come back later for ever."""
    driver = Driver(max_num_seqs=1, max_num_waiting=2, num_blocks=200)
    driver.add(make_request("runs", 4))
    driver.step()
    many = make_request("many", 9)
    ask(many, num_forks=5)
    driver.add(many, *(make_request(f"fork{i}", 9, fork_of="many") for i in range(5)))
    with pytest.raises(QueueFullError, match="6 requests wait already, the limit is 2; retry"):
        driver.add(make_request("next", 4))
    driver.run()
    assert len(driver.finished) == 7


def test_a_tenants_forks_count_for_its_share() -> None:
    driver = Driver(max_num_seqs=1, max_num_waiting=16, policy="fair", num_blocks=200)
    driver.add(make_request("runs", 4, tenant="other"))
    driver.step()
    driver.add(*(make_request(f"r{i}", 4, tenant="own") for i in range(10)))
    # fourteen places of sixteen are seven for each that is left
    five, four = make_request("five", 9, tenant="own"), make_request("four", 9, tenant="own")
    ask(five, num_forks=4)
    ask(four, num_forks=3)
    with pytest.raises(QueueFullError, match=r"10 requests of this .* n=5 choices; re"):
        driver.add(five)
    driver.add(four)


def flood(driver: Driver, tenant: str, count: int) -> Counter[str]:
    """``count`` requests at once; how many were taken and why others were not."""
    outcomes: Counter[str] = Counter()
    for index in range(count):
        try:
            driver.add(make_request(f"{tenant}{driver.now}{index}", 4, 2, tenant=tenant))
            outcomes["taken"] += 1
        except QueueFullError as error:
            assert error.reason != "queue-share" or "requests of this tenant wait" in str(error)
            outcomes[error.reason] += 1
    return outcomes


def test_one_tenants_flood_leaves_places_to_others() -> None:
    """Of 80 places it takes 70; then 8.75 of the remaining 10; then there is 1 for a third. What
    floods leave shrinks in a geometric row."""
    driver = Driver(max_num_seqs=2, max_num_waiting=80, policy="fair")
    driver.add(make_request("r0", 4, tenant="a"), make_request("r1", 4, tenant="d"))
    driver.step()
    assert driver.scheduler.stats().num_running == 2, "who runs takes no place in the queue"
    assert flood(driver, "a", 100) == {"taken": 70, "queue-share": 30}
    assert flood(driver, "b", 100) == {"taken": 9, "queue-share": 91}
    assert flood(driver, "c", 3) == {"taken": 1, "queue-full": 2}
    driver.run()
    # no request waits and two places are free: all of it is there again, and the others were lately
    assert flood(driver, "b", 74) == {"taken": 72, "queue-share": 2}
    driver.run()
    assert len(driver.finished) == 154


def test_best_effort_leaves_places_to_others() -> None:
    """Its wait has no limit, so in time it would fill every queue and lock chats out."""
    driver = Driver(max_num_seqs=1, max_num_waiting=16, num_blocks=200)
    night = Slo(slo_class="batch", best_effort=True)
    driver.add(make_request("runs", 4, 40))
    driver.step()
    driver.add(*(make_request(f"night{index}", 4, slo=night) for index in range(14)))
    why = "14 requests wait already, and the 2 places left of 16 are for requests that are not best"
    with pytest.raises(QueueFullError, match=why) as error:
        driver.add(make_request("night", 4, slo=night))
    assert error.value.reason == "queue-share"
    driver.add(make_request("one", 4), make_request("two", 4))
    with pytest.raises(QueueFullError, match="16 requests wait already"):
        driver.add(make_request("three", 4))


@pytest.mark.parametrize("tenant", ["a", ""])
def test_who_is_alone_or_not_told_apart_has_all_of_the_queue(tenant: str) -> None:
    driver = Driver(max_num_seqs=2, max_num_waiting=80, policy="fair")
    # two of them wait for nothing but the next plan
    assert flood(driver, tenant, 84) == {"taken": 82, "queue-full": 2}
    driver.run()


def test_arrivals_that_free_places_take_are_no_queue() -> None:
    """Eighteen at once find an idle server with sixteen places and a queue of two."""
    driver = Driver(max_num_seqs=16, max_num_waiting=2, policy="fcfs")
    assert flood(driver, "", 19) == {"taken": 18, "queue-full": 1}
    driver.step()
    assert driver.scheduler.stats().num_running == 16
    assert flood(driver, "", 1) == {"queue-full": 1}, "now it is one"
    driver.run()


def test_a_short_queue_is_not_cut_to_nothing() -> None:
    driver = Driver(max_num_seqs=1, max_num_waiting=2, policy="fair")
    driver.add(make_request("r", 4, tenant="b"))
    driver.step()
    assert flood(driver, "a", 3) == {"taken": 2, "queue-full": 1}
    driver.run()


def test_other_policies_know_no_tenants() -> None:
    driver = Driver(max_num_seqs=1, max_num_waiting=80, policy="fcfs")
    assert flood(driver, "a", 82) == {"taken": 81, "queue-full": 1}
    driver.run()


def test_a_wait_predicted_to_be_too_long_is_refused_with_the_rest_of_it() -> None:
    driver = warm(max_num_seqs=1, max_predicted_ttft_s=30.0)
    driver.add(make_request("a", 4, 20))
    driver.step()
    driver.add(make_request("b", 4, 50))
    with pytest.raises(QueueFullError, match="limit is 30 s") as error:
        for index in range(20):
            driver.add(make_request(f"c{index}", 4, 50))
    predicted = driver.scheduler._admission.forecast.predict(make_request("d", 4, 50))
    assert predicted is not None
    each = driver.scheduler._admission.forecast.seconds_each(make_request("d", 4, 50))
    assert error.value.retry_after == pytest.approx(max(predicted - 30.0, each), rel=1e-3)
    assert error.value.reason == "predicted-ttft"
    driver.run()


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_a_flood_makes_only_itself_wait(policy: str) -> None:
    """The light tenant is not told of a wait that it will not have."""
    driver = warm(max_num_seqs=1, max_predicted_ttft_s=60.0, policy=policy)
    driver.add(make_request("a", 4, 20, tenant="a"))
    driver.step()
    assert flood(driver, "a", 50)["predicted-ttft"] > 20
    if policy == "fair":
        asked = driver.now
        driver.add(make_request("b", 4, 2, tenant="b", arrival=asked))
        driver.run()
        started = driver.finished["b"].first_scheduled_time
        assert started is not None and started - asked < 60.0, "what was promised is kept"
        assert driver.now - started > 10.0, "others did wait longer"
    else:
        with pytest.raises(QueueFullError, match="limit is 60 s"):
            driver.add(make_request("b", 4, 2, tenant="b"))
        driver.run()


def test_a_light_tenants_wait_is_predicted_with_those_of_its_kind() -> None:
    driver = warm(max_num_seqs=1, policy="fair")
    driver.add(make_request("a", 4, 20, tenant="a"))
    for _ in range(5):
        # longer already than what there was before: 15 tokens more are expected
        driver.step()
    assert flood(driver, "a", 100) == {"taken": 100}
    ours = [make_request(f"b{i}", 4, 20, tenant="b", arrival=driver.now) for i in range(20)]
    driver.add(*ours)
    assert all(request.boosted for request in ours)
    predicted = [request.history.predicted_ttft or 0.0 for request in ours]
    assert predicted == sorted(predicted)
    # a place is free when the one before has ended, which takes longer than what was said of those
    # before, and no boosted one has taught another thing
    assert predicted[-1] - predicted[0] > 120.0
    other = make_request("c", 4, 20, tenant="c", arrival=driver.now)
    driver.add(other)
    assert other.boosted
    assert other.history.predicted_ttft == pytest.approx(
        2 * predicted[-1] - predicted[-2], rel=0.01
    )
    driver.run()


def test_no_advised_wait_is_longer_than_a_target_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a request whose priority lets all others pass would be."""
    driver = warm(max_num_seqs=1, max_predicted_ttft_s=30.0)
    monkeypatch.setattr(FirstTokenForecast, "note", lambda self, request, longest: 1e19)
    with pytest.raises(QueueFullError, match=r"retry in 300\.0 s") as error:
        driver.add(make_request("a", 4, 20))
    assert error.value.retry_after == 300.0


def test_retry_after_of_a_full_queue_is_the_predicted_wait() -> None:
    driver = warm(max_num_seqs=1, max_num_waiting=1)
    driver.add(make_request("a", 4, 40))
    driver.step()
    driver.add(make_request("b", 4, 40))
    with pytest.raises(QueueFullError) as error:
        driver.add(make_request("c", 4, 40))
    forecast = driver.scheduler._admission.forecast
    assert error.value.retry_after == forecast.predict(make_request("d", 4, 40))
    driver.run()


@pytest.mark.parametrize("by", ["request", "server"])
def test_expired_work_is_dropped_before_it_is_started(by: str) -> None:
    driver = Driver(max_num_seqs=1, queue_timeout_s=5.0 if by == "server" else None)
    ttl = Slo(queue_ttl=5.0) if by == "request" else Slo()
    driver.add(make_request("a", 4, 12, slo=ttl))
    driver.add(make_request("b", 4, 12, slo=ttl), make_request("c", 4, 12, slo=ttl, arrival=8.0))
    driver.run()
    assert [expired.request_id for expired in driver.expired] == ["b"]
    error = driver.expired[0].error
    assert error.reason == "expired" and "5.0 s" in str(error)
    planned = {row.request_id for plan in driver.plans for row in plan.rows}
    assert planned == {"a", "c"}, "what was started in time is finished, however long it takes"
    assert len(driver.tokens["a"]) == 12


def test_expired_work_is_told_a_wait_in_which_it_does_not_wait_for_itself() -> None:
    driver = warm(max_num_seqs=1)
    ttl = Slo(queue_ttl=5.0)
    driver.add(make_request("a", 4, 40, arrival=driver.now))
    driver.step()
    driver.add(
        *(make_request(name, 4, 12, arrival=driver.now, slo=ttl) for name in ("b", "c")),
    )
    while not driver.expired:
        driver.step()
    assert [expired.request_id for expired in driver.expired] == ["b", "c"]
    again = make_request("again", 4, 12, arrival=driver.now)
    driver.add(again)
    for expired in driver.expired:
        assert expired.error.retry_after == pytest.approx(again.history.predicted_ttft, rel=0.1)
    driver.run()


def test_requests_that_ended_are_not_kept_for_as_long_as_they_might_have_waited() -> None:
    driver = Driver(queue_timeout_s=3600.0)
    for index in range(1000):
        driver.add(make_request(f"r{index}", 4, 1))
        driver.abort(f"r{index}")
    assert len(driver.scheduler._admission._limits) <= 100


def test_a_preempted_request_does_not_expire() -> None:
    driver = Driver(num_blocks=12, queue_timeout_s=3.0, max_num_seqs=2)
    driver.add(make_request("a", 16, 20), make_request("b", range(50, 66), 20))
    driver.run()
    assert not driver.expired
    assert driver.scheduler.stats().num_preemptions > 0


def test_a_request_that_cannot_be_on_time_lets_the_others_pass() -> None:
    driver = warm(max_num_seqs=1)
    start = driver.now
    # 3 s for its 20 tokens alone
    driver.add(make_request("hopeless", 20, 4, arrival=start, slo=Slo(ttft=2.0)))
    driver.add(make_request("fine", 4, 4, arrival=start, slo=Slo(ttft=30.0)))
    driver.run()
    first = {i: driver.finished[i].first_scheduled_time for i in ("hopeless", "fine")}
    assert first["fine"] < first["hopeless"]
    timeline = driver.finished["hopeless"].timeline
    assert timeline is not None and timeline.demoted
    assert driver.scheduler.stats().num_demoted == 1


def test_demotion_can_be_turned_off() -> None:
    driver = warm(max_num_seqs=1, demote_late=False)
    start = driver.now
    driver.add(make_request("hopeless", 20, 4, arrival=start, slo=Slo(ttft=2.0)))
    driver.add(make_request("fine", 4, 4, arrival=start, slo=Slo(ttft=30.0)))
    driver.run()
    first = {i: driver.finished[i].first_scheduled_time for i in ("hopeless", "fine")}
    assert first["hopeless"] < first["fine"]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_num_waiting": 0},
        {"queue_timeout_s": -1.0},
        {"max_predicted_ttft_s": 0.0},
        {"preemption": "drop"},
        {"pressure_threshold": 0.0},
        {"best_effort_step_s": 0.0},
        {"best_effort_share": 1.0},
        {"best_effort_share": -0.1},
        {"max_predicted_ttft_s": 9.0, "queue_timeout_s": 8.0},
    ],
)
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SchedulerConfig(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_host_blocks"):
        CacheConfig(block_size=4, num_blocks=4, num_host_blocks=-1)


def test_a_fork_whose_parent_is_cancelled_while_they_wait_keeps_its_limit() -> None:
    driver = Driver(max_num_seqs=1)
    ttl = Slo(queue_ttl=5.0)
    driver.add(make_request("running", 4, 40))
    driver.add(make_request("parent", 6, 4, slo=ttl))
    driver.add(*(make_request(f"fork{i}", 6, 4, slo=ttl, fork_of="parent") for i in range(2)))
    driver.step()
    driver.abort("parent", "fork1")
    assert not driver.scheduler.stats().num_waiting_deferred, "it stands on its own"
    for _ in range(6):
        driver.step()
    assert [(e.request_id, e.fork_ids) for e in driver.expired] == [("fork0", ())]
    driver.run()


@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_whose_parent_ends_within_its_prompt_keeps_its_limit(fails: bool) -> None:
    """Nothing of the fork was started, and somebody who came before it has the place."""
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=10, poison_token=900 if fails else None)
    ttl = Slo(queue_ttl=5.0)
    prompt = [*range(50, 70), 900, *range(100)]
    driver.add(make_request("running", 4, 40), make_request("parent", prompt, 4, slo=ttl))
    driver.add(*(make_request(f"fork{i}", prompt, 4, slo=ttl, fork_of="parent") for i in range(2)))
    driver.step()
    driver.add(make_request("next", 4, 40, arrival=-1.0))
    driver.step()
    if fails:
        while "parent" not in driver.finished:
            driver.step()
    else:
        driver.abort("parent", "fork1")
    assert driver.now < 5.0
    assert not driver.tokens["parent"] and not driver.scheduler.stats().num_waiting_deferred
    driver.run()
    expired = {each.request_id: each.error.reason for each in driver.expired}
    assert expired == dict.fromkeys(["fork0", "fork1"] if fails else ["fork0"], "expired")
    assert not driver.tokens["fork0"]


def test_with_a_request_that_expires_go_its_forks() -> None:
    driver = Driver(max_num_seqs=1)
    ttl = Slo(queue_ttl=5.0)
    driver.add(make_request("running", 4, 40))
    driver.add(make_request("parent", 6, 4, slo=ttl))
    driver.add(*(make_request(f"fork{i}", 6, 4, slo=ttl, fork_of="parent") for i in range(2)))
    for _ in range(7):
        driver.step()
    assert [(e.request_id, e.fork_ids) for e in driver.expired] == [("parent", ("fork0", "fork1"))]
    driver.run()
