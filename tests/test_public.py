"""What the package promises about itself: names, docstrings, version, dependencies."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import paceline
from tests.vllm import fake

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "paceline").rglob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
]


def test_all_names_exist_and_are_said() -> None:
    # vLLM is never installed here
    with fake.installed():
        wrong = list(_wrong_names())
    assert not wrong, "\n".join(wrong)


def _wrong_names() -> Iterator[str]:
    for name in MODULES:
        module = importlib.import_module(name)
        if not module.__doc__:
            yield f"{name} has no docstring"
        # __main__ modules and bare packages offer nothing to import
        exported = getattr(module, "__all__", None)
        if exported is None:
            public = [
                key
                for key, value in vars(module).items()
                if not key.startswith("_") and getattr(value, "__module__", None) == name
            ]
            if public:
                yield f"{name} defines {public} without an __all__"
        elif len(set(exported)) < len(exported):
            yield f"{name} names something twice in __all__"
        yield from (f"{name} has no {key}" for key in exported or () if not hasattr(module, key))


def test_the_version_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([0-9][^\]]*)\]", changelog, flags=re.MULTILINE)
    assert versions[0] == paceline.__version__


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    record = (ROOT / "docs/adr/0001-dependencies.md").read_text()
    development = project["optional-dependencies"]["dev"]
    for requirement in [*project["dependencies"], *development]:
        package = re.split(r"[<>=!~\[ ]", requirement)[0]
        assert re.search(rf"\b{re.escape(package)}\b", record), f"{package} is not in the ADR"


def test_every_dependency_is_pinned() -> None:
    def normal(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal(line.split("==")[0]) for line in lines if "==" in line}
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {normal(re.split(r"[<>=!~\[ ]", x)[0]) for x in wanted} <= pinned


def test_nothing_third_party_is_imported_without_being_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [x for x in project["optional-dependencies"] if x != "dev"]
    declared = [*project["dependencies"]]
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    names = {re.split(r"[<>=!~\[ ]", x)[0].replace("-", "_") for x in declared}
    # import names that differ from the package's, and what fastapi is made of
    names |= {"zmq", "starlette", "paceline", "sklearn", "__future__"}
    # the extra that only plots need, imported where they are drawn
    names |= {re.split(r"[<>=!~]", x)[0] for x in project["optional-dependencies"]["plots"]}
    # where several packages share one
    names |= {"opentelemetry"} if "otel" in extras else set()
    imports = re.compile(r"^ *(?:from (\w+)[\w.]* import |import (\w[\w., ]*))", re.MULTILINE)
    for path in SOURCES:
        found = imports.findall(path.read_text())
        named = [first or name for first, names in found for name in names.split(",") or [""]]
        tops = {re.split(r"[. ]", name.strip())[0] for name in named}
        assert tops <= names | sys.stdlib_module_names, f"{path.relative_to(ROOT)}: {tops - names}"
