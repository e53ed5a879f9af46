"""What the package promises about itself: names, docstrings, version, files, frame."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "paceline").rglob("*.py"))
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
]


def test_all_names_exist_and_are_said() -> None:
    wrong = []
    for name in MODULES:
        module = importlib.import_module(name)
        if not module.__doc__:
            wrong.append(f"{name} has no docstring")
        # __main__ modules and bare packages offer nothing to import
        exported = getattr(module, "__all__", None)
        if exported is None:
            public = [
                key
                for key, value in vars(module).items()
                if not key.startswith("_") and getattr(value, "__module__", None) == name
            ]
            wrong += [f"{name} defines {public} without an __all__"] if public else []
        elif len(set(exported)) < len(exported):
            wrong.append(f"{name} names something twice in __all__")
        wrong += [f"{name} has no {key}" for key in exported or () if not hasattr(module, key)]
    assert not wrong, "\n".join(wrong)


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
    names |= {"zmq", "starlette", "paceline", "__future__"} - {"pyzmq"}
    # the extra that only plots need, imported where they are drawn
    names |= {re.split(r"[<>=!~]", x)[0] for x in project["optional-dependencies"]["plots"]}
    # where several packages share one
    names |= {"opentelemetry"} if "otel" in extras else set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                tops = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                tops = [(node.module or "").split(".")[0]]
            else:
                continue
            undeclared = [t for t in tops if t not in names and t not in sys.stdlib_module_names]
            assert not undeclared, f"{path.relative_to(ROOT)}:{node.lineno} imports {undeclared}"


def test_layers_name_every_room() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    layers = next(c for c in contracts if c["type"] == "layers")
    assert layers["exhaustive"] is True
    named = {room.strip() for line in layers["layers"] for room in line.split("|")}
    rooms = {path.parent.name for path in (ROOT / "paceline").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "paceline").glob("*.py")} - {"__init__"}
    assert rooms | files == named
    documented = (ROOT / "docs/understand/architecture.md").read_text()
    assert all(f"`{room}/`" in documented for room in rooms)
    assert all(f"`{file}.py`" in documented for file in files)


def test_documents_name_files_that_exist() -> None:
    text = (ROOT / "docs/understand/architecture.md").read_text()
    named = re.findall(
        r"`((?:core|checkpoints|backends|engine|http|routing|server|sim|cli|tests)/[\w/]+\.py)",
        text,
    )
    assert len(named) > 15
    for name in named:
        place = ROOT / name if name.startswith("tests/") else ROOT / "paceline" / name
        assert place.exists(), name


def test_the_architecture_names_every_file_of_the_core() -> None:
    rows = re.findall(
        r"^\| `(core/(?:\w+/)?)` \| (.*) \|$",
        (ROOT / "docs/understand/architecture.md").read_text(),
        re.M,
    )
    named = {
        f"{folder}{name}" for folder, files in rows for name in re.findall(r"`(\w+\.py)`", files)
    }
    core = ROOT / "paceline/core"
    there = {str(path.relative_to(ROOT / "paceline")) for path in core.rglob("*.py")}
    assert named == {path for path in there if not path.endswith("__init__.py")}


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-2:] == [
        "make test",
        "exec make test-ui test-services",
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="this machine has no make")
def test_make_passes_on_what_it_is_told(tmp_path: Path) -> None:
    def commands(*arguments: str) -> str:
        # -n says what would be run; an environment elsewhere shows that it would be made first
        done = subprocess.run(
            ["make", "-n", f"VENV={tmp_path}/venv", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            # nothing of the make that runs this test
            env={"PATH": os.environ["PATH"]},
        )
        return done.stdout.strip()

    serve = commands("serve", "PORT=1234", "ARGS=--max-num-seqs 7")
    assert "scripts/make-venv" in serve
    assert serve.endswith("bin/paceline serve smollm2-135m --port 1234 --max-num-seqs 7")
    assert commands("serve", "MODEL=x.gguf").endswith("paceline serve x.gguf --port 8000")
    assert commands("bench", "NAME=peers", "ARGS=-x").endswith("python -m benchmarks peers -x")
    assert " -m pytest -n 3 " in commands("test", "WORKERS=3")
    everything = commands("test-all")
    for marker in ("ui", "services", "docs", "thorough"):
        assert f"not {marker}" in commands("test"), "what one leaves out the others add"
    for words in ("tests/ui", '-m "services and not thorough"', "tests/docs", "-m thorough"):
        assert words in everything
    quick = commands("quick").rpartition('" ')[2].split()
    assert quick and all((ROOT / path).exists() for path in quick)
