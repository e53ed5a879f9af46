"""Figures of a run, computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.bench.account import make_report
from paceline.bench.answers import Outcome


def outcome(number: int, sent: float, *chunks: float, output: int | None = 4) -> Outcome:
    """Sent a millisecond late; 10 prompt tokens."""
    return Outcome(
        number,
        sent - 0.001,
        sent,
        chunks[-1] if chunks else sent + 1.0,
        10,
        4,
        status=200,
        chunks=chunks,
        prompt_tokens=10,
        output_tokens=output,
        slo=(0.5, None, None),
    )


GOOD = outcome(0, 0.0, 0.2, 0.3, 0.8)
LATE = outcome(1, 1.0, 2.0, 2.5)
REFUSED = replace(outcome(2, 2.0), status=429, failure="429", detail="full")
CUT = replace(outcome(3, 4.0, 4.1), failure="cut off")


def test_figures() -> None:
    report = make_report([GOOD, LATE, REFUSED, CUT], name="m")
    run = report.summary
    assert (run.requests, report.ok) == (4, 2)
    assert (report.refused, report.failed) == ({"429": 1}, {"cut off": 1})
    assert run.ttft is not None and run.ttft.mean == pytest.approx(0.6)
    assert run.tpot is not None and run.tpot.max == pytest.approx(0.6 / 3)
    assert run.e2e is not None and run.e2e.max == pytest.approx(1.5)
    # between chunks, of what succeeded: 0.1, 0.5, 0.5
    assert run.itl is not None
    assert (run.itl.count, run.itl.p50) == (3, pytest.approx(0.5))
    # from the first request to the last token, of what succeeded
    assert run.duration == pytest.approx(2.5)
    assert run.token_rate == pytest.approx(8 / 2.5)
    assert report.total_token_rate == pytest.approx(28 / 2.5)
    assert run.attainment == 0.25
    # three gaps in four seconds
    assert report.sent_rate == report.offered_rate == pytest.approx(0.75)
    assert run.goodput == pytest.approx(0.75 * 0.25)
    assert report.late is not None and report.late.max == pytest.approx(0.001)
    # 0.8 + 1.5 + 1 + 0.1 of 4.1 seconds
    assert report.concurrency == pytest.approx(3.4 / 4.1)
    assert report.peak_concurrency == 2


def test_what_people_see() -> None:
    table = make_report([GOOD, LATE, REFUSED, CUT], name="m").table()
    for words in (
        "| refused: 429             |    1 |",
        "| failed: cut off          |    1 |",
        "| output tokens (by usage) |    8 |",
        "| attainment %             | 25.0 |",
        "| TTFT      |  600.0 |",
        "429: full",
        "| generator kept up        |  yes |",
    ):
        assert words in table, table


def test_it_fits_in_a_terminal() -> None:
    """Of 80 columns; what is longer is broken between words."""
    long = replace(REFUSED, detail="the prompt has 8998 tokens, " * 5 + "http://" + "x" * 90)
    report = make_report([replace(GOOD, due=-0.5), long], name="m", interrupted=True)
    table = report.table()
    lines = table.splitlines()
    assert [len(line) for line in lines if len(line) > 80] == [2 + 7 + 90]
    assert all(warning in " ".join(table.split()) for warning in report.warnings)
    assert " ".join(f"429: {long.detail}".split()) in " ".join(table.split())


def test_a_closed_loop_has_no_offered_rate() -> None:
    outcomes = [replace(o, due=None) for o in (GOOD, LATE)]
    report = make_report(outcomes)
    assert report.offered_rate is report.sent_rate is report.late is None
    assert report.summary.goodput == pytest.approx(1 / 2.5)
    assert "offered" not in report.table()


def test_a_late_generator_says_so() -> None:
    late = replace(GOOD, due=-0.5)
    for report in (make_report([late]), make_report([GOOD], lags=[0.0, 0.5])):
        assert not report.kept_up
        assert "could not keep up" in report.table()
        assert report.as_json()["kept_up"] is False
    assert make_report([GOOD], lags=[0.0, 0.001]).kept_up


def test_chunks_are_counted_where_there_is_no_usage() -> None:
    report = make_report([GOOD, outcome(1, 1.0, 2.0, 2.5, output=None)])
    assert report.summary.output_tokens == 4 + 2
    assert report.counted == "usage and chunks"
    assert "counted by chunks" in report.table()


def test_nothing_succeeded() -> None:
    report = make_report([REFUSED])
    assert report.ok == 0 and report.summary.ttft is None
    assert "| refused: 429 " in report.table()
    assert "TTFT" not in report.table()
    json.dumps(report.as_json())
    assert make_report([]).ok == 0


def test_json_has_every_request() -> None:
    values = json.loads(json.dumps(make_report([GOOD, CUT]).as_json()))
    assert values["requests"][0]["chunks"] == [0.2, 0.3, 0.8]
    assert values["requests"][1]["failure"] == "cut off"
    assert values["summary"]["ttft"]["count"] == 1
