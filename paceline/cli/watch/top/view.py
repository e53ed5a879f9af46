"""A server's frame for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from paceline.cli.watch.top.panels import (
    Lines,
    coloured,
    first_rows,
    headed_table,
    pair_of,
    percent,
    plain,
    time_of,
)
from paceline.server.observability.snapshot.frame import Frame

__all__ = ["render"]

# width of a bar in a terminal of 80 columns, inside a frame
_BAR: Final = 72
# most rows of the tables of tenants and models
_MAX_TENANTS: Final = 5
_MAX_MODELS: Final = 5
_COLOURS: Final = ("cyan", "magenta", "blue", "yellow", "red")
_REASONS: Final[Mapping[str, str]] = {
    "step": "the running step",
    "budget": "the step's token budget is used up",
    "slots": "all slots are taken (--max-num-seqs)",
    "memory": "not enough KV blocks",
    "pace": "one more would make running requests miss their targets",
    "policy": "the policy delays arrivals",
    "pressure": "the memory-pressure valve is open",
}
_PRESSURE: Final = (
    "closed",
    "small chunks",
    "no new best effort",
    "preempting best effort",
    "refusing",
)


def render(frame: Frame, url: str, problem: str = "") -> RenderableType:
    """Render a server in about 25 lines, and up to eight more for tenants and for models each.

    Args:
        problem: why ``frame`` is not the latest; "" if it is.
    """
    panels = [_head(frame, url, problem), _batch(frame), _classes(frame)]
    if frame.tenants:
        panels.append(_tenants(frame))
    if frame.models:
        panels.append(_models(frame))
    return Group(*panels, _memory(frame))


def _head(frame: Frame, url: str, problem: str) -> RenderableType:
    line = Text.assemble(
        (frame.model, "bold"),
        f"  {url}  ",
        ("ready", "green") if frame.ready else ("NOT READY", "bold red"),
    )
    if frame.metrics_age >= 1:
        line.append(f"  numbers are {frame.metrics_age:.0f} s old", "bold red")
    if problem:
        line.append(f"\n{problem}", "bold red")
    return line


def _batch(frame: Frame) -> RenderableType:
    lines = Lines()
    row = lines.add
    row(
        "requests",
        f"running {frame.running}",
        f"waiting {frame.waiting}",
        f"ended/s {frame.requests_per_s:.1f}",
    )
    row(
        "tokens/s",
        f"output {frame.output_tokens_per_s:.0f}",
        f"prompt {frame.prompt_tokens_per_s:.0f}",
        f"prefix cache {percent(frame.prefix_cache_hit_rate)}",
    )
    row(
        "steps/s",
        f"{frame.steps_per_s:.1f}",
        f"step {time_of(frame.step_seconds)}",
        f"predicted {time_of(frame.predicted_step_seconds)}",
    )
    row(
        "in a step",
        f"prefill tokens {plain(frame.prefill_tokens_per_step)}",
        f"decode tokens {plain(frame.decode_tokens_per_step)}",
    )
    if frame.drafts_per_s:
        row(
            "drafts",
            *(
                f"{source} {count:.0f}/s, accepted {percent(frame.drafts_accepted[source])}"
                for source, count in frame.drafts_per_s.items()
            ),
        )
    row("p50 / p99", f"TTFT {pair_of(frame.ttft)}", f"ITL {pair_of(frame.inter_token)}")
    row("", f"queued {pair_of(frame.queue)}")
    if frame.blocked_by is None:
        row("queue", "no request is blocked", style="dim")
    else:
        reason = _REASONS.get(frame.blocked_by, frame.blocked_by)
        row("queue", f"blocked by {frame.blocked_by} ({reason})", style="yellow")
    if frame.blocked_share:
        shares = sorted(frame.blocked_share.items(), key=lambda item: -item[1])
        row("of the time", *(f"{name} {share:.0%}" for name, share in shares))
    if frame.refused:
        row("refused", *(f"{why} {count}" for why, count in frame.refused.items()), style="red")
    if frame.cost_per_million_tokens is not None:
        row("cost", f"{frame.cost_per_million_tokens:.4g} per million tokens")
    return lines.panel("batch")


def _classes(frame: Frame) -> RenderableType:
    table = headed_table()
    table.add_column("class", max_width=16, no_wrap=True)
    for name in ("running", "waiting", "ended", "met", "since start", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("missed", ratio=1)
    for row in frame.classes:
        missed = ", ".join(f"{kind} {count}" for kind, count in row.violations.items())
        table.add_row(
            row.name,
            str(row.running),
            str(row.waiting),
            str(row.ended),
            coloured(row.attainment),
            coloured(row.attainment_since_start),
            str(row.kv_blocks),
            missed,
        )
    body: RenderableType = table if frame.classes else Text("no requests yet", "dim")
    return Panel(body, title="classes", title_align="left")


def _tenants(frame: Frame) -> RenderableType:
    table = headed_table()
    table.add_column("tenant", max_width=15, no_wrap=True, overflow="ellipsis")
    for name in ("open", "ended", "tokens/s", "share", "TTFT mean", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.tenants[:_MAX_TENANTS]:
        table.add_row(
            row.name,
            str(row.unfinished),
            f"{row.ended}" + (f" ({row.refused} refused)" if row.refused else ""),
            f"{row.tokens_per_s:.0f}",
            percent(row.share),
            time_of(row.mean_ttft),
            coloured(row.attainment),
        )
    return first_rows(table, "tenants", _MAX_TENANTS, len(frame.tenants))


def _models(frame: Frame) -> RenderableType:
    table = headed_table()
    table.add_column("model", max_width=18, no_wrap=True, overflow="ellipsis")
    for name in ("state", "open", "waiting", "tokens/s", "MiB", "load", "computes"):
        table.add_column(name, justify="right", no_wrap=True)
    # those in memory first
    rows = sorted(frame.models, key=lambda row: not row.num_bytes)
    for row in rows[:_MAX_MODELS]:
        table.add_row(
            row.name,
            row.state,
            str(row.requests),
            str(row.waiting),
            f"{row.output_tokens_per_s:.0f}",
            str(row.num_bytes >> 20) if row.num_bytes else "",
            time_of(row.load_seconds) if row.load_seconds else "",
            percent(min(1.0, row.computed)),
        )
    return first_rows(table, "models", _MAX_MODELS, len(rows))


def _memory(frame: Frame) -> RenderableType:
    total = sum(frame.kv_blocks.values()) or 1
    owners = sorted(frame.kv_blocks.items(), key=lambda item: (item[0] in _IDLE, item[0]))
    bar, legend = Text(), Text()
    cells = [max(1, round(_BAR * count / total)) for _, count in owners]
    # every part keeps a cell, and the bar stays on one line
    while sum(cells) > max(_BAR, len(cells)):
        cells[cells.index(max(cells))] -= 1
    for place, (owner, count) in enumerate(owners):
        colour = _IDLE.get(owner, _COLOURS[place % len(_COLOURS)])
        bar.append("█" * cells[place], colour)
        legend.append(f"  {owner} {count}", colour)
    parts = [f"preemptions/s {frame.preemptions_per_s:.1f}"]
    if frame.kv_windows_total:
        parts.append(f"window blocks {frame.kv_windows_used}/{frame.kv_windows_total}")
    if frame.kv_host_total:
        parts.append(f"host blocks {frame.kv_host_used}/{frame.kv_host_total}")
    level = min(frame.pressure_level, len(_PRESSURE) - 1)
    line = Text("   ".join([*parts, f"pressure valve {_PRESSURE[level]}"]))
    line.stylize("yellow" if level else "", len("   ".join(parts)))
    if frame.wasted_tokens_per_s:
        wasted = (f"{cause} {rate:.0f}" for cause, rate in frame.wasted_tokens_per_s.items())
        line.append(f"\nwasted tokens/s: {'   '.join(wasted)}", "yellow")
    return Panel(
        Group(bar, legend, line), title=f"KV cache {frame.kv_usage:.0%}", title_align="left"
    )


_IDLE: Final[Mapping[str, str]] = {"prefix_cache": "bright_black", "free": "black"}
