"""Every module of core has tests under its own name, or a line here that says where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

CORE = Path(__file__).parents[2] / "paceline" / "core"
TESTS = Path(__file__).parent

# modules without tests of their own, and why that is right; a line without a module does no harm
ELSEWHERE = {
    "backend.py": "a protocol: tests/contract runs on every backend",
    "errors.py": "a tree of exceptions without code: what raises them tests them",
    "grammar.py": "protocols: tests/contract/test_grammar.py, tests/engine/text/test_grammar.py",
    "outputs.py": "values without code, made and read by the tests of step/",
    "pacing/paced.py": "puts the rest of pacing/ together: tests/core/pacing, tests/property",
    "pacing/tpot_guard.py": "an example of docs/scheduling.md: test_scheduling_examples.py",
    "pacing/view.py": "what the rest of pacing/ looks at: test_ageing.py, test_budget.py",
    "pooling.py": "settings and facts, checked by tests/pooling",
    "policies/base.py": "a protocol: policies/test_policies.py runs on every policy",
    "policies/deadline.py": "policies/test_policies.py and policies/test_defaults.py",
    "policies/fcfs.py": "policies/test_policies.py; the base of the others",
    "policies/phase_aligned.py": "policies/test_policies.py; its steps: step/test_planner.py",
    "policies/priority.py": "policies/test_policies.py",
    "policies/sjf.py": "policies/test_policies.py",
    "predict/chunk.py": "test_step_size.py; with targets pacing/test_budget.py",
    "request.py": "counters that the tests of all other parts move; its moves: test_tier.py",
    "speculation/guess.py": "a value and a protocol: tests/contract/test_guesses.py",
    "stats.py": "a value without code: tests/engine/supervision/test_totals.py",
    "step/draft_choice.py": "step/test_drafts.py",
    "speculation/row_price.py": "step/test_row_price.py",
    "step/state.py": "makes the parts of all tests in parts.py; its checks run in tests/driving.py",
}


def lacking(modules: Iterable[str], tests: Iterable[str], listed: Mapping[str, str]) -> list[str]:
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
                f"{module} has no tests of its own: add tests/core/{test}, or a line to ELSEWHERE "
                "in tests/core/test_mirror.py that says where it is tested"
            )
    return wrong


def below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]


def test_every_module_has_tests_of_its_own_or_a_reason() -> None:
    modules = [path for path in below(CORE) if not path.endswith("__init__.py")]
    assert len(modules) > 40, "the folder was not found"
    assert not lacking(modules, below(TESTS), ELSEWHERE)


def test_what_the_check_finds() -> None:
    modules = ["a.py", "b.py", "step/c.py", "step/d.py", "e.py", "f.py"]
    tests = ["test_a.py", "step/test_d.py", "test_c.py", "test_e.py"]
    listed = {"b.py": "there", "gone.py": "once", "e.py": "not any more", "f.py": ""}
    found = [line.split()[0] for line in lacking(modules, tests, listed)]
    assert found == ["e.py", "f.py", "step/c.py"]
