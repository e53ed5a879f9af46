"""Every module of core and of speculation has tests under its own name, or a line here that says
where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "paceline"
TESTS = Path(__file__).parents[1]

# modules without tests of their own, and why that is right; a line without a module does no harm
ELSEWHERE = {
    "backend.py": "a protocol: tests/contract runs on every backend",
    "grammar.py": "protocols: tests/contract/test_grammar.py, tests/engine/text/test_grammar.py",
    "outputs.py": "values without code, made and read by the tests of step/",
    "pacing/paced.py": "puts the rest of pacing/ together: tests/core/pacing, tests/property",
    "pacing/view.py": "what the rest of pacing/ looks at: test_budget.py",
    "pooling.py": "settings and facts, checked by tests/pooling",
    "policies/deadline.py": "policies/test_policies.py and policies/test_defaults.py",
    "policies/fcfs.py": "policies/test_policies.py; the base of the others",
    "policies/phase_aligned.py": "policies/test_policies.py; its steps: step/test_planner.py",
    "policies/priority.py": "policies/test_policies.py",
    "policies/sjf.py": "policies/test_policies.py",
    "predict/chunk.py": "test_step_size.py; with targets pacing/test_budget.py",
    "request.py": "counters that the tests of all other parts move; its moves: test_tier.py",
    "stats.py": "a value without code: tests/engine/supervision/test_totals.py",
    "step/state.py": "makes the parts of all tests in parts.py; its checks run in tests/driving.py",
}


ELSEWHERE_IN_SPECULATION = {
    "draft_choice.py": "test_drafts.py and test_model_drafts.py",
    "draft_tokens.py": "a value and a protocol: tests/contract/test_drafts.py",
}


def lacking(
    modules: Iterable[str], tests: Iterable[str], listed: Mapping[str, str], room: str = "core"
) -> list[str]:
    """What is wrong, a line each. ``modules`` and ``tests`` are paths below their folders."""
    modules, tests = set(modules), set(tests)
    wrong = []
    for module in sorted(modules):
        folder, _, name = module.rpartition("/")
        test = f"{folder}/test_{name}".lstrip("/")
        if module in listed and test in tests:
            wrong.append(f"{module} is listed as tested elsewhere, and there is {test}: drop it")
        elif module in listed and not listed[module]:
            wrong.append(f"{module} is listed as tested elsewhere without saying why")
        elif module not in listed and test not in tests:
            wrong.append(
                f"{module} has no tests of its own: add tests/{room}/{test}, or a line to what "
                "tests/core/test_mirror.py lists that says where it is tested"
            )
    return wrong


def below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]


@pytest.mark.parametrize(
    ("room", "least", "listed"),
    [("core", 40, ELSEWHERE), ("speculation", 6, ELSEWHERE_IN_SPECULATION)],
)
def test_every_module_has_tests_of_its_own_or_a_reason(
    room: str, least: int, listed: Mapping[str, str]
) -> None:
    modules = [path for path in below(PACKAGE / room) if not path.endswith("__init__.py")]
    assert len(modules) > least, "the folder was not found"
    assert not lacking(modules, below(TESTS / room), listed, room)


def test_what_the_check_finds() -> None:
    modules = ["a.py", "b.py", "step/c.py", "step/d.py", "e.py", "f.py"]
    tests = ["test_a.py", "step/test_d.py", "test_c.py", "test_e.py"]
    listed = {"b.py": "there", "gone.py": "once", "e.py": "not any more", "f.py": ""}
    found = [line.split()[0] for line in lacking(modules, tests, listed)]
    assert found == ["e.py", "f.py", "step/c.py"]
