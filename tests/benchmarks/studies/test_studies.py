"""The studies' pages say what their command prints."""

from __future__ import annotations

import pytest

from benchmarks.studies import budget, coalescing
from benchmarks.studies.__main__ import NAMES, load
from benchmarks.studies.common import GPU
from benchmarks.studies.page import DOCS, fill, tables_of
from paceline.sim.report.table import text_table


@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_a_filled_page(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    tables = tables_of(text)
    assert tables and all(table.startswith("| ") for table in tables.values())
    assert load(name).name == name
    assert f"({name}.md)" in (DOCS / "README.md").read_text()


@pytest.mark.thorough
def test_a_page_holds_what_its_command_prints() -> None:
    """The quickest table there is; `make studies` renews all."""
    printed = text_table(coalescing._rows(GPU, 4))
    assert tables_of((DOCS / "coalescing.md").read_text())["rate-4"] == printed


@pytest.mark.thorough
def test_without_targets_the_adaptive_budget_is_as_good_as_the_best_fixed_one() -> None:
    """On a CPU; and below on the textbook GPU."""
    head, *rows = budget._rows(*budget.CASES["cpu"])
    adaptive, fixed = rows[-1], rows[:-1]
    assert adaptive[0] == "adaptive" and len(fixed) == len(budget.FIXED)
    for column in ("TTFT p99", "TTFT p50", "E2E mean", "E2E p99"):
        index = head.index(column)
        # which serves the longest requests sooner, and all others later
        best = min(float(row[index]) for row in fixed if row[0] != "fixed 64")
        # the 99th of 600 requests is the worst few
        most = 1.05 if column == "TTFT p99" else 1.02
        assert float(adaptive[index]) <= most * best, column
    assert float(adaptive[1]) >= 0.99 * max(float(row[1]) for row in fixed)


@pytest.mark.thorough
def test_it_finds_the_size_of_a_step_that_costs_nothing_on_a_gpu() -> None:
    """Larger fixed steps have a seventh less throughput, smaller ones serve fewer."""
    head, *rows = budget._rows(*budget.CASES["gpu-at-once"])
    adaptive, fixed = rows[-1], rows[:-1]
    assert float(adaptive[1]) >= 0.97 * max(float(row[1]) for row in fixed)
    index = head.index("E2E mean")
    assert float(adaptive[index]) <= 1.05 * min(float(row[index]) for row in fixed)
    at_most = {row[0]: float(row[1]) for row in fixed}["fixed 2048"]
    assert float(adaptive[1]) >= 1.12 * at_most


def test_only_tables_are_replaced() -> None:
    page = "text\n<!-- begin a -->\nold\n<!-- end a -->\nmore\n"
    assert fill(page, {"a": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match=r"has tables \['a'\], the study \['b'\]"):
        fill(page, {"b": "new"})
