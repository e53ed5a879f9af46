"""Every switch of the ablation turns something off: without it a plan differs."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.studies.ablation import SITUATIONS, plans_of, same_plans
from benchmarks.studies.switches import SWITCHES, Switch
from paceline.core.config import SchedulerConfig

# where it shows soonest
SHOWS = {
    "the policy's order": "bursts",
    "skipping ahead": "little-memory",
    "displacement": "little-memory",
    "adaptive budget": "gpu",
    "the knee": "bursts",
    "slack": "streams",
    "late quantile": "streams",
    "bound of gaps": "poisson",
    "memory-bound region": "gpu",
    "exploration of chunks": "gpu",
    "short steps of best effort": "poisson",
    "demotion of late requests": "bursts",
    "triage": "bursts",
    "demotion while running": "overload",
    "rejoining": "tenants",
    "newest first among the late": "overload",
    "TPOT guard": "streams",
    "deadlines": "bursts",
    "pressing": "bursts",
    "coming back": "bursts",
    "must run": "beyond-capacity",
    "best effort's share": "streams",
    "look ahead at memory": "little-memory",
    "swapping": "little-memory",
    "victim by work lost": "little-memory",
    "(a valve at 88 %, closed by default)": "little-memory",
    "light tenants": "tenants",
    "short steps while shared": "tenants",
    "saved tokens": "tenants",
    "queue share": "tenants",
    "learned lengths": "poisson",
    "learned bias of forecasts": "overload",
}


@cache
def _everything_on(situation: str) -> list[str]:
    return plans_of(situation, Switch())


# the others take more than a minute together
DAILY = ("learned lengths", "queue share", "saved tokens")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.thorough) for name in SWITCHES],
)
def test_a_switch_changes_a_plan_and_leaves_the_core_as_it_was(name: str) -> None:
    situation = SHOWS[name]
    everything_on = _everything_on(situation)
    assert not same_plans(situation, SWITCHES[name], everything_on)
    if situation == "gpu":
        assert same_plans(situation, Switch(), _everything_on(situation))


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_switch_sets_and_replaces_is_in_the_core(name: str) -> None:
    SchedulerConfig(**SWITCHES[name].settings)
    with SWITCHES[name].off():
        pass


def test_every_situation_is_needed() -> None:
    assert SHOWS.keys() == SWITCHES.keys()
    # the other two are the same with bursts
    assert set(SITUATIONS) - set(SHOWS.values()) == {
        "little-memory-bursts",
        "beyond-capacity-bursts",
    }
