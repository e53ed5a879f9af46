"""Forecasts of the first token: what they count, and that they correct themselves."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.pacing.share import GuaranteedShare
from paceline.core.pacing.waiting_targets import WaitingTargets
from paceline.core.predict.step_time import StepShape
from paceline.core.request import Forecast, ForecastKind, Request
from paceline.core.slo import MAX_SECONDS, Slo
from paceline.core.step.state import SchedulerState
from paceline.core.tier import Tier
from paceline.errors import QueueFullError
from tests.core.machine import Machine
from tests.core.parts import numbered
from tests.driving import Driver, make_request

NEWCOMER = make_request("new", 100)
# its prompt: one step of 10 ms + 100 tokens at 0.1 ms
OWN = 0.02
KIND = ForecastKind(Tier.ORDINARY, 0, boosted=False, late=False)


def state_with(
    *waiting: int, places: int = 4, ahead: int = 0, outputs: int = 50, policy: str = "fcfs"
) -> SchedulerState:
    """A step takes 100 tokens, two requests run and so many more could, and prompts of these sizes
    wait. Those that run lack so many prompt tokens and have 1 and 2 times ``outputs`` tokens."""
    driver = Driver(max_num_seqs=2 + places, policy=policy, max_num_batched_tokens=1000)
    state = driver.scheduler.state
    for index in range(200):
        shape = StepShape().plus(10 + index % 7, 1)
        if index % 2:
            shape = shape.plus(0, 32 * (1 + index % 16))
        state.step_time.observe(shape, 0.010 + 1e-4 * shape.wide_tokens)
    state.running.requests += [make_request(f"r{i}", 2, outputs * (i + 1)) for i in range(2)]
    state.running.requests[0].num_computed_tokens = 1 - ahead
    for number, size in enumerate(waiting):
        state.waiting.push(make_request(f"w{number}", size))
    state.last.chunk_tokens = 100
    return state


def forecast_of(state: SchedulerState) -> FirstTokenForecast:
    return FirstTokenForecast(state, GuaranteedShare(state), WaitingTargets(state))


def predicted(state: SchedulerState) -> float:
    seconds = forecast_of(state).predict(NEWCOMER)
    assert seconds is not None
    return seconds


def test_forecasts_count_tokens_ahead_and_ends_of_running_requests() -> None:
    # own prompt: one step of 10 ms + 100 tokens at 0.1 ms
    assert 0.018 < predicted(state_with()) < 0.022
    assert 0.11 < predicted(state_with(500)) < 0.13
    # no slot: the shorter of the two running requests ends after 50 steps of 10 ms
    assert 0.50 < predicted(state_with(places=0)) < 0.54
    assert 1.00 < predicted(state_with(1, places=0)) < 1.04


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    forecast = forecast_of(Driver().scheduler.state)
    assert forecast.note(NEWCOMER, math.inf) is None
    assert NEWCOMER.history.predicted_ttft is None


def test_a_bias_corrects_itself() -> None:
    state = state_with()
    forecast, before = forecast_of(state), predicted(state)
    for _ in range(200):
        assert forecast.note(NEWCOMER, math.inf) is not None
        assert NEWCOMER.history.forecast is not None
        state.last.first_tokens.append((NEWCOMER.history.forecast, 2.0 * before, False))
    after = forecast.predict(NEWCOMER)
    assert after is not None and 1.9 * before < after < 2.1 * before
    assert not state.last.first_tokens


@pytest.mark.parametrize(("late", "demoted", "teaches"), [(0, 0, 1), (0, 1, 0), (1, 1, 1)])
def test_first_tokens_teach_unless_something_else_made_them_late(
    late: int, demoted: int, teaches: int
) -> None:
    state = state_with()
    forecast, kind = forecast_of(state), KIND._replace(late=bool(late))
    said = Forecast(kind, 0.2, 0.2, 0.0, 0.0)
    state.last.first_tokens.append((said, 1.5, bool(demoted)))
    assert forecast.predict(NEWCOMER) is not None
    assert (kind in forecast.outcomes) is bool(teaches)


def test_what_is_learned_of_one_kind_says_nothing_of_another() -> None:
    """Later arrivals go before those of a low priority, and before nobody else."""
    state = state_with()
    forecast = forecast_of(state)
    high, low = make_request("high", 100, priority=0), make_request("low", 100, priority=1)
    before = forecast.predict(high)
    for _ in range(100):
        assert forecast.note(low, math.inf) is not None and low.history.forecast is not None
        state.last.first_tokens.append((low.history.forecast, 30.0, False))
    after = forecast.predict(low)
    assert before is not None and after is not None
    assert forecast.predict(high) == before
    # no more than that at once
    assert 7.0 * before < after <= 8.0 * before


def test_the_first_of_many_ends_before_half_of_their_outputs_are_over() -> None:
    for num_running in (2, 6):
        state = state_with(places=num_running - 2)
        for length in range(1, 101):
            state.lengths.observe(make_request("any", 2, 100).label, length)
        state.running.requests[:] = [make_request(f"r{i}", 2, 100) for i in range(num_running)]
        # a third of them have 17 steps of 10 ms, a third 51 and a third 84
        assert 0.16 < predicted(state) - OWN < 0.18


def test_places_come_free_in_steps_that_compute_the_prompts_before() -> None:
    """50 steps of 10 ms until one of two ends, and 4,000 tokens at 0.1 ms on the way."""
    assert 0.88 < predicted(state_with(places=0, ahead=4000)) - OWN < 0.92
    # with places enough, as many steps as the tokens take
    assert 0.78 < predicted(state_with(ahead=4000)) - OWN < 0.84


def test_those_that_are_likely_to_come_and_go_first_count() -> None:
    """Ten requests of priority 0 came in ten seconds, each of 100 tokens. While 500 steps of 10 ms
    pass until a place comes free, five more come, and take the five places before."""
    forecast = forecast_of(state_with(places=0, policy="priority", outputs=500))
    low, high = (make_request("new", 100, arrival=10.0, priority=p) for p in (1, 0))
    for request in (low, high):
        request.key = float(request.asked.priority) + 10.0 / 60.0
    alone = forecast.predict(low)
    assert alone is not None and forecast.predict(high) == alone
    for second in range(1, 11):
        request = make_request(f"r{second}", 100, arrival=float(second))
        request.key = second / 60.0
        forecast.on_arrival(request)
    longer = forecast.predict(low)
    assert longer is not None and longer > 2.0 * alone
    assert forecast.predict(high) == pytest.approx(alone, rel=1e-6), "none goes before it"


def test_no_forecast_is_longer_than_a_target_may_be() -> None:
    """As that of a request whose priority lets all others pass would be."""
    forecast = forecast_of(state_with(places=0, policy="priority", outputs=500))
    for second in range(1, 11):
        forecast.on_arrival(newcomer(second / 20.0))
    last = newcomer(1.0, priority=2**63 - 1)
    assert forecast.predict(last) == MAX_SECONDS
    assert forecast.note(last, math.inf) == last.history.predicted_ttft == MAX_SECONDS


def full_state() -> SchedulerState:
    """Under ``priority``, no place is free, and the two that run have 500 tokens to come."""
    return state_with(places=0, policy="priority", outputs=500)


def newcomer(second: float, *, priority: int = 0) -> Request:
    request = make_request(f"at {second}", 100, arrival=second, priority=priority)
    request.key = priority + second / 60.0
    request.order = request.key, 0
    return request


def test_running_requests_that_make_way_are_as_good_as_free_places() -> None:
    state = full_state()
    running = state.running.requests
    running[:] = [make_request(f"r{i}", 2, 500, priority=i) for i in range(2)]
    running[1].order = 1.0, 1
    forecast = forecast_of(state)
    high, low = forecast.predict(newcomer(5.0)), forecast.predict(newcomer(5.0, priority=1))
    assert high is not None and high < 1.1 * OWN
    assert low is not None and low > 4.9
    # the second of two that wait for one place does not find it
    state.waiting.push(make_request("waits", 100))
    second = forecast.predict(newcomer(5.0))
    assert second is not None and second > 4.9


def test_the_pace_of_a_queue_is_what_came_by_what_was_foreseen() -> None:
    """Two requests that run for 500 and 1,000 steps of 10 ms give back a place in 3.75 s."""
    for seconds in (3.75, 7.5):
        state = full_state()
        forecast = forecast_of(state)
        before = forecast.predict(newcomer(0.0))
        for number in range(200):
            state.totals.num_first_tokens += 1
            assert forecast.predict(newcomer(number * seconds)) is not None
            forecast.on_arrival(newcomer(number * seconds))
        assert forecast._pace == pytest.approx(1.0 + 0.86 * (seconds / 3.75 - 1.0), rel=0.02)
        # it came first, so none of those goes before it
        after = forecast.predict(newcomer(0.0))
        assert before is not None and after is not None
        assert after - OWN == pytest.approx(forecast._pace * (before - OWN), rel=0.01)


def test_time_in_which_places_are_free_says_nothing_of_the_pace() -> None:
    state = full_state()
    forecast = forecast_of(state)
    for number in range(50):
        # every other newcomer finds one
        state.config = replace(state.config, max_num_seqs=2 + number % 2)
        state.last.version += 1
        state.totals.num_first_tokens += 1
        assert forecast.predict(newcomer(100.0 * number)) is not None
        forecast.on_arrival(newcomer(100.0 * number))
    assert forecast._pace == 1.0


def test_a_pause_makes_a_queue_no_slower_than_that() -> None:
    state = full_state()
    forecast = forecast_of(state)
    for number in range(20):
        state.totals.num_first_tokens += 1
        assert forecast.predict(newcomer(3.75 * number)) is not None
        forecast.on_arrival(newcomer(3.75 * number))
    assert forecast.predict(newcomer(1e6)) is not None
    forecast.on_arrival(newcomer(1e6))
    assert forecast._pace == 8.0


def test_those_that_go_first_make_prompts_be_computed_again() -> None:
    """A newcomer every 7.5 s goes before one that waits, and 3,000 tokens are computed again each
    time. They take 0.3 s of the wait, the places 3.75 s."""
    said = []
    for again in (0, 3000):
        state = full_state()
        state.waiting.push(newcomer(0.0, priority=5))
        forecast = forecast_of(state)
        for number in range(30):
            state.totals.num_recomputed_tokens += again
            assert forecast.predict(newcomer(7.5 * number)) is not None
            forecast.on_arrival(newcomer(7.5 * number))
        assert forecast._again == again
        said.append(forecast.predict(newcomer(7.5 * 30, priority=1)))
    before, after = said
    assert before is not None and after is not None
    assert 1.03 < after / before < 1.15


def test_where_newcomers_displace_nothing_is_learned_by_kind() -> None:
    for policy, learns in (("priority", False), ("fcfs", True)):
        state = state_with(policy=policy)
        forecast = forecast_of(state)
        assert forecast.note(NEWCOMER, math.inf) is not None
        assert NEWCOMER.history.forecast is not None
        state.last.first_tokens.append((NEWCOMER.history.forecast, 5.0, False))
        assert forecast.predict(NEWCOMER) is not None and not state.last.first_tokens
        assert bool(forecast.outcomes) is learns


def test_where_nobody_displaces_nothing_is_measured() -> None:
    state = state_with(places=0, outputs=500)
    forecast = forecast_of(state)
    for number in range(50):
        state.totals.num_recomputed_tokens += 100
        assert forecast.predict(newcomer(10.0 * number)) is not None
        forecast.on_arrival(newcomer(10.0 * number))
    assert (forecast._pace, forecast._again) == (1.0, 0.0)


def test_where_tenants_are_kept_apart_keys_do_not_tell_who_overtakes() -> None:
    for policy, overtaken in (("deadline", True), ("fair", False)):
        forecast = forecast_of(state_with(places=0, policy=policy, outputs=500))
        low = make_request("new", 100, arrival=10.0)
        low.key = 20.0
        alone = forecast.predict(low)
        assert alone is not None
        for second in range(1, 11):
            forecast.on_arrival(make_request(f"r{second}", 100, arrival=float(second)))
        longer = forecast.predict(low)
        assert longer is not None and (longer > 1.5 * alone) is overtaken


def test_those_of_long_ago_do_not_tell_who_comes() -> None:
    forecast = forecast_of(state_with(places=0, policy="deadline", outputs=500))
    for second in range(1, 11):
        forecast.on_arrival(make_request(f"r{second}", 100, arrival=float(second)))
    late = make_request("late", 100, arrival=200.0)
    late.key = 210.0
    forecast.on_arrival(late)
    longer = forecast.predict(late)
    assert longer is not None and longer == forecast.predict(make_request("again", 100))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_of_arrivals_is_what_is_said_of_them(seed: int) -> None:
    """The last 256 of at most 60 s, by tier, against looking at all that ever came. Many have equal
    keys and times, and some times no request comes for long."""
    draw = random.Random(seed)
    state = state_with(places=0, policy="priority", outputs=500)
    forecast = forecast_of(state)
    # time, tier, key at time 0, tokens of each
    came: list[tuple[float, Tier, float, int]] = []
    now = 0.0
    most = fewest = 0
    for number in range(1500):
        now += 75.0 if number in (600, 1200) else draw.choices((0.0, 0.125, 1.0), (5, 5, 1))[0]
        request = make_request(f"r{number}", draw.choice((1, 7, 7, 100)), arrival=now)
        request.tier = draw.choice(tuple(Tier))
        request.key = draw.choice((0.0, 0.0, 1.0, -1.0)) + draw.choice((0.0, now / 60.0))
        grows = state.policy.key_per_second
        forecast.on_arrival(request)
        came.append((now, request.tier, request.key - grows * now, request.num_new_tokens))
        recent = [each for each in came[-256:] if each[0] >= now - 60.0]
        most, fewest = max(most, len(recent)), min(fewest, len(recent) - len(came[-256:]))
        for tier in Tier:
            plain = sorted((key, tokens) for _, of, key, tokens in recent if of is tier)
            assert forecast._alike[tier] == plain
        assert len(forecast._arrivals) == len(recent)
        asked = make_request("asked", 100, arrival=now)
        asked.tier, asked.key = request.tier, request.key
        if len(recent) >= 8:
            ends = asked.key - grows * now
            plain_ahead = sorted(
                ((ends - key) / grows, tokens)
                for _, of, key, tokens in recent
                if of is asked.tier and key < ends
            )
            span, ahead = forecast._overtakers(asked)
            assert ahead == plain_ahead
            assert span == max(1.0, now - recent[0][0])
    # both bounds were met
    assert most == 256 and fewest < -200


def test_refused_requests_do_not_come() -> None:
    driver = Driver(max_num_seqs=1, max_num_waiting=1)
    driver.add(make_request("a", 4, 40))
    driver.step()
    driver.add(make_request("b", 4, 40))
    with pytest.raises(QueueFullError):
        driver.add(make_request("c", 4, 40))
    assert len(driver.scheduler._admission.forecast._arrivals) == 2


def test_what_is_off_by_much_in_a_short_time_counts_little() -> None:
    state = state_with()
    forecast = forecast_of(state)
    for seconds, actual in ((0.1, 0.4), (1.0, 1.0), (100.0, 100.0)) * 100:
        forecast._learn(Forecast(KIND, seconds, seconds, 0.0, 0.0), actual)
    # the logarithm of 4 with a weight of 0.1, and of 1 twice with 1
    assert forecast.bias(KIND) == pytest.approx(4.0 ** (0.1 / 2.1), rel=0.02)


def test_an_outcome_is_compared_with_as_many_overtakers_as_had_the_time_to_come() -> None:
    """Told 2 s alone and 3 s with those who come meanwhile, half a second of work in each second.
    It took 8 s, in which four seconds of their work came: 2 + 4 were to be said, not 3."""
    forecast = forecast_of(state_with())
    for _ in range(200):
        forecast._learn(Forecast(KIND, 3.0, 2.0, 0.5, 100.0), 8.0)
    assert forecast.bias(KIND) == pytest.approx(8.0 / 6.0, rel=0.01)
    # after 2 s none of them would go first any more
    forecast = forecast_of(state_with())
    for _ in range(200):
        forecast._learn(Forecast(KIND, 3.0, 2.0, 0.5, 2.0), 8.0)
    assert forecast.bias(KIND) == pytest.approx(8.0 / 3.0, rel=0.01)


def test_a_newcomer_waits_for_the_rest_of_the_step_under_way() -> None:
    state = state_with()
    forecast = forecast_of(state)
    idle = forecast.note(make_request("idle", 100, arrival=5.0), math.inf)
    state.steps.push(0, [], StepShape(), 4.9, 0.4, None)
    early, late = (forecast.note(make_request("r", 100, arrival=at), math.inf) for at in (5.0, 5.2))
    assert idle is not None and early is not None and late is not None
    assert early == pytest.approx(idle + 0.3) and late == pytest.approx(idle + 0.1)
    assert forecast.predict(make_request("r", 100, arrival=1.0)) == pytest.approx(idle), (
        "one that would be queued anew does not wait for what is over"
    )


def test_a_boosted_request_is_computed_whole_before_what_others_lack() -> None:
    """4,000 tokens of others are lacking, 100 in a step, and a place is free at once."""
    state = state_with(ahead=4000)
    other, boosted = make_request("other", 400), make_request("boosted", 400)
    boosted.boosted = True
    forecast = forecast_of(state)
    longer, shorter = forecast.predict(other), forecast.predict(boosted)
    assert longer is not None and shorter is not None
    # one step of 10 ms + 400 tokens at 0.1 ms
    assert 0.045 < shorter < 0.055 and longer > 0.8
    # until a place comes free, steps compute what others lack
    state = state_with(places=0, ahead=4000)
    until = forecast_of(state).predict(boosted)
    assert until is not None and 0.88 < until - shorter < 0.92


def test_a_boosted_prompt_that_no_step_has_room_for_takes_several() -> None:
    state = state_with()
    most = state.config.max_num_batched_tokens
    short, long = make_request("short", most), make_request("long", 3 * most)
    short.boosted = long.boosted = True
    forecast = forecast_of(state)
    one, three = forecast.predict(short), forecast.predict(long)
    # steps of 10 ms and 0.1 ms a token
    assert one is not None and three is not None
    assert three - one > 2 * (0.010 + 1e-4 * most) - 0.002


def test_what_becomes_of_boosted_requests_says_nothing_of_the_others() -> None:
    forecast = forecast_of(state_with())
    other, boosted = make_request("other", 100), make_request("boosted", 100)
    boosted.boosted = True
    # until one has had its first token, they are as others are
    assert forecast.note(other, math.inf) is not None and other.history.forecast is not None
    forecast._learn(other.history.forecast, 1.0)
    said, kind = forecast.note(boosted, math.inf), boosted.history.forecast
    assert said is not None and kind is not None and said > 1.01 * kind.seconds
    forecast._learn(kind, kind.seconds)
    before = forecast.predict(boosted)
    for _ in range(50):
        assert forecast.note(other, math.inf) is not None and other.history.forecast is not None
        forecast._learn(other.history.forecast, 1.0)
    after = forecast.predict(other)
    assert before is not None and forecast.predict(boosted) == before
    assert after is not None and after > 5.0 * before


@pytest.mark.parametrize("policy", ["fcfs", "fair", "sjf", "priority", "static"])
def test_requests_without_targets_that_go_first_are_waited_for(policy: str) -> None:
    machine = Machine(
        policy=policy, max_num_seqs=16, max_num_batched_tokens=64, max_predicted_ttft_s=60.0
    )
    for number in range(20):
        machine.add(make_request(f"plain{number}", 240, 2))
    machine.add(make_request("targeted", 240, 2, slo=Slo(ttft=1.0)))
    newcomer = make_request("newcomer", 240, 2, slo=Slo(ttft=1.0))
    machine.add(newcomer)
    while not newcomer.output_token_ids:
        machine.step()
    assert newcomer.history.predicted_ttft == pytest.approx(machine.now, rel=0.25)


def test_best_effort_that_can_still_meet_its_deadline_is_told_no_later_time() -> None:
    """Ten prompts of a second each are due in three: what is larger than all of them is left out,
    and a smaller one is served when its deadline comes near."""
    state = state_with()
    soon = Slo(best_effort=True, deadline=3.0)
    forecast = forecast_of(state)
    for number in range(10):
        state.waiting.push(numbered(f"b{number}", number, 5000, slo=soon))
    small, large = numbered("small", 10, 100, slo=soon), numbered("large", 11, 9000, slo=soon)
    alone = numbered("alone", 12, 100, slo=Slo(best_effort=True, deadline=30.0))
    # its output takes longer than that
    hopeless = numbered("hopeless", 13, 100, slo=Slo(best_effort=True, deadline=0.05))
    asked = small, large, alone, hopeless
    told = {request: forecast.note(request, math.inf) for request in asked}
    late = {r: r.history.forecast.kind.late for r in told if r.history.forecast is not None}
    assert late == {small: False, large: True, alone: False, hopeless: True}
    # less the time of its output
    assert (told[small] or 0.0) < 3.0 < (told[large] or 0.0)
    assert 3.0 < (told[alone] or 0.0) < 30.0
    learned = small.history.forecast
    assert learned is not None and not learned.alone, "the deadline tells nothing of the queue"


def test_kinds_differ_by_how_long_a_request_may_wait() -> None:
    forecast, kinds = forecast_of(state_with()), []
    for ttft in (None, 1e-9, 0.9, 1.0, 3.0, 3600.0):
        request = make_request("new", 100, slo=Slo(ttft=ttft))
        assert forecast.note(request, math.inf) is not None
        assert request.history.forecast is not None
        kinds.append(request.history.forecast.kind.patience)
    assert kinds == [6, -6, 0, 1, 2, 5]
