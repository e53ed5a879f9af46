"""Where two logs of decisions part: the first call that differs, what led there, and both sides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

# lines before the call that differs, and of each side of it, at most
_CONTEXT = 6
_MOST = 40


def first_difference(
    before: Sequence[str], after: Sequence[str], names: tuple[str, str] = ("recorded", "now")
) -> str | None:
    """None if both logs are the same; else a report of the first call in which they differ.

    Lines that begin with a blank belong to the call above them (``rig``). Those of the call that
    only one side has are marked.
    """
    first = next(
        (i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b),
        None,
    )
    if first is None:
        return None
    start = min(first, max(len(before), len(after)) - 1)
    longer = before if len(before) > len(after) else after
    # lines above the first difference are the same on both sides
    while start > 0 and longer[start].startswith(" "):
        start -= 1
    plans = sum(line.startswith("plan at ") for line in before[: start + 1])
    report = [f"line {first + 1} differs, at plan {plans} of the run, in: {longer[start]}"]
    report += [f"    {line}" for line in before[max(0, start - _CONTEXT) : start]]
    sides = [_call(log, start, first) for log in (before, after)]
    for name, side, other in zip(names, sides, reversed(sides), strict=True):
        report.append(f"--- {name}")
        report += [f"{' ' if line in other else '>'}   {line}" for line in side] or [">   (ended)"]
    return "\n".join(report)


def _call(log: Sequence[str], start: int, first: int) -> list[str]:
    """The lines of the call that begins at ``start``, those around ``first`` if they are many."""
    end = start + 1
    while end < len(log) and log[end].startswith(" "):
        end += 1
    lines = list(log[start:end])
    if len(lines) <= _MOST:
        return lines
    low = max(1, first - start - _MOST // 2)
    cut = lines[low : low + _MOST]
    return [lines[0], f"  ... {low - 1} lines", *cut, f"  ... {len(lines) - low - len(cut)} lines"]
