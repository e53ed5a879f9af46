"""Runs in one table, for users: one row per figure, one column per run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paceline.sim.report.metrics import Distribution, Summary

__all__ = ["comparison", "minutes", "side_by_side", "text_table"]

_Cell = Callable[[Summary], str]
# most tenants with rows of their own; JSON has all
_MOST_TENANTS = 8
# most minutes that are printed; JSON has all
_MOST_MINUTES = 60


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, the others to the right. The first row is the
    head.

    The text is a Markdown table too, so that it serves terminal and page.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
            lines.append(f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def side_by_side(runs: Sequence[Summary]) -> str:
    """Return the table of ``paceline simulate``."""
    return text_table(comparison(runs))


def comparison(runs: Sequence[Summary]) -> list[list[str]]:
    """Return that table's cells, with its head first. Figures that no run has are left out."""
    rows = [["", *(run.name for run in runs)]]
    for label, cell in _rows(runs):
        cells = [cell(run) for run in runs]
        if any(text != "-" for text in cells):
            rows.append([label, *cells])
    return rows


def minutes(run: Summary) -> str:
    """Return a line with the share within targets of each minute of arrival; "" if there is only
    one minute."""
    if len(run.by_minute) < 2:
        return ""
    count = 1 + max(map(int, run.by_minute))
    shares = [
        f"{100 * run.by_minute[minute].attainment:.0f}" if minute in run.by_minute else "-"
        for minute in map(str, range(min(count, _MOST_MINUTES)))
    ]
    more = f", and {count - _MOST_MINUTES} minutes more" if count > _MOST_MINUTES else ""
    return f"attainment % by minute of arrival: {' '.join(shares)}{more}"


def _rows(runs: Sequence[Summary]) -> list[tuple[str, _Cell]]:
    rows: list[tuple[str, _Cell]] = [
        ("requests", lambda run: str(run.requests)),
        ("refused", lambda run: str(run.refused)),
        *((f"refused: {reason}", _refusals(reason)) for reason in _reasons(runs)),
        ("preemptions", lambda run: str(run.preemptions)),
        ("seconds", lambda run: f"{run.duration:.1f}"),
        ("requests/s", lambda run: f"{run.request_rate:.2f}"),
        ("output tokens/s", lambda run: f"{run.token_rate:.0f}"),
        ("prompt tokens cached %", _cached),
    ]
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e")):
        for statistic in ("mean", "p50", "p90", "p99"):
            rows.append((f"{label} {statistic} ms", _milliseconds(name, statistic)))
    rows += [
        ("E2E p99 of longest quarter ms", _longest),
        ("goodput requests/s", lambda run: f"{run.goodput:.2f}"),
        ("attainment %", lambda run: f"{100 * run.attainment:.1f}"),
    ]
    names = sorted({name for run in runs for name in run.by_class})
    if len(names) > 1:
        rows += [(f"attainment {name} %", _attainment(name)) for name in names]
    for tenant in _tenants(runs):
        rows.append((f"TTFT mean of tenant {tenant} ms", _tenant_ttft(tenant)))
        rows.append((f"attainment of tenant {tenant} %", _tenant_attainment(tenant)))
    rows += [
        ("tokens of missed requests %", lambda run: f"{100 * run.wasted_tokens:.1f}"),
        ("cost per million tokens", lambda run: "-" if run.cost is None else f"{run.cost:.2f}"),
    ]
    return rows


def _cached(run: Summary) -> str:
    return f"{100 * run.cached_tokens / run.prompt_tokens:.1f}" if run.prompt_tokens else "-"


def _milliseconds(name: str, statistic: str) -> _Cell:
    def cell(run: Summary) -> str:
        values: Distribution | None = getattr(run, name)
        return "-" if values is None else f"{1e3 * getattr(values, statistic):.1f}"

    return cell


def _longest(run: Summary) -> str:
    return "-" if run.e2e_p99_longest is None else f"{1e3 * run.e2e_p99_longest:.1f}"


def _reasons(runs: Sequence[Summary]) -> list[str]:
    return sorted({reason for run in runs for reason in run.refusals})


def _refusals(reason: str) -> _Cell:
    return lambda run: str(run.refusals.get(reason, 0))


def _tenants(runs: Sequence[Summary]) -> list[str]:
    """Return the tenants with most requests; none where there is only one."""
    asked: Counter[str] = Counter()
    for run in runs:
        asked.update({name: entry.requests for name, entry in run.by_tenant.items()})
    return sorted(name for name, _ in asked.most_common(_MOST_TENANTS)) if len(asked) > 1 else []


def _tenant_ttft(name: str) -> _Cell:
    def cell(run: Summary) -> str:
        entry = run.by_tenant.get(name)
        return "-" if entry is None or entry.ttft_mean is None else f"{1e3 * entry.ttft_mean:.1f}"

    return cell


def _tenant_attainment(name: str) -> _Cell:
    def cell(run: Summary) -> str:
        entry = run.by_tenant.get(name)
        return "-" if entry is None else f"{100 * entry.attainment:.1f}"

    return cell


def _attainment(name: str) -> _Cell:
    def cell(run: Summary) -> str:
        entry = run.by_class.get(name)
        return "-" if entry is None else f"{100 * entry.attainment:.1f}"

    return cell
