"""Several servers and gateways for users: a row for each server, each gateway in full."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from paceline.cli.watch.top.gateway_frame import GatewayFrame
from paceline.cli.watch.top.gateway_view import render_gateway
from paceline.cli.watch.top.numbers import coloured, percent, time_of
from paceline.cli.watch.top.panels import headed_table
from paceline.cli.watch.top.watch import Seen
from paceline.server.observability.snapshot.frame import Frame

__all__ = ["render_fleet"]


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
