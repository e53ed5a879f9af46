"""``scripts/make-venv`` on machines that lack things, played by stubs on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "make-venv"

# A python that knows what the script asks. $state/venv-module stands for its venv module.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*3,\\ 11*) [ "{version}" != 3.9 ] ;;
*"import ensurepip"*) [ -e "{state}/venv-module" ] ;;
*print*) echo "{version}" ;;
-V) echo "Python {version}" ;;
"-m venv"*)
    mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "venv {version}" >> "{state}/log" ;;
*"pip --version"*) exit 0 ;;
*"pip install"*) echo "$*" >> "{state}/log" ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
APT = """#!/bin/sh
echo "apt-get $*" >> "{state}/log"
case "$*" in
*{package}*) {effect} ;;
esac
"""


class Machine:
    """A PATH with nothing on it but what a test puts there."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.bin = root / "bin"
        self.venv = root / "venv"
        for folder in (self.state, self.bin):
            folder.mkdir()
        for tool in ("env", "bash", "sh", "id", "mkdir", "cp", "touch"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)

    def add(self, name: str, text: str, **values: str) -> None:
        path = self.bin / name
        path.write_text(text.format(state=self.state, **values))
        path.chmod(0o755)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT)],
            capture_output=True,
            text=True,
            timeout=20,
            env={"PATH": str(self.bin), "VENV": str(self.venv)} | environment,
        )

    @property
    def log(self) -> list[str]:
        path = self.state / "log"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_takes_the_first_that_is_recent(machine: Machine) -> None:
    (machine.state / "venv-module").touch()
    machine.add("python3.12", PYTHON, version="3.12")
    machine.add("python3", PYTHON, version="3.9")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.log[0] == "venv 3.12"
    assert machine.log[1].endswith("--constraint constraints.txt --editable .[dev]")


def test_python_names_the_interpreter(machine: Machine) -> None:
    (machine.state / "venv-module").touch()
    machine.add("python3.11", PYTHON, version="3.11")
    machine.add("mine", PYTHON, version="3.14")
    assert machine.run(PYTHON="mine").returncode == 0
    assert machine.log[0] == "venv 3.14"


def test_torch_index_is_for_torch_alone(machine: Machine) -> None:
    (machine.state / "venv-module").touch()
    machine.add("python3", PYTHON, version="3.11")
    assert machine.run(TORCH_INDEX="https://index.example/cpu").returncode == 0
    torch, everything = machine.log[1:]
    assert torch.endswith("--index-url https://index.example/cpu torch")
    assert "index" not in everything


@pytest.mark.skipif(os.getuid() != 0, reason="only root installs packages without sudo")
def test_a_missing_venv_module_is_installed(machine: Machine) -> None:
    machine.add("python3.11", PYTHON, version="3.11")
    effect = f'touch "{machine.state}/venv-module"'
    machine.add("apt-get", APT, package="python3.11-venv", effect=effect)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.log[:2] == ["apt-get install -y -q python3.11-venv", "venv 3.11"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root installs packages without sudo")
def test_a_missing_python_is_installed(machine: Machine) -> None:
    machine.add("spare", PYTHON, version="3.11")
    effect = f'touch "{machine.state}/venv-module"; cp {machine.bin}/spare {machine.bin}/python3'
    machine.add("apt-get", APT, package="python3", effect=effect)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.log[:2] == ["apt-get install -y -q python3 python3-venv", "venv 3.11"]


@pytest.mark.parametrize("version", ["3.9", "3.11", None])
def test_what_is_missing_is_named_where_nothing_can_be_installed(
    machine: Machine, version: str | None
) -> None:
    if version is not None:
        machine.add("python3", PYTHON, version=version)
    done = machine.run()
    assert done.returncode == 1
    assert machine.log == []
    assert "Python 3.11 or later with its venv module" in done.stderr
    package = "python3.11-venv" if version == "3.11" else "python3 python3-venv"
    assert f"apt-get install {package}" in done.stderr


def test_pip_failure_says_what_to_do(machine: Machine) -> None:
    (machine.state / "venv-module").touch()
    failing = PYTHON.replace('*"pip install"*) echo "$*"', '*"pip install"*) exit 1; echo "$*"')
    machine.add("python3", failing, version="3.11")
    done = machine.run()
    assert done.returncode == 1
    assert "PIP_FIND_LINKS" in done.stderr


def test_a_folder_of_something_else_is_not_cleared(machine: Machine) -> None:
    (machine.state / "venv-module").touch()
    machine.add("python3", PYTHON, version="3.11")
    machine.venv.mkdir()
    (machine.venv / ".letters").mkdir()
    done = machine.run()
    assert done.returncode == 1
    assert machine.log == []
    assert "would delete what it holds" in done.stderr
    assert "(1 entries, .letters among them)" in done.stderr


@pytest.mark.parametrize("left", [None, "pyvenv.cfg"])
def test_an_empty_or_half_made_environment_is_made_anew(machine: Machine, left: str | None) -> None:
    (machine.state / "venv-module").touch()
    machine.add("python3", PYTHON, version="3.11")
    machine.venv.mkdir()
    if left is not None:
        (machine.venv / left).touch()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.log[0] == "venv 3.11"
