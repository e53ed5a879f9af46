"""A wheel as strangers install it: ``python -m tests.wheel dist/*.whl``.

An empty virtual environment gets the wheel and what it depends on, nothing else, and works in a
folder of its own. What it depends on is downloaded first. Printed: the sizes of the wheel and of
what was installed, by package, the seconds to install, to be ready and to answer, the processor's
seconds to install (which other work on the machine hardly changes), and the answer. Fails where the
environment has PyTorch, is larger than MOST_MB, where the server does not compute natively, or
where no tokens come. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import Any

READY = "paceline ready: "
# without PyTorch; what is byte-compiled counts
MOST_MB = 170


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--constraint", type=Path, default=None)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-wheel-") as folder:
        results = examine(args.wheel, args.constraint, args.model, Path(folder))
    sizes = results.pop("megabytes")
    print("\n".join(f"{name:24} {value:6.1f} MB" for name, value in sizes.items()))
    print("\n".join(f"{name:24} {value}" for name, value in results.items()))
    assert results["installed_mb"] <= MOST_MB, f"more than {MOST_MB} MB are installed"
    print(json.dumps({"test": "wheel", "results": results}))
    return 0


def examine(wheel: Path, constraint: Path | None, model: str, folder: Path) -> dict[str, Any]:
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    before = _megabytes(environment)
    pip, quiet = [python, "-m", "pip"], ["--quiet", "--disable-pip-version-check"]
    bounds = ["--constraint", constraint] if constraint else []
    wheels = folder / "wheels"
    subprocess.run(
        [*pip, "download", *quiet, *bounds, "--dest", wheels, wheel.resolve()],
        check=True, env=_bare(),
    )  # fmt: skip
    began, used = time.monotonic(), _children_s()
    subprocess.run(
        [*pip, "install", *quiet, "--no-index", "--find-links", wheels, wheel.resolve()],
        check=True, env=_bare(),
    )  # fmt: skip
    install_s, install_cpu_s = time.monotonic() - began, _children_s() - used
    code = "from importlib.util import find_spec; raise SystemExit(find_spec('torch') is not None)"
    subprocess.run([python, "-c", code], check=True)
    results: dict[str, Any] = {
        "wheel": wheel.name,
        "wheel_mb": round(wheel.stat().st_size / 1e6, 1),
        "installed_mb": round(_megabytes(environment) - before),
        "install_s": round(install_s, 1),
        "install_cpu_s": round(install_cpu_s, 1),
        "megabytes": _by_package(environment),
    }
    results |= _serve(environment / "bin" / "paceline", model, folder)
    seconds = install_s + results["ready_s"] + results["answer_s"]
    return results | {"install_to_answer_s": round(seconds, 1)}


def _bare() -> dict[str, str]:
    """Return an environment in which nothing of this checkout or interpreter is found."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _children_s() -> float:
    """Processor seconds of the processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _by_package(environment: Path) -> dict[str, float]:
    """Megabytes that each package lists as its files, the largest first."""
    (packages,) = environment.glob("lib/python*/site-packages")
    sizes: dict[str, float] = {}
    for record in packages.glob("*.dist-info/RECORD"):
        name = record.parent.name.partition("-")[0]
        with record.open(encoding="utf-8") as lines:
            paths = [packages / line[0] for line in csv.reader(lines)]
        sizes[name] = sum(path.stat().st_size for path in paths if path.is_file()) / 1e6
    sizes.pop("pip", None)
    sizes.pop("setuptools", None)
    return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*")) / 1e6


def _serve(program: Path, model: str, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    server = subprocess.Popen(
        [program, "serve", model, "--port", "0"],
        stdout=subprocess.PIPE, text=True, cwd=folder, env=_bare(),
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        ready_s = time.monotonic() - began
        assert line.startswith(READY) and "native" in line, f"not ready natively: {line!r}"
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{line.removeprefix(READY).split()[0]}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    finally:
        server.terminate()
        code = server.wait(30)
        server.stdout.close() if server.stdout else None
    assert answer["usage"]["completion_tokens"] == 8, answer
    assert code == 0, f"the server ended with {code}"
    return {
        "ready_s": round(ready_s, 2),
        "answer_s": round(time.monotonic() - began - ready_s, 2),
        "answer": answer["choices"][0]["text"],
    }


if __name__ == "__main__":
    sys.exit(main())
