"""Seconds from ``pip install`` of the built wheel to a first answer, and what is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY, Unavailable

__all__ = ["measure_install"]


def measure_install(_folder: Path) -> dict[str, Any]:
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
