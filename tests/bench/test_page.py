"""A run's page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.account import make_report
from paceline.bench.page import _in_flight, _tokens, bench_page
from tests.bench.test_account import CUT, GOOD, LATE, REFUSED
from tests.sim.report.test_page import parse


def test_everything_is_there() -> None:
    report = make_report([GOOD, LATE, REFUSED, CUT], name="m<", lags=[0.5])
    tree = parse(bench_page(report, {"rate": 4.0}, {"cpu": "<b>"}))
    words = "\n".join(tree.itertext())
    for expected in (
        "4 requests to m<", "could not keep up", "refused: 429", "full", "Time to first token",
        "Time per output token", "End to end", "Requests in flight", "target 500",
        "refused or failed (at 0)", "rate", "<b>",
    ):  # fmt: skip
        assert expected in words, expected
    assert len(list(tree.iter("svg"))) == 6


def test_a_run_without_any_success_has_a_page() -> None:
    for outcomes in ([], [REFUSED]):
        parse(bench_page(make_report(outcomes), {}, {}))


def test_what_is_drawn_adds_up() -> None:
    outcomes = [GOOD, LATE, replace(GOOD, sent=0.3, chunks=(0.4, 2.5), ended=2.5)]
    end = 2.5
    flight = _in_flight(outcomes, end)
    assert sum(value for _, value in flight) * end / len(flight) == pytest.approx(
        sum(o.ended - o.sent for o in outcomes)
    )
    tokens = _tokens(outcomes, end)
    assert sum(value for _, value in tokens) * end / len(tokens) == pytest.approx(12)
    assert tokens[0][0] == pytest.approx(end / 200)
