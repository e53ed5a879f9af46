"""Which engine is chosen, and what it is chosen by."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from paceline.routing import Demand, EngineLoad, Pressure, choose, prefix_chain
from paceline.routing.latency import LatencyModel, LinearModel
from paceline.routing.prefixes import PrefixIndex

DEMAND = Demand(prompt_tokens=100.0, max_tokens=64.0, output_tokens=32.0)


def chosen(loads: list[EngineLoad], demand: Demand = DEMAND, now: float = 0.0) -> str:
    views = [load.view(demand, now) for load in loads]
    return views[choose(views, demand, random.Random(0))].name


def test_between_polls_what_was_sent_counts_at_once() -> None:
    loads = [EngineLoad("a"), EngineLoad("b")]
    for load in loads:
        load.heard(Pressure(0.0, waiting=0.0, running=0.0, kv=0.0))
    sent = []
    for _ in range(20):
        name = chosen(loads)
        load = next(load for load in loads if load.name == name)
        load.dispatch(DEMAND, load.view(DEMAND, 0.0), 0.0)
        sent.append(name)
    assert sent.count("a") == sent.count("b") == 10


def test_a_known_prefix_draws_and_a_queue_repels() -> None:
    loads = [EngineLoad("a"), EngineLoad("b")]
    demand = replace(DEMAND, prompt_tokens=4000.0, prefix=prefix_chain(b"x" * 16_000))
    loads[1].prefixes.add(demand.prefix)
    assert chosen(loads, demand) == "b"
    for _ in range(4):
        other = replace(demand, prefix=())
        loads[1].dispatch(other, loads[1].view(other, 0.0), 0.0)
    assert chosen(loads, demand) == "a"


def test_a_known_prefix_draws_where_a_long_answer_drowns_what_it_saves() -> None:
    demand = Demand(400.0, 4096.0, 2048.0, prefix=prefix_chain(b"x" * 1600))
    for seed in range(10):
        loads = [EngineLoad("a"), EngineLoad("b")]
        loads[seed % 2].prefixes.add(demand.prefix)
        views = [load.view(demand, 0.0) for load in loads]
        assert choose(views, demand, random.Random(seed)) == seed % 2


def test_one_tenants_prompts_do_not_show_in_anothers_way() -> None:
    assert not set(prefix_chain(b"y" * 2048, b"ann")) & set(prefix_chain(b"y" * 2048, b"bob"))
    assert len(prefix_chain(b"y" * 2047)) == 7


def test_a_slower_engine_is_learned_to_be_slow() -> None:
    loads = [EngineLoad("slow"), EngineLoad("fast")]
    for step in range(40):
        for load, pace in zip(loads, (0.08, 0.01), strict=True):
            now = float(step)
            ticket = load.dispatch(DEMAND, load.view(DEMAND, now), now)
            ticket.first_token(now + pace)
            ticket.end(now + 32 * pace, 32)
    assert chosen(loads, now=50.0) == "fast"
    assert loads[0].view(DEMAND, 50.0).tpot == pytest.approx(0.08, rel=0.1)
    # whoever wants more than the slow one gives is sent to the fast one however busy it is
    for _ in range(10):
        loads[1].dispatch(DEMAND, loads[1].view(DEMAND, 50.0), 50.0)
    paced = replace(DEMAND, tpot=0.05)
    assert chosen(loads, paced, 50.0) == "fast"


def test_memory_that_is_missing_counts_as_the_time_in_which_it_comes_free() -> None:
    loads = [EngineLoad("full"), EngineLoad("roomy")]
    loads[0].heard(Pressure(0.0, kv=0.5, capacity_tokens=264.0))
    loads[0].dispatch(DEMAND, loads[0].view(DEMAND, 0.0), 0.0)
    loads[0].dispatch(DEMAND, loads[0].view(DEMAND, 0.0), 0.0)
    view = loads[0].view(DEMAND, 0.0)
    assert view.wait == pytest.approx(0.5 * 32.0 * view.tpot)
    for _ in range(4):
        loads[1].dispatch(DEMAND, loads[1].view(DEMAND, 0.0), 0.0)
    assert chosen(loads) == "roomy"


def test_short_of_memory_gets_nothing_new_but_its_own() -> None:
    loads = [EngineLoad("full"), EngineLoad("busy")]
    loads[0].heard(Pressure(0.0, waiting=0.0, running=3.0, kv=0.96))
    for _ in range(8):
        loads[1].dispatch(DEMAND, loads[1].view(DEMAND, 0.0), 0.0)
    assert chosen(loads) == "busy"
    own = replace(DEMAND, prefix=prefix_chain(b"z" * 1024), tokens_per_run=25.0)
    loads[0].prefixes.add(own.prefix)
    assert chosen(loads, own) == "full"
    # below the lower mark it is well again; what it said long ago is worth nothing
    loads[0].heard(Pressure(1.0, waiting=2.0, running=3.0, kv=0.85))
    assert loads[0].pressed
    loads[0].heard(Pressure(2.0, waiting=0.0, running=3.0, kv=0.82))
    assert not loads[0].pressed


def test_a_full_cache_without_a_queue_is_normal() -> None:
    load = EngineLoad("a")
    load.heard(Pressure(0.0, waiting=0.0, running=3.0, kv=0.93))
    assert not load.pressed
    load.heard(Pressure(1.0, waiting=0.0, running=3.0, kv=0.93, preemptions=1.0))
    load.heard(Pressure(2.0, waiting=0.0, running=3.0, kv=0.93, preemptions=4.0))
    assert load.pressed


def test_a_ticket_ends_once() -> None:
    load = EngineLoad("a")
    ticket = load.dispatch(DEMAND, load.view(DEMAND, 0.0), 0.0)
    assert load.prefill_tokens == 100.0 and load.resident_tokens == 132.0
    ticket.first_token(0.5)
    ticket.first_token(0.6)
    assert load.prefill_tokens == 0.0 and load.latency.num_samples == 1
    ticket.end(1.0, 32)
    ticket.end(1.0, 32)
    assert load.resident_tokens == 0.0 and not load.running


def test_the_line_is_found() -> None:
    fit = LinearModel((0.0, 0.0))
    draw = random.Random(1)
    for _ in range(1000):
        x = draw.uniform(0.0, 4.0)
        fit.learn((1.0, x), 0.2 + 0.7 * x + draw.gauss(0.0, 0.01))
    assert fit.predict((1.0, 2.0)) == pytest.approx(1.6, abs=0.05)


def test_no_sample_makes_a_queue_look_good() -> None:
    """Weights stay above 0 and what is predicted stays sane, whatever comes."""
    fit = LinearModel((0.05, 0.5, 0.0, 1.0))
    draw = random.Random(2)
    for _ in range(2000):
        x = (1.0, draw.expovariate(1.0), draw.expovariate(1.0), draw.choice((0.0, 0.0, 9.0)))
        fit.learn(x, draw.choice((0.1, 0.2, 30.0)))
        assert all(fit.predict(e) >= 0.0 for e in ((1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)))
    assert fit.predict((1.0, 1.0, 1.0, 0.0)) < 60.0


def test_idle_features_do_not_wind_up() -> None:
    model = LatencyModel()
    for _ in range(5000):
        model.saw_first(100.0, 0.0, 0.0, 0.05)
    model.saw_first(100.0, 5.0, 0.0, 0.5)
    assert 0.0 < model.first_token(100.0, 0.0, 0.0) < 0.1


def test_prefixes_are_forgotten_from_the_longest() -> None:
    index = PrefixIndex(memory=4)
    index.add([1, 2, 3, 4])
    index.add([1, 2, 9])
    assert len(index) == 4 and index.matched([1, 2, 3, 4]) == 3 and index.matched([1, 2, 9]) == 3
    index.clear()
    assert index.matched([1]) == 0


def test_an_engine_without_a_free_slot_is_left_out_between_its_reports() -> None:
    loads = [EngineLoad("small"), EngineLoad("big")]
    for load, slots in zip(loads, (4.0, 64.0), strict=True):
        load.heard(Pressure(0.0, waiting=0.0, running=0.0, kv=0.0, slots=slots))
    # the big one is slower, but not as slow as a wait
    for _ in range(200):
        loads[1].latency.saw_next(4.0, 0.05)
    sent = []
    for _ in range(10):
        name = chosen(loads)
        load = next(load for load in loads if load.name == name)
        load.dispatch(DEMAND, load.view(DEMAND, 0.0), 0.0)
        sent.append(name)
    assert sent.count("small") == 4


def test_slots_that_other_clients_hold_are_not_free() -> None:
    load = EngineLoad("a")
    for _ in range(2):
        load.dispatch(DEMAND, load.view(DEMAND, 0.0), 0.0)
    # two of ours, and five of others
    load.heard(Pressure(0.0, waiting=0.0, running=7.0, kv=0.1, slots=8.0))
    assert load.view(DEMAND, 0.0).wait == 0.0
    load.dispatch(DEMAND, load.view(DEMAND, 0.0), 0.0)
    full = load.view(DEMAND, 0.0)
    # one of eight ends in an eighth of an answer's time
    assert full.wait == pytest.approx(DEMAND.output_tokens * full.tpot / 8.0)


def test_a_new_engine_is_expected_to_be_like_the_others_of_its_pool() -> None:
    loads = [EngineLoad("a"), EngineLoad("b"), EngineLoad("new")]
    for load in loads[:2]:
        for _ in range(300):
            load.latency.saw_first(100.0, 4.0, 0.0, 0.2)
            load.latency.saw_next(5.0, 0.08)
    guess = loads[2].view(DEMAND, 0.0)
    # the guess would make it look faster than those that are known
    assert guess.ttft + 32 * guess.tpot < 0.6 * loads[0].view(DEMAND, 0.0).tpot * 32
    loads[2].expect_like(loads[:2])
    new, old = loads[2].view(DEMAND, 0.0), loads[0].view(DEMAND, 0.0)
    assert (new.ttft, new.tpot) == pytest.approx((old.ttft, old.tpot))
    # and it is not spoiled by one slow answer
    loads[2].latency.saw_next(5.0, 0.8)
    assert loads[2].view(DEMAND, 0.0).tpot < 2.0 * old.tpot
    # nothing is learned of engines that know nothing
    other = EngineLoad("other")
    other.expect_like([EngineLoad("c")])
    assert other.view(DEMAND, 0.0).ttft == guess.ttft


def test_an_engine_that_starts_is_used_where_the_others_are_full() -> None:
    loads = [EngineLoad("full"), EngineLoad("starts")]
    for load in loads:
        load.heard(Pressure(0.0, waiting=0.0, running=0.0, kv=0.0, slots=4.0))
    names = []
    for seed in range(8):
        views = [loads[0].view(DEMAND, 0.0), loads[1].view(DEMAND, 0.0, share=0.1)]
        names.append(views[choose(views, DEMAND, random.Random(seed))].name)
        if seed == 3:
            # its slots are taken from now on
            for _ in range(4):
                loads[0].dispatch(DEMAND, loads[0].view(DEMAND, 0.0), 0.0)
    assert names[:4].count("full") >= 3 and names[4:] == ["starts"] * 4
