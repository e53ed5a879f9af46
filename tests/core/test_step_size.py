"""How much of core a reader has to follow, measured: the files and functions that a plain step
enters, and the size of every function; of speculation, too, which was part of it.

The limits only go down, and the list of exceptions stays empty.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline.core
from paceline.core.outputs import StepResult
from tests.driving import Driver, make_request

CORE = Path(paceline.core.__file__).parent
ROOMS = (CORE, CORE.parent / "speculation")

# settings -> (files, functions) that schedule() and update() of one step may enter. A function
# that both enter counts twice. In Python 3.11 a comprehension is a code object of its own and
# counts as a function; in later versions it is part of the function around it
PLAIN_STEPS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "fixed": ({"adaptive_token_budget": False, "future_memory_check": False}, (18, 70)),
    "defaults": ({"adaptive_token_budget": True, "future_memory_check": True}, (18, 70)),
}

MAX_STATEMENTS = 40
MAX_BRANCHES = 15
MAX_PARAMETERS = 6
# what is larger: figures go down, and what is within the limit leaves the list
LARGE: dict[str, dict[str, int]] = {"statements": {}, "branches": {}, "parameters": {}}


# ------------------------------------------------------------------ a plain step


def entered(call: Callable[[], Any]) -> tuple[Any, Counter[tuple[str, str]]]:
    """What ``call`` returns, and how often it entered each function of the rooms: (file, name)."""
    calls: Counter[tuple[str, str]] = Counter()
    roots, package = tuple(f"{room}/" for room in ROOMS), f"{CORE.parent}/"

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(roots):
            calls[code.co_filename.removeprefix(package), code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        returned = call()
    finally:
        sys.setprofile(before)
    return returned, calls


def plain_step(config: dict[str, Any]) -> tuple[Counter[tuple[str, str]], ...]:
    """What schedule() and update() enter for four requests that run and one that has just come,
    first come first served, none with targets, once step times are known."""
    driver = Driver(
        num_blocks=400,
        max_num_batched_tokens=256,
        seconds=lambda shape: 0.05 + 0.01 * shape.wide_tokens + 0.02 * shape.narrow_rows,
        **config,
    )
    for number in range(32):
        driver.add(make_request(f"before{number}", 20 + number, 20, arrival=driver.now))
        driver.step()
        driver.step()
    driver.run()
    for number in range(4):
        driver.add(make_request(f"r{number}", [50 + number] * 30, 40, arrival=driver.now))
    for _ in range(6):
        driver.step()
    driver.add(make_request("new", [99] * 30, 10, arrival=driver.now))
    assert driver.scheduler.step_time.num_observations > 64, "models are not made anew every step"
    plan, planning = entered(lambda: driver.scheduler.schedule(driver.now))
    assert [row.num_tokens for row in plan.rows] == [1, 1, 1, 1, 30]
    result: StepResult = replace(driver.backend.execute(plan).result(), elapsed=0.43)
    _, updating = entered(lambda: driver.scheduler.update(plan, result, driver.now))
    return planning, updating


@pytest.mark.parametrize("name", sorted(PLAIN_STEPS))
def test_a_plain_step_enters_few_files_and_functions(name: str) -> None:
    config, (max_files, max_functions) = PLAIN_STEPS[name]
    parts = plain_step(config)
    files = Counter(file for part in parts for file, _ in part)
    num_functions = sum(map(len, parts))
    told = "".join(
        f"\n{method}() enters {len(part)} functions in {part.total()} calls:"
        + "".join(f"\n    {file}: {function}" for file, function in sorted(part))
        for method, part in zip(("schedule", "update"), parts, strict=True)
    )
    assert len(files) <= max_files and num_functions <= max_functions, (
        f"a plain step enters {len(files)} files and {num_functions} functions of core, the limits "
        f"are {max_files} and {max_functions}; functions by file:\n"
        + "\n".join(f"    {file}: {count}" for file, count in files.most_common())
        + told
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_without_drafts_enters_nothing_that_drafts(drafts: bool) -> None:
    """The scheduler of the driver is given what drafts, which begins where that is asked for."""
    config = PLAIN_STEPS["defaults"][0]
    if drafts:
        config = config | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    files = {file for part in plain_step(config) for file, _ in part}
    assert any(file.startswith("speculation/") for file in files) is drafts, files


# ------------------------------------------------------------------ every function


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each function of the rooms with its name: file, classes and functions around it."""
    for path in sorted(path for room in ROOMS for path in room.rglob("*.py")):
        name = path.relative_to(CORE.parent).as_posix()
        yield from _functions(name, ast.parse(path.read_text()))


def _functions(name: str, node: ast.AST) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        own = name
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            own = f"{name}:{child.name}" if name.endswith(".py") else f"{name}.{child.name}"
        if isinstance(child, ast.FunctionDef):
            yield own, child
        yield from _functions(own, child)


def num_statements(function: ast.FunctionDef) -> int:
    """Those of functions within it are its own too; docstrings are none."""
    return (
        sum(
            isinstance(node, ast.stmt)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in ast.walk(function)
        )
        - 1
    )


def num_branches(function: ast.FunctionDef) -> int:
    """One, and one more wherever the way through it parts."""
    return 1 + sum(_parts(node) for node in ast.walk(function))


def _parts(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler))


def num_parameters(function: ast.FunctionDef) -> int:
    """Of a constructor, without ``self``; other functions have none that count."""
    if function.name != "__init__":
        return 0
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1


MEASURES: dict[str, tuple[Callable[[ast.FunctionDef], int], int]] = {
    "statements": (num_statements, MAX_STATEMENTS),
    "branches": (num_branches, MAX_BRANCHES),
    "parameters": (num_parameters, MAX_PARAMETERS),
}


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_functions_are_small(measure: str) -> None:
    count, limit = MEASURES[measure]
    large = {name: count(function) for name, function in functions() if count(function) > limit}
    assert large == LARGE[measure], (
        f"more than {limit} {measure}: write smaller functions; where a figure has gone down or a "
        f"function is within the limit now, LARGE in {Path(__file__).name} says so"
    )


SOURCE = """
def f(a, b):
    '''Says what it does.'''
    if a and b or a:
        return [x for x in a if x]
    for x in b:
        try:
            x = 1 if a else 2
        except ValueError:
            pass

class C:
    def __init__(self, a, *, b):
        def inner():
            return a
        self.a = inner
"""


def test_what_is_counted() -> None:
    found = dict(_functions("m.py", ast.parse(SOURCE)))
    assert list(found) == ["m.py:f", "m.py:C.__init__", "m.py:C.__init__.inner"]
    counted = {
        name: tuple(count(function) for count, _ in MEASURES.values())
        for name, function in found.items()
    }
    assert counted == {
        # if, return, for, try, assignment, pass; if, and, or, for and if of the list, for, else,
        # except
        "m.py:f": (6, 9, 0),
        "m.py:C.__init__": (3, 1, 2),
        "m.py:C.__init__.inner": (1, 1, 0),
    }
