"""Which moves lead from which tier to which, and that nothing else changes what a request is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import paceline.core
from paceline.core.slo import NO_SLO, Slo
from paceline.core.tier import Move, Tier, after, tier_of
from tests.driving import make_request

CORE = Path(paceline.core.__file__).parent

ORDINARY, DEADLINE_BATCH, DEMOTED, BACKGROUND = Tier
PROMISE = Slo(slo_class="batch", best_effort=True, deadline=60.0)
NIGHT = Slo(slo_class="night", best_effort=True)
PACED = Slo(slo_class="chat", ttft=1.0, tpot=0.1)

ALLOWED = {
    (ORDINARY, Move.DEMOTE): DEMOTED,
    (DEADLINE_BATCH, Move.DEMOTE): DEMOTED,
    (DEMOTED, Move.RESTORE): DEADLINE_BATCH,
    (DEMOTED, Move.REJOIN): ORDINARY,
    (ORDINARY, Move.BOOST): ORDINARY,
    (DEADLINE_BATCH, Move.BOOST): DEADLINE_BATCH,
    (BACKGROUND, Move.BOOST): BACKGROUND,
}
REFUSED = [(tier, move) for tier in Tier for move in Move if (tier, move) not in ALLOWED]


@pytest.mark.parametrize(("tier", "move"), sorted(ALLOWED, key=str))
def test_a_move_leads_where_the_table_says(tier: Tier, move: Move) -> None:
    assert after(tier, move) is ALLOWED[tier, move]


@pytest.mark.parametrize(("tier", "move"), REFUSED)
def test_every_other_move_is_refused_by_name_and_changes_nothing(tier: Tier, move: Move) -> None:
    slo = {ORDINARY: PACED, DEADLINE_BATCH: PROMISE, DEMOTED: PROMISE, BACKGROUND: NIGHT}[tier]
    request = make_request("r", 4, slo=slo)
    if tier is DEMOTED:
        request.move(Move.DEMOTE)
    assert request.tier is tier
    before = request.targets, request.boosted, request.history.demoted
    with pytest.raises(ValueError, match=f"tier {tier.name} cannot {move.value}"):
        request.move(move)
    assert request.tier is tier
    assert before == (request.targets, request.boosted, request.history.demoted)


def test_targets_decide_where_a_request_begins() -> None:
    assert tier_of(NO_SLO) is tier_of(PACED) is ORDINARY
    assert tier_of(PROMISE) is DEADLINE_BATCH
    assert tier_of(NIGHT) is BACKGROUND


def test_a_demotion_is_told_and_can_be_taken_back() -> None:
    request = make_request("r", 4, slo=PROMISE)
    request.timeline_sent = True
    request.move(Move.DEMOTE)
    assert request.tier is DEMOTED and request.targets is PROMISE
    assert request.history.demoted and not request.timeline_sent
    request.timeline_sent = True
    request.move(Move.RESTORE)
    assert request.tier is DEADLINE_BATCH and request.targets is PROMISE
    assert not request.history.demoted
    assert request.timeline_sent, "there is nothing to tell that the caller has to know"


def test_a_late_first_token_is_aimed_at_no_more() -> None:
    request = make_request("r", 4, slo=PACED)
    request.key, request.order = 3.0, (3.0, 7)
    request.move(Move.DEMOTE)
    assert request.targets == replace(PACED, ttft=None) and request.asked.slo is PACED
    request.timeline_sent = True
    request.move(Move.REJOIN)
    assert request.tier is ORDINARY and request.targets.ttft is None
    assert request.order == (3.0, 7), "the place that it had"
    assert request.history.demoted and request.timeline_sent, "it is late all the same"


def test_one_that_is_boosted_stays_in_its_tier() -> None:
    request = make_request("r", 4, slo=PACED)
    request.move(Move.BOOST)
    assert request.tier is ORDINARY and request.boosted and request.targets is PACED


# ------------------------------------------------------------------ who may change it

GUARDED = {"tier", "targets", "asked", "boosted"}


def assigned(node: ast.AST, within: str = "") -> Iterator[tuple[str, str]]:
    """(where, attribute) of each assignment to a guarded attribute, ``object.tier = ...``, also by
    the name of the attribute in a call of ``setattr``."""
    for child in ast.iter_child_nodes(node):
        own = within
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            own = f"{within}.{child.name}".lstrip(".")
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, (ast.Store, ast.Del))
            and child.attr in GUARDED
        ):
            yield own, child.attr
        if isinstance(child, ast.Call) and "setattr" in ast.unparse(child.func):
            yield from (
                (own, argument.value)
                for argument in child.args
                if isinstance(argument, ast.Constant) and argument.value in GUARDED
            )
        yield from assigned(child, own)


def test_only_a_move_changes_the_tier_and_the_targets_of_a_request() -> None:
    found = {
        (f"{path.relative_to(CORE).as_posix()}:{where}", attribute)
        for path in CORE.rglob("*.py")
        for where, attribute in assigned(ast.parse(path.read_text()))
    }
    # the others have their values from the fields' defaults
    born = {
        ("request.py:Request.__post_init__", "tier"),
        ("request.py:Request.set_targets", "targets"),
    }
    moved = {("request.py:Request.move", name) for name in GUARDED - {"asked"}}
    assert found == born | moved


SOURCE = """
class C:
    def f(self, r):
        r.tier, x = 1, r.targets
        object.__setattr__(r, "asked", 2)
        def g():
            r.history.targets += 1
        r.tiers = tier = 3
        del r.boosted
"""


def test_what_counts_as_changing_it() -> None:
    found = sorted(assigned(ast.parse(SOURCE)))
    assert found == [("C.f", "asked"), ("C.f", "boosted"), ("C.f", "tier"), ("C.f.g", "targets")]
