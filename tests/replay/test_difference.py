"""The report of two logs that part."""

from __future__ import annotations

from tests.replay.difference import first_difference

LOG = ["plan at 0.0", "  row a", "  row b", "update at 1.0", "  a 5", "plan at 1.0", "  row a"]


def test_equal_logs() -> None:
    assert first_difference(LOG, list(LOG)) is None


def test_the_call_with_what_led_to_it_and_both_sides() -> None:
    other = [*LOG[:4], "  a 6", *LOG[5:]]
    assert first_difference(LOG, other) == "\n".join(
        (
            "line 5 differs, at plan 1 of the run, in: update at 1.0",
            "    plan at 0.0",
            "      row a",
            "      row b",
            "--- recorded",
            "    update at 1.0",
            ">     a 5",
            "--- now",
            "    update at 1.0",
            ">     a 6",
        )
    )


def test_a_line_that_one_side_lacks() -> None:
    told = first_difference(LOG, [*LOG[:2], *LOG[3:]])
    assert told is not None
    assert told.startswith("line 3 differs, at plan 1 of the run, in: plan at 0.0")
    assert ">     row b" in told and told.count(">") == 1


def test_a_log_that_goes_on() -> None:
    told = first_difference(LOG, [*LOG, "update at 2.0", "  a 6"])
    assert told is not None
    assert told.startswith("line 8 differs, at plan 2 of the run, in: update at 2.0")
    assert told.splitlines()[-4:] == [">   (ended)", "--- now", ">   update at 2.0", ">     a 6"]


def test_another_call() -> None:
    told = first_difference(LOG, [*LOG[:3], "abort a at 1.0", "  a -"])
    assert told is not None
    assert ">   update at 1.0" in told and ">   abort a at 1.0" in told


def test_long_calls_are_cut_around_the_difference() -> None:
    rows = [f"  row {number}" for number in range(500)]
    told = first_difference(["plan at 0.0", *rows], ["plan at 0.0", *rows[:300], "  row x"])
    assert told is not None
    assert ">     row 300" in told and ">     row x" in told
    assert len(told.splitlines()) < 100
