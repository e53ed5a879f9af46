"""The table that formats are chosen by, and the choice among measured ones."""

import json
from typing import Any

import pytest

from paceline.backends.loading import levels
from paceline.backends.loading.formats import stored_bits
from paceline.backends.loading.levels import (
    NEAR,
    PATH,
    Measured,
    fastest,
    measured,
    parse,
    preferred,
)
from paceline.backends.native import DTYPES, KV_DTYPES, unavailable_reason
from paceline.backends.native.single_kernels import variants_for


def pair(weights: str, cost: float, kl: float = 0.001) -> Measured:
    return Measured(weights, "int8", {"a": cost, "b": cost}, kl, True)


def test_every_step_weighs_alike() -> None:
    """Half the time of a short step is worth twice that of a long one."""
    assert Measured("q4", "int8", {"a": 1.0, "b": 100.0}, 0, True).cost == pytest.approx(10.0)
    assert Measured("q4", "int8", {"a": 0.5, "b": 200.0}, 0, True).cost == pytest.approx(10.0)


def test_of_equally_fast_ones_the_most_accurate_is_taken() -> None:
    assert fastest([pair("int8", 2.0), pair("q4", 1.0, kl=9.0)]) == pair("q4", 1.0, kl=9.0)
    fast = pair("q4", 1.0, kl=0.004)
    near, far = pair("int8", 0.999 * NEAR, kl=0.003), pair("int8", 1.001 * NEAR, kl=0.003)
    assert fastest([fast, near]) == near
    assert fastest([fast, far]) == fast
    with pytest.raises(ValueError, match="empty"):
        fastest([])


def test_an_answer_that_changes_with_who_else_is_served_is_not_steady() -> None:
    assert not Measured("q4", "int8", {"a": 1.0}, 0.001, True, drift=1e-2).steady
    assert Measured("int8", "int8", {"a": 2.0}, 0.001, True, drift=1e-3).steady


def test_what_was_not_both_timed_and_judged_is_left_out() -> None:
    whole: dict[str, Any] = {"steps_ms": {"a": 2}, "drift": 0.2, "kl": 0.1, "passes": True}
    table = {"x": {"formats": {
        "q4/int8": whole, "int8/int8": {"steps_ms": {"a": 1}}, "q4/bfloat16": {"kl": 0, "passes":
        1},
    }}}  # fmt: skip
    assert parse(table) == {"x": (Measured("q4", "int8", {"a": 2.0}, 0.1, True, 0.2),)}
    for steps in ({}, {"a": 0.0}):
        with pytest.raises(ValueError, match="no times above zero"):
            parse({"x": {"formats": {"q4/int8": whole | {"steps_ms": steps}}}})
    with pytest.raises(ValueError, match="differ in the steps"):
        parse({"x": {"formats": {"a/b": whole, "c/d": whole | {"steps_ms": {"b": 1}}}}})


def test_a_level_that_has_only_been_judged_is_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_table", lambda: {"new": (), "old": (pair("q4", 1.0),)})
    assert measured(["new", "old"])[0] == "old"


def test_levels_are_compared_where_both_were_timed_on_one_kind_of_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {"best": 2.0, "good": 1.5, "fast": 1.0, "near": 0.99 / NEAR * 1.02, "plain": 0.1}
    here = dict.fromkeys(costs, ("a CPU", "1.2.3", 2))
    monkeypatch.setattr(
        levels, "_table", lambda: {level: (pair("int8", cost),) for level, cost in costs.items()}
    )
    monkeypatch.setattr(levels, "_machines", lambda: here)
    order = tuple(costs)
    # equally fast is not faster; plain C++ is timed on a part of the model
    assert preferred(order, lambda level, pair: True) == order[2:]
    assert preferred(("new", *order), lambda level, pair: True) == ("new", *order), "not measured"
    assert preferred(order, lambda level, pair: pair.weights == "q4") == order, "nothing suits"
    here["fast"] = ("a CPU", "1.2.4", 2)
    assert preferred(order, lambda level, pair: True) == order[3:], "the other three are alike"
    del here["best"]
    assert preferred(order, lambda level, pair: True) == order, (
        "it is not known what that was timed on"
    )
    assert preferred(("portable",), lambda level, pair: True) == ("portable",)


def test_the_package_s_table_has_figures_for_every_level_that_is_compiled() -> None:
    """A new level is not forgotten: until it is measured the next one's figures stand for it, which
    are those of a level with vectors, and the line that says a server is ready says so."""
    table = parse(json.loads(PATH.read_text()))
    for level, pairs in table.items():
        # timed and judged in every pair of formats, or parse would have left it out
        assert {(entry.weights, entry.kv) for entry in pairs} >= {
            (weights, kv) for weights in set(DTYPES) - {"float32"} for kv in ("bfloat16", "int8")
        }, level
        assert {entry.weights for entry in pairs} <= set(DTYPES), level
        assert {entry.kv for entry in pairs} <= set(KV_DTYPES), level
        # what holds any file, exactly
        assert any(entry.weights == "float32" and entry.passes for entry in pairs), level
        assert all(entry.steady for entry in pairs if entry.weights == "float32"), level
    # every bit of cpuid, every register state
    compiled = ["portable"]
    if unavailable_reason() is None:
        compiled = variants_for(*[0xFFFFFFFF] * 4, 0xFFFFFFFF).split(",")
        assert set(table) == set(compiled)
    for place, level in enumerate(compiled[:-1]):
        stands, pairs = measured(compiled[place:])
        assert stands != "portable", level
        passing = {entry.weights for entry in pairs if entry.passes and entry.steady}
        assert {"int8", "bfloat16"} <= passing, level


def test_bits_of_what_files_store() -> None:
    for name, bits in (
        ("float32", 32),
        ("bfloat16", 16),
        ("Q4_0", 4.5),
        ("Q4_1", 5),
        ("Q8_0", 8.5),
    ):
        assert stored_bits(name) == bits
    with pytest.raises(ValueError, match="'Q9' is not a type"):
        stored_bits("Q9")
