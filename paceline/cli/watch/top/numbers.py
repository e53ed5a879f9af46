"""Numbers formatted for a terminal; "-" is an unknown one."""

from __future__ import annotations

from rich.text import Text

from paceline.server.observability.snapshot.growth import Quantiles

__all__ = ["coloured", "pair_of", "percent", "plain", "time_of"]


def plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def coloured(value: float | None) -> Text:
    colour = "dim" if value is None else "red" if value < 0.9 else "yellow" if value < 0.99 else ""
    return Text("-" if value is None else f"{value:.1%}", colour)


def time_of(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def pair_of(times: Quantiles) -> str:
    return (
        "-"
        if times.p50 is None
        else " / ".join(
            ("<" if value is not None and value <= times.floor else "") + time_of(value)
            for value in (times.p50, times.p99)
        )
    )
