"""The arithmetic of ``benchmarks.overload``: minutes, what was possible, forecasts, returns."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.overload import changes, live, mixes, rates, returns
from benchmarks.overload.judging import (
    Minute,
    Ratios,
    Shares,
    by_minute,
    ideal,
    of_possible,
    ratios,
)
from benchmarks.overload.serving import CAPACITY, EQUAL, as_served, chats, in_time, play, times
from benchmarks.studies.bound import ROW, STEP, TOKEN, Asked, share_in_time
from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.core.slo import Slo
from paceline.sim.arrival import Arrival, Served


def served(at: float, ttft: float | None, predicted: float | None = None, **fields: Any) -> Served:
    arrival = Arrival(at, 5, 3, slo_class="chat", ttft=1.0, **fields)
    first = None if ttft is None else at + ttft
    last = None if first is None else first + 1.0
    refused = first is None
    return Served(arrival, 0, at, first, last, 3, 0, 0, refused, predicted_ttft=predicted)


def test_a_minute_is_judged_by_what_its_own_arrivals_allow() -> None:
    moments = [
        (0.5, True),
        (59.9, False),
        (60.0, True),
        (61.0, True),
        (179.0, False),
        (181.0, True),
    ]
    minutes = by_minute(moments, 3)
    assert minutes == [Minute(2, 1), Minute(2, 2), Minute(1, 0)]
    assert by_minute(moments, 1, begin=30.0) == [Minute(3, 2)]
    # room for 60 in a minute: of 30 all are possible, of 90 two thirds
    shares = of_possible([Minute(30, 27), Minute(0, 0), Minute(90, 57), Minute(60, 60)], 1.0)
    assert shares == [pytest.approx(0.9), pytest.approx(0.95), 1.0]


def test_an_ideal_server_takes_none_that_would_be_late() -> None:
    # two places, a second each; a request waits for half a second at most
    kept = ideal([0.0, 0.1, 0.2, 0.6, 0.7, 1.05, 1.3], 2, 1.0, 0.5)
    # the third would wait until 1.0; the fourth does, the fifth until 1.1, the next until 2.0
    assert kept == [True, True, False, True, True, False, False]


def test_forecasts_are_judged_by_their_median_and_the_factor_of_nine_in_ten() -> None:
    said = [served(0.0, 2.0, 1.0), served(0.0, 0.5, 1.0), served(0.0, 1.0, 1.0), served(0.0, 1.0)]
    refused = served(0.0, None, 9.0)
    values = ratios([*said, refused, None], lambda each: True)
    assert values == [0.5, 2.0, 1.0]
    assert ratios(said, lambda each: (each.ttft or 0.0) > 1.0) == [0.5]
    told = Ratios.of([0.5, 1.0, 1.0, 1.0, 1.1, 1.25, 1.25, 1.25, 1.25, 1.25, 4.0])
    assert told == Ratios(1.25, 2.0, 11)
    assert Ratios.of([]) == Ratios(None, None, 0)


def test_the_seconds_of_a_step_are_divided_among_its_rows() -> None:
    watch = Shares(
        [
            Arrival(0.0, 5, 3, slo_class="chat"),
            Arrival(0.0, 5, 3, slo_class="best-effort"),
            Arrival(0.0, 5, 3, slo_class="batch"),
        ],
        seconds_of=lambda num_tokens: 1.0 if num_tokens == 1 else 0.5 * num_tokens,
    )

    def step(start: float, end: float, **rows: int) -> None:
        made = tuple(ScheduledRow(f"{name[1:]}/0", 0, n, (), True) for name, n in rows.items())
        watch(0, SchedulerOutput(0, made, (), (), (), sum(rows.values())), start, start, end)

    # three of four parts, then none; none ran from 10 to 20; half
    step(0.0, 1.0, r0=1, r1=4, r2=1)
    step(1.0, 2.0, r0=1)
    step(25.0, 26.0, r0=1, r2=1)
    assert watch.least(0.0, 10.0) == pytest.approx(0.375)
    assert watch.least(0.0, 30.0) == pytest.approx(0.375)
    assert watch.least(10.0, 30.0) == pytest.approx(0.5)


def test_what_comes_in_a_part_does_not_depend_on_those_before_it() -> None:
    loud = list(times([(10.0, 3.0), (10.0, 0.9)], seed=1))
    quiet = list(times([(10.0, 0.9), (10.0, 0.9)], seed=1))
    assert [at for at in loud if at >= 10.0] == [at for at in quiet if at >= 10.0]
    assert sum(at < 10.0 for at in loud) > 2 * sum(at < 10.0 for at in quiet)
    assert all(a <= b for a, b in pairwise(loud)) and loud[-1] < 20.0
    assert len(list(times([(1000.0, 1.0)], seed=2))) == pytest.approx(1000 * CAPACITY, rel=0.05)


def test_below_capacity_all_is_in_time_and_the_capacity_is_what_it_is_said_to_be() -> None:
    outcome = rates.rate(rates.Rate("fcfs", 0.5, 1, 1, False))
    assert outcome.shares == outcome.ideal == [1.0] and outcome.refused == 0
    assert outcome.share is None and outcome.most_waiting < 8
    # all at once: the last of so many ends when there has been time for all of them
    run = play(as_served("fcfs", max_num_seqs=8), EQUAL, chats([0.0] * 80), until=99.0)
    ends = [each.last_token for each in run.outcomes if each is not None and each.last_token]
    assert len(ends) == 80 and max(ends) == pytest.approx(80 / CAPACITY, rel=0.01)
    assert sum(map(in_time, run.outcomes)) == 8
    assert sum(in_time(each, Slo(ttft=5.5)) for each in run.outcomes) == 48


def test_figures_are_the_worst_of_all_seeds() -> None:
    def outcome(shares: list[float], waiting: int, share: float | None = None) -> rates.Outcome:
        forecasts = {"all": [0.5, 1.0, 1.0], "late": [0.5], "best effort": [2.0] if share else []}
        return rates.Outcome(shares, shares, [1.0, 0.8], waiting, 3, forecasts, share)

    found = {
        rates.Rate("deadline", 2.0, 1, 2, False): outcome([0.9, 0.8], 7),
        rates.Rate("deadline", 2.0, 2, 2, False): outcome([0.7, 1.0], 5),
        rates.Rate("deadline", 2.0, 1, 2, True): outcome([0.6, 0.9], 99, 0.05),
        rates.Rate("deadline", 2.0, 2, 2, True): outcome([0.9, 0.9], 99, 0.04),
    }
    entry = rates.figures(found)["deadline"]["2"]
    assert (entry["worst_minute_of_possible"], entry["max_waiting"], entry["refused"]) == (
        0.7,
        7,
        6,
    )
    assert (entry["forecast_p50_ratio"], entry["forecast_p90_ratio"]) == (1.0, 2.0)
    assert (entry["late_served"], entry["late_forecast_p50_ratio"]) == (2, 0.5)
    assert (entry["ideal_worst_minute"], entry["worst_minute_of_ideal"]) == (0.8, 0.7)
    assert entry["worst_minute_beside_best_effort"] == 0.6
    assert (entry["best_effort_share_min"], entry["best_effort_forecast_p50_ratio"]) == (0.04, 2.0)
    assert "| deadline" in rates.tables(found)


def test_recovery_is_the_same_minute_with_and_without_the_overload() -> None:
    def outcome(after: float) -> changes.Outcome:
        return changes.Outcome([after], [after], [after], after, 3)

    found = {
        changes.Change(name, "fair", seed): outcome(after)
        for name, seed, after in (
            ("overload before", 1, 0.9),
            ("none before", 1, 1.0),
            ("overload before", 2, 0.5),
            ("none before", 2, 1.0),
        )
    }
    assert changes.recovery(found) == {"fair": 0.7}
    entry = changes.figures(found)["fair"]["overload before"]
    assert entry == {
        "worst_minute_of_ideal": 0.5,
        "worst_minute_of_possible": 0.5,
        "max_waiting": 3,
    }


def test_minutes_of_a_mix_are_compared_with_the_first() -> None:
    shares = ([0.8, 0.4, 0.8], [0.4, 0.4, 0.4])
    found = {
        mixes.Mixed("three classes", seed, 3): mixes.Outcome(
            each, 0.8, 0.9, seed, [1.0, 2.0, 1.5], None
        )
        for seed, each in enumerate(shares)
    }
    entry = mixes.figures(found)["three classes"]
    # of the bound, on average: 0.75, 0.5, 0.75; the first minute, of its own: 0.667
    assert (entry["worst_of_first_minute"], entry["worst_of_second_minute"]) == (0.75, 1.0)
    assert entry["worst_of_first_minute_same_bound"] == 0.667
    assert (entry["of_bound"], entry["bound"], entry["max_waiting"]) == (0.667, 0.8, 1)
    assert (entry["forecast_p50_ratio"], entry["forecast_p90_ratio"]) == (1.5, 2.0)
    assert mixes.share(found) is None and "| three classes" in mixes.table(found)


@pytest.mark.parametrize("name", mixes.MIXES)
def test_a_minute_of_every_mix_has_a_bound(name: str) -> None:
    mix = mixes.MIXES[name]
    minute = mixes.minute_of(mix, 1)
    assert minute == mixes.minute_of(mix, 1) != mixes.minute_of(mix, 2)
    assert 0.4 * mix.rate < len(minute) / 60.0 < 2.0 * mix.rate
    if mix.prompts is not None:
        sizes = [each.prompt_tokens for each in minute]
        assert min(sizes) < 50 and max(sizes) > 3000
        assert mix.prompts[0] <= min(sizes) and max(sizes) <= mix.prompts[1]
    if mix.judged:
        assert mix.judged in {each.tenant for each in minute}


def test_the_bound_by_hand() -> None:
    # 1 s of prompt each: one is done in time of two that come together and are due after it
    slo = Slo(deadline=1.0)
    tokens = round(1.0 / TOKEN)
    both = [Asked(0.0, tokens, 1, slo), Asked(0.0, tokens, 1, slo)]
    assert share_in_time(both, 10.0) == pytest.approx(0.5, rel=1e-3)
    apart = [Asked(0.0, tokens, 1, slo), Asked(5.0, tokens, 1, slo)]
    assert share_in_time(apart, 10.0) == pytest.approx(1.0, rel=1e-3)
    # nor more than there is time for, however late it is due
    late = [Asked(0.0, tokens, 1, Slo(deadline=99.0)) for _ in range(4)]
    assert share_in_time(late, 3.0) == pytest.approx(0.75, rel=1e-3)
    # rows of a stream take their part of the fixed time of steps: here half
    streams = [Asked(0.0, 1, 1 + round(1.0 / ROW), Slo(ttft=0.001, tpot=2 * STEP))] * 2
    assert share_in_time(streams, 2.0) == pytest.approx(0.5, rel=1e-2)


def test_who_is_refused_comes_back_and_is_told_apart_from_newcomers() -> None:
    clients = returns.Returns(None)
    refusal = replace(served(1.0, None), retry_after=5.0)
    first = clients.again(refusal, 2.0)
    assert first is not None and first.at == 7.0
    second = clients.again(replace(refusal, arrival=first, retry_after=3.0), 8.0)
    assert second is not None and second.at == 11.0
    assert clients.again(replace(served(11.0, 0.5), arrival=second), 12.0) is None
    assert clients.told == [5.0, 3.0] and clients.arrivals == [first, second]
    assert [clients.clients[id(each)][1] for each in (first, second)] == [1, 2]
    assert all(clients.clients[id(each)][0] is refusal.arrival for each in (first, second))
    taken = [not clients.outcomes[id(each)].refused for each in (first, second)]
    assert taken == [False, True]
    # until it gives up
    back: Arrival | None = first
    for _ in range(returns.MOST - 1):
        assert back is not None
        back = clients.again(replace(refusal, arrival=back), back.at)
    assert back is not None and clients.again(replace(refusal, arrival=back), back.at) is None


def test_of_a_sample_every_client_comes_back_once() -> None:
    clients = returns.Returns(2)
    refusals = [replace(served(float(at), None), retry_after=1.0) for at in range(4)]
    back = [clients.again(each, 10.0) for each in refusals]
    assert [each is not None for each in back] == [False, True, False, True]
    assert back[1] is not None
    assert clients.again(replace(refusals[1], arrival=back[1]), 20.0) is None


def test_shares_taken_are_those_of_all_seeds_and_the_worst_of_all_servers() -> None:
    def outcome(judged: tuple[int, int]) -> returns.Outcome:
        return returns.Outcome(9, (8, 6), judged, (20, 10), (50, 40), [1.0, 3.0])

    found = {
        returns.Returned("ends", "deadline", 1): outcome((10, 10)),
        returns.Returned("ends", "deadline", 2): outcome((30, 26)),
        returns.Returned("burst", "deadline", 1): outcome((4, 3)),
        returns.Returned("lasts", "deadline", 1): outcome((9, 1)),
    }
    entry = returns.figures(found)["deadline"]
    assert (entry["ends"]["taken"], entry["burst"]["taken"]) == (0.9, 0.75)
    assert (entry["ends"]["taken_of_clients"], entry["ends"]["retry_after_median_s"]) == (0.75, 2.0)
    assert returns.kept(found) == 0.75
    # as long as none is refused there is nothing to say
    assert returns.kept({returns.Returned("ends", "fair", 1): outcome((0, 0))}) is None


def test_a_live_run_is_judged_by_what_its_client_saw() -> None:
    line = "request id=1 queued=0.1 predicted_ttft={} ttft={} tokens_per_second=50\n"
    log = line.format("0.5", "1.0") + line.format("None", "0.2") + line.format("3.0", "2.0")
    assert live.told_and_came(log) == [0.5, 1.5]
    found = {
        "requests": [
            {"sent": 0.0, "failure": "", "chunks": [0.9, 1.5]},
            {"sent": 10.0, "failure": "", "chunks": [11.5]},
            {"sent": 70.0, "failure": "429", "chunks": []},
            {"sent": 71.0, "failure": "", "chunks": [71.2]},
        ],
        "refused": {"429": 1},
        "failed": {},
        "kept_up": True,
    }
    entry = live.figures(found, 1 / 60, 2, 5, [0.5, 1.0, 1.0])
    assert entry["minutes_of_possible"] == [1.0, 1.0]
    assert live.figures(found, 2 / 60, 2, 5, [])["worst_minute_of_possible"] == 0.5
    assert (entry["forecast_p50_ratio"], entry["max_waiting"]) == (1.0, 5)
