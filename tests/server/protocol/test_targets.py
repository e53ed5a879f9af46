"""Targets in bodies and headers, as the engine sees them and as the metrics judge them."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.slo import Slo
from paceline.errors import InvalidRequestError
from paceline.server.protocol.targets import CLASSES, parse_slo, parse_tenant, with_headers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Slo()),
        ("interactive", CLASSES["interactive"]),
        ({"ttft_ms": 500, "tpot_ms": 50}, Slo(ttft=0.5, tpot=0.05)),
        ({"deadline_ms": 2500.5}, Slo(deadline=2.5005)),
        (
            {"class": "interactive", "tpot_ms": 20},
            Slo(slo_class="interactive", ttft=CLASSES["interactive"].ttft, tpot=0.02),
        ),
        (
            {"class": "batch", "deadline_ms": 6e5},
            Slo(slo_class="batch", best_effort=True, deadline=600.0),
        ),
    ],
)
def test_bodies(value: Any, expected: Slo) -> None:
    assert parse_slo(value) == expected


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (7, "slo"),
        ("urgent", "slo.class must be one of interactive, standard, batch, got 'urgent'"),
        ({"class": 7}, "slo.class"),
        ({"ttft": 5}, "'ttft'"),
        ({"ttft_ms": "5"}, "slo.ttft_ms"),
        ({"ttft_ms": 0}, "slo.ttft_ms must be above 0"),
        ({"tpot_ms": -1}, "slo.tpot_ms must be above 0"),
        ({"deadline_ms": 1e12}, "slo.deadline_ms must be above 0 and at most 86400000"),
    ],
)
def test_bad_bodies_say_what_is_wrong(value: Any, names: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_slo(value)
    assert names in str(caught.value)


def test_the_message_about_unknown_targets_is_short() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_slo({f"{number}" * 99: 1 for number in range(1000)})
    assert len(str(caught.value)) < 1000


def test_headers_fill_what_the_body_leaves_out() -> None:
    headers = {"x-llm-d-slo-ttft-ms": "400", "x-slo-tpot-ms": "30"}
    merged = with_headers({"model": "m", "slo": {"ttft_ms": 100}}, headers)
    assert parse_slo(merged["slo"]) == Slo(ttft=0.1, tpot=0.03)
    assert parse_slo(with_headers({}, headers)["slo"]) == Slo(ttft=0.4, tpot=0.03)
    named = with_headers({"slo": "batch"}, headers)["slo"]
    assert parse_slo(named) == Slo(slo_class="batch", best_effort=True, ttft=0.4, tpot=0.03)
    nulls = with_headers({"slo": {"ttft_ms": None, "tpot_ms": 20, "class": None}}, headers)["slo"]
    assert parse_slo(nulls) == Slo(ttft=0.4, tpot=0.02)
    assert with_headers({"slo": 7}, headers) == {"slo": 7}, "refused where bodies are parsed"


@pytest.mark.parametrize(
    ("value", "seconds"), [("30s", 30.0), ("1m30s", 90.0), ("250ms", 0.25), ("1.5h", 5400.0)]
)
def test_a_time_to_live_is_a_go_duration(value: str, seconds: float) -> None:
    merged = with_headers({}, {"x-llm-d-inference-ttl": value})
    assert parse_slo(merged["slo"]).queue_ttl == pytest.approx(seconds)
    assert parse_slo({"queue_ttl_ms": 70}).queue_ttl == 0.07


@pytest.mark.parametrize("value", ["", "30", "s", "-3s", "3 s", "30sx", "3s" * 40])
def test_other_durations_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-llm-d-inference-ttl must be a duration"):
        with_headers({}, {"x-llm-d-inference-ttl": value})


def test_bad_headers_are_named() -> None:
    for name in ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"):
        with pytest.raises(InvalidRequestError, match=f"header {name} must be a number"):
            with_headers({}, {name: "soon"})
    with pytest.raises(InvalidRequestError, match="got 129"):
        parse_tenant({"x-llm-d-inference-fairness-id": "x" * 129})


def test_tenants_come_from_either_header() -> None:
    assert parse_tenant({}) == ""
    assert parse_tenant({"x-llm-d-inference-fairness-id": "a"}) == "a"
    assert parse_tenant({"x-gateway-inference-fairness-id": "b"}) == "b"
