"""Tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.rows import parse_row

__all__ = ["OURS", "equal_table", "format_table", "offline_table", "online_table", "rate_of"]

OURS = "paceline"


def _cell(value: Any, key: str) -> str:
    return f"{value[key]:.0f}" if isinstance(value, dict) and key in value else "-"


def _ratio(values: dict[str, Any], key: str, rivals: Sequence[str]) -> str:
    """Return ours over the best of ``rivals``, with that one's name."""
    known = {name: values[name][key] for name in rivals if key in values.get(name, {})}
    if not known or key not in values.get(OURS, {}):
        return "-"
    best = max(known, key=lambda name: known[name])
    return f"{values[OURS][key] / known[best]:.2f}x {best}"


def offline_table(
    offline: dict[str, dict[str, Any]], names: Sequence[str], precisions: Mapping[str, str]
) -> str:
    """Return a table of output tokens/s, or all tokens/s if a row has one output token per request;
    each engine's best of the precisions in its column's head. The last column is ours over the best
    engine whose name does not start with ours.

    Args:
        precisions: weights/KV cache of the variants that ran, by label ("engine variant").
    """
    rivals = [name for name in names if not name.startswith(OURS)]
    heads = {
        name: list(dict.fromkeys(p for label, p in precisions.items() if label.split()[0] == name))
        for name in names
    }
    width = 2 + max(10, *map(len, names), *(len(p) for head in heads.values() for p in head))
    lines = [f"{'tokens/s':24}" + "".join(f"{name:>{width}}" for name in names) + "  ratio"]
    for place in range(max(map(len, heads.values()), default=0)):
        told = [head[place] if place < len(head) else "" for head in heads.values()]
        first = "best of" if place == 0 else ""
        lines.append(f"{first:24}" + "".join(f"{precision:>{width}}" for precision in told))
    for row, values in offline.items():
        single = parse_row(row).output == 1
        key = "total_tps" if single else "output_tps"
        label = f"{row} (all)" if single else row
        cells = "".join(f"{_cell(values.get(name), key):>{width}}" for name in names)
        lines.append(f"{label:24}{cells}  {_ratio(values, key, rivals)}")
    return "\n".join(lines)


def rate_of(row: str, seconds: Sequence[float]) -> float:
    """Return output tokens a second, or all tokens where a request has one of output."""
    parsed = parse_row(row)
    tokens = parsed.total_tokens if parsed.output == 1 else parsed.count * parsed.output
    return tokens / statistics.median(seconds)


def format_table(
    seconds: Mapping[str, Mapping[str, Sequence[float]]], precisions: Mapping[str, str]
) -> str:
    """Return a table with a line for every engine and variant, and a column for each row."""
    labels = list(dict.fromkeys(label for of_row in seconds.values() for label in of_row))
    first = 2 + max(map(len, ["engine and variant", *labels]))
    second = 2 + max(map(len, ["weights/KV", *precisions.values()]))
    width = 2 + max(map(len, seconds))
    head = f"{'engine and variant':{first}}{'weights/KV':{second}}"
    lines = [head + "".join(f"{row:>{width}}" for row in seconds)]
    for label in labels:
        cells = [
            f"{rate_of(row, of_row[label]):.0f}" if label in of_row else "-"
            for row, of_row in seconds.items()
        ]
        told = f"{label:{first}}{precisions.get(label, ''):{second}}"
        lines.append(told + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def equal_table(
    seconds: Mapping[str, Mapping[str, Sequence[float]]],
    precisions: Mapping[str, str],
    weights: str = "bfloat16",
) -> str:
    """Return ours over each other engine, weights in the same precision, each at its best."""
    alike = [label for label, p in precisions.items() if p.split("/")[0] == weights]
    lines = []
    for row, of_row in seconds.items():
        best: dict[str, float] = {}
        for label in alike:
            if label in of_row:
                name = OURS if label.startswith(OURS) else label.split()[0]
                best[name] = max(best.get(name, 0.0), rate_of(row, of_row[label]))
        ours = best.pop(OURS, None)
        if ours is not None and best:
            cells = ", ".join(f"{ours / rate:.2f}x {name}" for name, rate in best.items())
            lines.append(f"{row:24}{ours:>8.0f}  {cells}")
    return "\n".join([f"{f'both with {weights}':24}{'ours':>8}", *lines]) if lines else ""


def online_table(online: dict[str, dict[str, Any]], served: Mapping[str, str]) -> str:
    """Return a table with a line for every server and rate.

    Args:
        served: weights/KV cache of each.
    """
    heads = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "within", "failed")
    lines = [
        f"{'req/s':8}{'server':18}{'weights/KV':20}" + "".join(f"{head:>10}" for head in heads)
    ]
    for rate, servers in online.items():
        for name, figures in servers.items():
            if "absent" in figures:
                continue
            cells = [
                f"{figures[kind][share]:.0f}" if kind in figures else "-"
                for kind in ("ttft_ms", "tpot_ms", "itl_ms")
                for share in ("p50", "p99")
            ]
            cells += [f"{figures['attainment']:.0%}", str(figures["failed"])]
            told = f"{rate:8}{name:18}{served.get(name, ''):20}"
            lines.append(told + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
