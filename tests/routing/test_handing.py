"""Hand-overs: which prompts are computed at another engine, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.routing import Demand, EngineLoad, EngineView, HandOvers


def view(ttft: float, **fields: Any) -> EngineView:
    values: dict[str, Any] = {
        "name": "e", "num_requests": 0, "prefill_tokens": 1000.0, "cached_tokens": 0.0,
        "wait": 0.0, "kv": 0.1, "ttft": ttft, "tpot": 0.01, "staleness": 0.0,
    }  # fmt: skip
    return EngineView(**(values | fields))


def demand(**fields: Any) -> Demand:
    return Demand(**({"prompt_tokens": 1000, "max_tokens": 101, "output_tokens": 101} | fields))


@pytest.mark.parametrize(
    ("wanted", "asked", "prompts", "outputs"),
    [
        # sooner there, and not sooner; a tie stays
        (True, {}, {"ttft": 0.4}, {"ttft": 0.5}),
        (False, {}, {"ttft": 0.6}, {"ttft": 0.5}),
        (False, {}, {"ttft": 0.5}, {"ttft": 0.5}),
        # half a second of its own would delay two streams by a second in all: 1.5 s against 1.4
        (True, {}, {"ttft": 1.4}, {"ttft": 0.5, "num_requests": 2}),
        (False, {}, {"ttft": 1.6}, {"ttft": 0.5, "num_requests": 2}),
        # of which only its own tokens count: a quarter of what is ahead
        (False, {}, {"ttft": 1.4}, {"ttft": 0.5, "num_requests": 2, "prefill_tokens": 4000.0}),
        # targets first: late here and not there, and the other way round; with a margin of 2
        (True, {"ttft": 1.0}, {"ttft": 0.5}, {"ttft": 0.51}),
        (True, {"ttft": 3.0}, {"ttft": 1.4}, {"ttft": 1.6}),
        (False, {"ttft": 2.0}, {"ttft": 1.1}, {"ttft": 0.9, "num_requests": 9}),
        # few new tokens, one token of output, no memory there
        (False, {}, {"ttft": 0.1}, {"ttft": 0.5, "cached_tokens": 801.0}),
        (True, {}, {"ttft": 0.1}, {"ttft": 0.5, "cached_tokens": 800.0}),
        (False, {"max_tokens": 1}, {"ttft": 0.1}, {"ttft": 0.5}),
        (False, {}, {"ttft": 0.1, "pressed": True}, {"ttft": 0.5}),
    ],
)
def test_what_pays(
    wanted: bool, asked: dict[str, Any], prompts: dict[str, Any], outputs: dict[str, Any]
) -> None:
    assert HandOvers().pays(demand(**asked), view(**prompts), view(**outputs), 200) is wanted


def test_a_gap_that_breaks_the_pace_is_learned() -> None:
    hands, here, there = HandOvers(), view(0.5), view(0.1)
    asked = demand(tpot=0.012)
    assert hands.gap(1000) == 0.0 and hands.pays(asked, there, here, 200)
    # 0.19 s over 100 tokens: 1.9 ms a token more than 10 ms, and 12 ms are allowed
    hands.saw(500, 0.095)
    assert hands.gap(1000) == pytest.approx(0.19) and hands.pays(asked, there, here, 200)
    hands.saw(1000, 0.25)
    assert hands.gap(1000) == pytest.approx(0.22) and not hands.pays(asked, there, here, 200)
    # without a target, and where it is missed anyway, the gap decides nothing
    assert hands.pays(demand(), there, here, 200)
    assert hands.pays(demand(tpot=0.009), there, here, 200)
    for _ in range(50):
        hands.saw(1000, 0.05)
    assert hands.pays(asked, there, here, 200)


def test_a_prompt_from_elsewhere_teaches_no_first_token() -> None:
    load = EngineLoad("e")
    seen = load.view(demand(), 0.0)
    ticket = load.dispatch(demand(), seen, 0.0, fetched=True)
    assert load.prefill_tokens == 0.0 and load.resident_tokens == 1101.0
    ticket.first_token(0.01)
    assert load.num_first == 0 and load.view(demand(), 0.0).ttft == pytest.approx(seen.ttft)
    ticket.end(1.01, 100)
    assert load.resident_tokens == 0.0 and load.latency.next_token(0) < 0.03
