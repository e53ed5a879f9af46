"""The front door: which commands of other servers' notes start, and how often first answers loop.

Method. ``commands``: each of the 60 command lines of commands.txt is started with a tiny model in
place of its own, on a free port, and ended once it is ready; a command counts if it becomes ready,
and what its start log says about its flags is printed. ``loops``: a server of the default model
with its default settings is asked each of the 200 everyday questions of benchmarks/common for 200
tokens, with seeds 1, 2 and 3; ``questions.loops`` says which answers loop. ``tasks``: the
same server is asked the 510 tasks with exact checkers of benchmarks/cascade, 17 kinds, for what its
default settings cost.

``install``: the wheel in dist/ (``make wheel``) is installed into an empty environment and asked
once.

``page``: the files of the page at /ui with gzip, and its longest task, by the browser's own report
of tasks above 50 ms, while a null backend sends 100 tokens a second for ten seconds (Chromium).

PARTS=commands,loops picks parts; QUICK=1 asks a tenth. To choose settings by:
OPEN=1 asks the half of the questions that is not held back, with seeds 4, 5 and 6, and other tasks;
FLAGS are flags of the server. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common.parts import chosen
from benchmarks.common.processes import REPOSITORY, Unavailable
from benchmarks.front_door.loops import measure_loops, measure_tasks
from benchmarks.front_door.page import measure_page
from benchmarks.front_door.starts import start_all
from paceline.bench.machine import machine


def _commands(folder: Path) -> dict[str, Any]:
    started = 0
    for start in start_all(folder):
        started += start.started
        set_before = [f"{name}={value}" for name, value in start.command.environment.items()]
        verdict = "starts " if start.started else "refused"
        print(verdict, *set_before, *start.command.words)
        for line in start.said:
            print(f"          {line}")
    print(f"\n{started} of 60 start")
    return {"commands_started": started}


def _asked(name: str, measure: Callable[..., dict[str, Any]], folder: Path) -> dict[str, Any]:
    found = measure(
        folder,
        every=10 if os.environ.get("QUICK") else 1,
        flags=shlex.split(os.environ.get("FLAGS", "")),
        only_open=bool(os.environ.get("OPEN")),
    )
    return {name: found}


def _install(_folder: Path) -> dict[str, Any]:
    """Install ``dist/*.whl`` into an empty environment and ask it, as ``make test-wheel`` does.
    Raises Unavailable without a wheel."""
    wheels = sorted((REPOSITORY / "dist").glob("paceline-*.whl"))
    if not wheels:
        raise Unavailable("there is no wheel in dist: make wheel")
    argv = [sys.executable, "-m", "tests.wheel", str(wheels[-1])]
    argv += ["--constraint", str(REPOSITORY / "constraints.txt")]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"the wheel does not answer: {done.stderr.strip()[-300:]}")
    *lines, last = done.stdout.splitlines()
    print("\n".join(lines))
    results = json.loads(last)["results"]
    return {name: results[name] for name in ("install_to_answer_s", "installed_mb")}


PARTS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "commands": _commands,
    "loops": partial(_asked, "loops", measure_loops),
    "tasks": partial(_asked, "tasks", measure_tasks),
    "install": _install,
    "page": measure_page,
}


def main() -> int:
    """Run the parts that PARTS names; all by default."""
    results: dict[str, Any] = {}
    for name in chosen(PARTS):
        with tempfile.TemporaryDirectory(prefix="paceline-door-") as folder:
            try:
                results |= PARTS[name](Path(folder))
            except Unavailable as error:
                print(f"{name}: {error}")
    print(json.dumps({"bench": "front_door", "machine": machine(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
