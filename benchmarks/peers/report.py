"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.rows import parse_row

__all__ = ["OURS", "offline_table", "online_table"]

OURS = "paceline"


def _cell(value: Any, key: str) -> str:
    return f"{value[key]:.0f}" if isinstance(value, dict) and key in value else "-"


def _ratio(values: dict[str, Any], key: str, rivals: Sequence[str]) -> str:
    """Ours over the best of ``rivals``, whose name follows."""
    known = {name: values[name][key] for name in rivals if key in values.get(name, {})}
    if not known or key not in values.get(OURS, {}):
        return "-"
    best = max(known, key=lambda name: known[name])
    return f"{values[OURS][key] / known[best]:.2f}x {best}"


def offline_table(offline: dict[str, dict[str, Any]], names: Sequence[str]) -> str:
    """Output tokens/s, or all tokens/s where a row has one output token a request; the last column
    is ours over the best engine whose name does not start with ours."""
    rivals = [name for name in names if not name.startswith(OURS)]
    width = max(12, *(len(name) + 2 for name in names))
    lines = [f"{'tokens/s':24}" + "".join(f"{name:>{width}}" for name in names) + "  ratio"]
    for row, values in offline.items():
        single = parse_row(row).output == 1
        key = "total_tps" if single else "output_tps"
        label = f"{row} (all)" if single else row
        cells = "".join(f"{_cell(values.get(name), key):>{width}}" for name in names)
        lines.append(f"{label:24}{cells}  {_ratio(values, key, rivals)}")
    return "\n".join(lines)


def online_table(online: dict[str, dict[str, Any]]) -> str:
    """A line for every server and rate."""
    heads = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "within", "failed")
    lines = [f"{'req/s':8}{'server':18}" + "".join(f"{head:>10}" for head in heads)]
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
            lines.append(f"{rate:8}{name:18}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)
