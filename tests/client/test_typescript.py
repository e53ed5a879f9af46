"""The client for TypeScript and JavaScript: its own tests, which play the transcripts in
``vectors/`` too, and its types."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline
from tests.clients.typescript.compiler import CLIENT, Wrong, check, find
from tests.server.live_process import live_server

NODE = shutil.which("node")
TSC = find()
TYPED = pytest.mark.skipif(
    TSC is None, reason="TypeScript's compiler is not here: python -m tests.clients.typescript"
)


@pytest.mark.skipif(NODE is None, reason="this machine has no node")
def test_it_behaves_as_this_one() -> None:
    assert NODE is not None
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.strip("v\n").split(".")[0]) < 20:
        pytest.skip("node is older than 20")
    files = [str(path) for path in sorted((CLIENT / "test").glob("*.test.js"))]
    assert len(files) == 2
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", *files],
        cwd=CLIENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (passed,) = re.findall(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert int(passed) >= 20


def test_it_needs_nothing() -> None:
    package = json.loads((CLIENT / "package.json").read_text())
    assert package["version"] == paceline.__version__
    assert not {"dependencies", "devDependencies", "peerDependencies"} & set(package)
    for path in package["exports"].values():
        assert (CLIENT / path).is_file() and path.split("/")[1] in package["files"]
    for path in (CLIENT / "src").glob("*.js"):
        for name in re.findall(r'from "(.*?)"', path.read_text()):
            assert name.startswith("./"), f"{path.name} imports {name}"


@TYPED
def test_its_declarations_are_those_of_its_sources(tmp_path: Path) -> None:
    """And the sources do what they say, and callers are stopped where they should be."""
    assert TSC is not None
    made = check(TSC, tmp_path)
    there = {path.name: path.read_text() for path in (CLIENT / "types").iterdir()}
    assert made == there, "python -m tests.clients.typescript --write"


@TYPED
def test_the_pages_example_compiles_and_runs(tmp_path: Path) -> None:
    assert TSC is not None and NODE is not None
    page = (CLIENT.parents[1] / "docs" / "use" / "client.md").read_text()
    (example,) = re.findall(r"```typescript\n(.*?)```", page, re.DOTALL)
    copy = tmp_path / "client"
    shutil.copytree(CLIENT, copy)
    with live_server(tmp_path / "log", config={"served_model_names": ["smollm2-135m"]}) as server:
        code = example.replace("http://127.0.0.1:8000", server.url)
        assert server.url in code
        (copy / "test" / "types.ts").write_text(code)
        made = subprocess.run(
            [TSC, "-p", "test", "--noEmit", "false", "--outDir", "made"],
            cwd=copy,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout
        (built,) = (copy / "made").rglob("types.js")
        done = subprocess.run([NODE, built], cwd=copy, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "completion_tokens: 8" in done.stdout


@TYPED
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "old", "new", "words"),
    [
        # a field that the declarations have and the sources do not make
        ("src/answer.js", 'type: "TextDelta", text: content', 'type: "TextDelta"', "TextDelta"),
        # an event that callers do not know of
        ("types/types.d.ts", "  | Restarted\n", "  | Restarted\n  | Head\n", "never"),
        # what was refused to callers and is no longer
        ("types/types.d.ts", "  model?: never;\n", "", "Unused '@ts-expect-error'"),
    ],
)
def test_what_is_not_as_it_says_is_found(
    tmp_path: Path, path: str, old: str, new: str, words: str
) -> None:
    assert TSC is not None
    changed = tmp_path / "changed"
    shutil.copytree(CLIENT, changed)
    text = (changed / path).read_text()
    assert old in text
    (changed / path).write_text(text.replace(old, new, 1))
    with pytest.raises(Wrong, match=words):
        check(TSC, tmp_path, changed)


def test_names_of_events_and_policies_are_pythons() -> None:
    from dataclasses import fields

    from paceline.client import Policy, events

    declared = (CLIENT / "types" / "types.d.ts").read_text()

    def names_of(name: str) -> set[str]:
        (inside,) = re.findall(rf"^export interface {name} {{\n(.*?)^}}", declared, re.M | re.S)
        return set(re.findall(r"^  (\w+)\??:", inside, re.M)) - {"type"}

    assert names_of("Policy") == {field.name for field in fields(Policy)}
    (union,) = re.findall(r"^export type ClientEvent =\n(.*?);", declared, re.M | re.S)
    known = set(re.findall(r"\| (\w+)", union))
    for name in known:
        assert names_of(name) == {field.name for field in fields(getattr(events, name))}, name
    here = {
        name for name in events.__all__ if hasattr(getattr(events, name), "__dataclass_fields__")
    }
    assert here - known <= {"ToolCall", "Usage"}
