"""A gateway's frame for users, where 80 columns are enough; and several servers and gateways: a row
for each server, each gateway in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from paceline.cli.watch.top.gateway_frame import EngineRow, GatewayFrame, KeyRow
from paceline.cli.watch.top.panels import (
    Lines,
    coloured,
    first_rows,
    headed_table,
    pair_of,
    percent,
    time_of,
)
from paceline.cli.watch.top.watch import Seen
from paceline.server.observability.snapshot.frame import Frame

__all__ = ["render_fleet", "render_gateway"]

# most rows of the tables, which fit into a terminal
_MAX_ENGINES: Final = 16
_MAX_KEYS: Final = 6
# cells of the bars
_SHARE_BAR: Final = 6
_BUDGET_BAR: Final = 20
_STATES: Final[Mapping[str, str]] = {
    "ready": "green",
    "at_capacity": "yellow",
    "memory_pressure": "yellow",
    "starting": "cyan",
    "slow": "yellow",
    "half-open": "yellow",
    "cooling_down": "yellow",
    "failing": "bold red",
    "unreachable": "bold red",
    "draining": "dim",
}
# states whose reason is shown
_TOLD: Final = frozenset({"failing", "unreachable", "cooling_down", "draining", "half-open"})
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def render_gateway(frame: GatewayFrame, url: str, problem: str = "") -> RenderableType:
    """Render a gateway.

    Args:
        problem: why ``frame`` is not the latest; "" if it is.
    """
    panels = [_head(frame, url, problem), _requests(frame), _engines(frame.engines)]
    if frame.keys:
        panels.append(_keys(frame.keys))
    return Group(*panels)


def _head(frame: GatewayFrame, url: str, problem: str) -> RenderableType:
    able = sum(
        row.state not in ("failing", "unreachable", "cooling_down", "draining")
        for row in frame.engines
    )
    all_of_them = len(frame.engines)
    line = Text.assemble(
        ("gateway", "bold"),
        f"  {url}  ",
        ("draining", "bold red") if frame.draining else ("ready", "green"),
        "  ",
        (
            f"{able} of {all_of_them} engines",
            "green" if able == all_of_them else "yellow" if able else "bold red",
        ),
    )
    if problem:
        line.append(f"\n{problem}", "bold red")
    return line


def _requests(frame: GatewayFrame) -> RenderableType:
    lines = Lines()
    row = lines.add
    row(
        "requests",
        f"at engines {frame.in_flight - frame.waiting}",
        f"waiting {frame.waiting}",
        f"ended/s {frame.ended_per_s:.1f}",
        f"retries left {frame.retry_budget:.0f}",
    )
    row("p50 / p99", f"TTFT {pair_of(frame.ttft)}", f"whole {pair_of(frame.seconds)}")
    faults = [f"{how} {count}" for how, count in frame.results.items() if how != "ok"]
    if faults:
        row("ended", f"ok {frame.results.get('ok', 0)}", *faults, style="yellow")
    done = []
    if frame.resumed:
        done.append(f"streams resumed {frame.resumed}")
    if frame.fallbacks:
        done.append(f"to a later tier {frame.fallbacks}")
    if frame.hedges:
        done.append("hedges " + ", ".join(f"{how} {n}" for how, n in frame.hedges.items()))
    if done:
        row("saved", *done, style="cyan")
    if frame.cascade:
        who = [f"{by} {frame.cascade.get(by, 0)}" for by in ("small", "escalated", "large")]
        handed = 1.0 - frame.cascade.get("small", 0) / max(1, sum(frame.cascade.values()))
        row("cascade", *who, f"handed off {handed:.0%}")
        row("", f"wasted {frame.cascade_wasted} tokens", f"saved {_money(frame.cascade_saved)}",
            *(["bound exceeded"] if frame.cascade_alarm else []))  # fmt: skip
    return lines.panel("requests")


def _engines(engines: Sequence[EngineRow]) -> RenderableType:
    table = headed_table((0, 1, 0, 0))
    table.add_column("engine", width=10, no_wrap=True, overflow="ellipsis")
    # states of two words may take two lines
    table.add_column("state", width=11)
    for name, width in (("here", 4), ("run", 4), ("wait", 4), ("KV", 4)):
        table.add_column(name, width=width, justify="right", no_wrap=True)
    table.add_column("sent/s", width=6, justify="right", no_wrap=True)
    table.add_column("share", width=_SHARE_BAR + 5, justify="left", no_wrap=True)
    table.add_column("TTFT\npred.", width=6, justify="right", no_wrap=True)
    table.add_column("TTFT\nseen", width=6, justify="right", no_wrap=True)
    shown = _first(engines)
    notes = Text()
    for row in shown:
        off = (
            row.predicted_first and row.actual_first and row.actual_first > 3 * row.predicted_first
        )
        table.add_row(
            row.name,
            Text(row.state.replace("_", " "), _STATES.get(row.state, "")),
            str(row.requests),
            _count(row.running),
            Text(_count(row.waiting), "yellow" if row.waiting else ""),
            _memory(row),
            f"{row.sent_per_s:.1f}" if row.sent_per_s < 1000 else f"{row.sent_per_s:.0f}",
            Text.assemble(
                (_bar(row.sent_share or 0.0, _SHARE_BAR), "cyan"), f" {percent(row.sent_share):>4}"
            ),
            _seconds(row.predicted_first),
            Text(_seconds(row.actual_first), "yellow" if off else ""),
        )
        note = _note(row)
        if note:
            notes.append(f"\n{row.name}", "bold")
            bad = row.state in ("failing", "unreachable")
            notes.append(f"  {note}", "red" if bad else "yellow")
    left = len(engines) - len(shown)
    more = f" ({len(shown)} of {len(engines)})" if left else ""
    body: RenderableType = Group(table, notes[1:]) if notes else table
    return Panel(body, title=f"engines{more}", title_align="left")


def _first(engines: Sequence[EngineRow]) -> Sequence[EngineRow]:
    """Return the engines to show, in their order; if too many, unhealthy ones take precedence."""
    if len(engines) <= _MAX_ENGINES:
        return engines
    chosen = sorted(range(len(engines)), key=lambda i: (engines[i].state == "ready", i))
    return [engines[i] for i in sorted(chosen[:_MAX_ENGINES])]


def _note(row: EngineRow) -> str:
    parts = []
    if row.state in _TOLD and row.trouble and row.trouble != row.state:
        parts.append(row.trouble)
    elif row.state == "starting":
        parts.append(f"back again, gets {row.share:.0%} of its share")
    elif row.state == "slow":
        parts.append("first tokens are several times slower than usual: it gets few requests")
    elif row.trouble and row.state != "at_capacity":
        parts.append(row.trouble)
    parts += [f"{kind} {count}" for kind, count in row.failures.items()]
    if row.resumed:
        parts.append(f"resumed {row.resumed}")
    return "   ".join(parts)


def _keys(keys: Sequence[KeyRow]) -> RenderableType:
    table = headed_table()
    table.add_column("key", max_width=18, no_wrap=True, overflow="ellipsis")
    table.add_column("spent", justify="right", no_wrap=True)
    table.add_column("budget", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("an hour", justify="right", no_wrap=True)
    for row in keys[:_MAX_KEYS]:
        share = row.share or 0.0
        colour = "red" if share >= 1.0 else "yellow" if share >= 0.8 else "green"
        bar = Text()
        if row.share is not None:
            bar = Text.assemble(
                (_bar(min(1.0, share), _BUDGET_BAR), colour), f" {percent(row.share):>4}"
            )
        table.add_row(
            row.name,
            f"{_money(row.spent)} {row.currency}",
            row.budget or Text("today", "dim"),
            bar,
            _money(row.per_hour),
        )
    return first_rows(table, "keys", _MAX_KEYS, len(keys))


def _count(value: int | None) -> str:
    if value is None:
        return "-"
    return str(value) if value < 10_000 else f"{value // 1000}k"


def _memory(row: EngineRow) -> Text:
    full = row.memory_pressure or (row.kv is not None and row.kv >= 0.95)
    return Text(percent(row.kv), "yellow" if full else "")


def _bar(share: float, cells: int) -> str:
    """Return a bar of ``share`` of ``cells``, to an eighth of a cell, padded with blanks."""
    eighths = round(share * cells * 8)
    whole, part = divmod(eighths, 8)
    bar = "█" * whole + (_EIGHTHS[part] if part else "")
    return bar.ljust(cells)


def _seconds(value: float | None) -> str:
    """Format seconds in six characters."""
    if value is None:
        return "-"
    if value < 1.0:
        milliseconds = value * 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.3g}"


def render_fleet(seen: Sequence[Seen]) -> RenderableType:
    """Render in the given order, with addresses that never answered among the servers."""
    panels: list[RenderableType] = [
        render_gateway(each.frame, each.url, each.problem)
        for each in seen
        if isinstance(each.frame, GatewayFrame)
    ]
    servers = [each for each in seen if not isinstance(each.frame, GatewayFrame)]
    if servers:
        panels.append(_servers(servers))
    return Group(*panels)


def _servers(seen: Sequence[Seen]) -> RenderableType:
    table = headed_table((0, 1, 0, 0))
    table.add_column("server", width=21, no_wrap=True, overflow="ellipsis")
    table.add_column("model", width=12, no_wrap=True, overflow="ellipsis")
    for name, width in (
        ("run", 5), ("wait", 5), ("KV", 4), ("out/s", 6), ("TTFT 99", 7), ("met", 6),
    ):  # fmt: skip
        table.add_column(name, width=width, justify="right", no_wrap=True)
    problems = Text()
    totals = [each.frame for each in seen if isinstance(each.frame, Frame)]
    for each in seen:
        frame = each.frame
        if isinstance(frame, Frame):
            table.add_row(
                Text(each.address, "bold red" if each.problem else ""),
                frame.model,
                str(frame.running),
                Text(str(frame.waiting), "yellow" if frame.waiting else ""),
                Text(percent(frame.kv_usage), "yellow" if frame.pressure_level else ""),
                f"{frame.output_tokens_per_s:.0f}",
                time_of(frame.ttft.p99).replace(" ", ""),
                coloured(_attainment(frame)),
            )
        else:
            table.add_row(Text(each.address, "bold red"), *["-"] * 7)
        problem = each.problem or (
            "not ready" if isinstance(frame, Frame) and not frame.ready else ""
        )
        if problem:
            problems.append(f"\n{each.address}", "bold")
            problems.append(f"  {problem}", "red")
    if len(totals) > 1:
        table.add_row(
            Text("all", "dim"),
            "",
            *(
                Text(str(sum(counts)), "dim")
                for counts in ([f.running for f in totals], [f.waiting for f in totals])
            ),
            "",
            Text(f"{sum(frame.output_tokens_per_s for frame in totals):.0f}", "dim"),
        )
    body: RenderableType = Group(table, problems[1:]) if problems else table
    return Panel(body, title="servers", title_align="left")


def _attainment(frame: Frame) -> float | None:
    """Return the share of requests ended in the interval that met their targets."""
    ended = sum(row.ended for row in frame.classes)
    good = sum((row.attainment or 0.0) * row.ended for row in frame.classes)
    return good / ended if ended else None
