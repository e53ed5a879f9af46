"""Where tsc is, and what it makes of the client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.common.processes import Unavailable
from benchmarks.common.setup import run_step
from paceline.checkpoints.hub.resolve import default_cache_dir

__all__ = ["CLIENT", "Wrong", "check", "find", "install"]

CLIENT = Path(__file__).parents[3] / "clients" / "typescript"
# written by hand, read by the sources
_BY_HAND = "types.d.ts"


class Wrong(Exception):
    """What the compiler says."""


def _folder() -> Path:
    root = os.environ.get("PACELINE_CLIENTS") or default_cache_dir() / "clients"
    return Path(root) / "typescript"


def find() -> Path | None:
    """The compiler of the version that is wanted; None: it is not installed."""
    wanted = json.loads((Path(__file__).parent / "package.json").read_text())
    package = _folder() / "node_modules" / "typescript" / "package.json"
    if shutil.which("node") is None or not package.exists():
        return None
    if json.loads(package.read_text())["version"] != wanted["dependencies"]["typescript"]:
        return None
    return _folder() / "node_modules" / ".bin" / "tsc"


def install() -> Path:
    """Raises Unavailable."""
    there = find()
    if there is not None:
        return there
    if shutil.which("npm") is None:
        raise Unavailable("npm is not on this machine")
    folder = _folder()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "package.json", folder)
    argv = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--no-package-lock"]
    run_step(argv, log=folder / "setup.log", cwd=folder)
    made = find()
    assert made is not None, "npm ended well"
    return made


def check(tsc: Path, scratch: Path, client: Path = CLIENT) -> dict[str, str]:
    """The declarations of the sources, by file.

    Args:
        scratch: an empty folder.

    Raises:
        Wrong: the sources, or what a caller writes, are not as they say.
    """
    # a copy, whose declarations are made anew: the sources are read, never what was made of them
    copy = scratch / "client"
    shutil.copytree(client, copy)
    for path in (copy / "types").iterdir():
        if path.name != _BY_HAND:
            path.unlink()
    for project in (".", "test"):
        done = subprocess.run(
            [tsc, "-p", project], cwd=copy, capture_output=True, text=True, timeout=100
        )
        if done.returncode:
            raise Wrong(done.stdout + done.stderr)
    return {path.name: path.read_text() for path in sorted((copy / "types").iterdir())}
