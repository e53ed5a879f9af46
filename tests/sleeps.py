"""Sleeps in the tests: which of them wait for a time, whatever happens meanwhile.

A turn of a loop that waits for a condition is none of these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["Sleep", "fixed_sleeps"]

_MODULES: Final = ("time", "asyncio", "anyio")
# seconds of one turn of a loop that waits for a condition, at most
_TURN: Final = 0.05


class Sleep(NamedTuple):
    line: int
    # None: they are computed
    seconds: float | None


def fixed_sleeps(source: str) -> list[Sleep]:
    """Sleeps in a file of tests that are no turns of a loop, and do more than let others run."""
    return [
        sleep
        for sleep, loops in _sleeps(ast.parse(source), loops=False)
        if sleep.seconds != 0
        and not (loops and sleep.seconds is not None and sleep.seconds <= _TURN)
    ]


def _sleeps(node: ast.AST, *, loops: bool) -> Iterator[tuple[Sleep, bool]]:
    """With whether they stand in a loop of their function."""
    if isinstance(node, ast.Call) and _is_sleep(node.func) and node.args:
        given = node.args[0]
        seconds = float(given.value) if isinstance(given, ast.Constant) else None
        yield Sleep(node.lineno, seconds), loops
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.While | ast.For | ast.AsyncFor):
            yield from _sleeps(child, loops=True)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _sleeps(child, loops=False)
        else:
            yield from _sleeps(child, loops=loops)


def _is_sleep(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "sleep"
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "sleep"
        and isinstance(function.value, ast.Name)
        and function.value.id in _MODULES
    )
