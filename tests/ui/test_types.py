"""The page's modules are what their comments say, by TypeScript's compiler, strictly."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.common.processes import Unavailable
from paceline.web.assets import BUILT_IN
from tests.clients.typescript.compiler import find, install

UI = Path(__file__).parents[2] / "ui"


@pytest.fixture(scope="module")
def tsc(request: pytest.FixtureRequest) -> Path:
    if request.config.option.no_skips:
        try:
            return install()
        except Unavailable as error:
            pytest.fail(str(error))
    found = find()
    if found is None:
        pytest.skip("TypeScript's compiler is not here: python -m tests.clients.typescript")
    return found


def copied(scratch: Path) -> Path:
    """The modules, with declarations in place of the bundle; answers their folder."""
    shutil.copy(UI / "tsconfig.json", scratch)
    static = scratch / "static"
    shutil.copytree(BUILT_IN, static)
    (static / "vendor" / "preact.js").unlink()
    shutil.copy(UI / "types" / "preact.d.ts", static / "vendor")
    # and what plays a recording with them, on the docs site
    (scratch / "demo").mkdir()
    demo = (UI.parent / "docs" / "demo" / "demo.js").read_text()
    (scratch / "demo" / "demo.js").write_text(demo.replace('from "./ui/', 'from "../static/'))
    return static


def said(tsc: Path, scratch: Path) -> str:
    """What the compiler says; nothing, where all is well."""
    done = subprocess.run(
        [tsc, "-p", ".", "--pretty", "false"],
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 or done.stdout, done.stderr
    return done.stdout


def test_every_module(tsc: Path, tmp_path: Path) -> None:
    static = copied(tmp_path)
    assert len(list(static.rglob("*.js"))) > 20
    assert said(tsc, tmp_path) == ""


@pytest.mark.parametrize(
    ("path", "old", "new", "words"),
    [
        # a property that a component does not have, and one that it must have
        ("pages/operations.js", "h(Settings, { settings:", "h(Settings, { setings:", "TS2769"),
        ("pages/promises.js", "h(Facts, { facts: [", "h(Facts, { label: 1, facts: [", "TS2769"),
        # a field of what is known of a request
        ("timeline/story.js", "if (seen.preemptions)", "if (seen.preemtions)", "preemtions"),
        # what may be nothing
        ("timeline/live.js", "/** @type {ReadableStream<Uint8Array>} */ (response.body)",
         "(response.body)", "null"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_says_is_found(
    tsc: Path, tmp_path: Path, path: str, old: str, new: str, words: str
) -> None:
    static = copied(tmp_path)
    text = (static / path).read_text()
    assert old in text
    (static / path).write_text(text.replace(old, new))
    found = said(tsc, tmp_path)
    assert re.search(rf"^static/{path}.*{words}", found, re.MULTILINE), found


def test_the_bundle_has_what_is_declared_of_it() -> None:
    entry = (UI / "vendor-entry.js").read_text()
    bundled = {
        name.strip()
        for names in re.findall(r"export \{(.*?)\} from", entry)
        for name in names.split(",")
    }
    declared = (UI / "types" / "preact.d.ts").read_text()
    assert set(re.findall(r"^export (?:function|const) (\w+)", declared, re.MULTILINE)) == bundled
