"""How far tests reach into what is private: ``a._b._c`` reaches through two levels."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["Reach", "reaches"]


class Reach(NamedTuple):
    line: int
    # private attributes between the object that a test has and what it looks at
    levels: int
    text: str


def reaches(source: str) -> list[Reach]:
    """Every use of a private attribute in a file, with the levels to it. What a function has put
    into a name of its own counts with the levels to that."""
    tree = ast.parse(source)
    found = list(_in_scope(tree.body, {}))
    return sorted(set(found))


def _in_scope(body: list[ast.stmt], outer: Mapping[str, int]) -> Iterator[Reach]:
    names = dict(outer)
    for statement in body:
        yield from _in(statement, names)


def _in(node: ast.AST, names: dict[str, int]) -> Iterator[Reach]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _in_scope(node.body, names)
        return
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        yield Reach(node.lineno, _levels(node, names), ast.unparse(node))
    for child in ast.iter_child_nodes(node):
        yield from _in(child, names)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        _assign(node.targets[0], node.value, names)


def _assign(target: ast.expr, value: ast.expr, names: dict[str, int]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = _levels(value, names)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            _assign(one, its, names)


def _levels(node: ast.expr, names: Mapping[str, int]) -> int:
    """Private attributes on the way to what an expression says."""
    if isinstance(node, ast.Name):
        return names.get(node.id, 0)
    if isinstance(node, ast.Attribute):
        return _is_private(node.attr) + _levels(node.value, names)
    if isinstance(node, ast.Call):
        # what a public method answers is nothing private
        return _levels(node.func, names) if _is_private_call(node) else 0
    if isinstance(node, ast.Subscript | ast.Await | ast.Starred):
        return _levels(node.value, names)
    return 0


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private_call(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and _is_private(node.func.attr)
