"""Interface of the engines to measure, and the tools to set one up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.common.processes import Command, Unavailable

__all__ = ["Peer", "Places", "make_venv", "run_step", "torch_options"]

# seconds after which a step of a set-up is given up
STEP_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Places:
    """Folders, and the model and processors that every peer may use."""

    # environments, builds, converted models and logs; one folder per peer
    root: Path
    # the GGUF file with the weights for all engines
    model: Path
    # processors of this process
    cpus: tuple[int, ...]

    def folder(self, name: str) -> Path:
        """Return a peer's own folder; make it if it does not exist."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def hf_folder(self) -> Path:
        """Return the same weights as a Hugging Face folder, for engines that read only those."""
        return self.root / "models" / f"{self.model.stem}-bf16"


class Peer(Protocol):
    """One engine. ``variants`` are its choices of precision and tokens per step; a row shows the
    best of them. ``served`` is the formats of its server's weights/KV cache."""

    name: str
    variants: tuple[str, ...]
    served: str

    def setup(self) -> None:
        """Make the environment; a second call finds it done. Raises Unavailable."""
        ...

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        """Return the command of the process that answers ``jobs``. For an engine that caches
        prefixes by default, both values give the same command."""
        ...

    def server(self, port: int) -> Command:
        """Return the command of an OpenAI-compatible server. Raises Unavailable if it has none."""
        ...


def run_step(
    argv: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run one command of a set-up, its output appended to ``log``.

    Raises Unavailable with the command and the last lines of its output.
    """
    words = [str(word) for word in argv]
    print(f"  {' '.join(words)[:160]}", file=sys.stderr)
    with log.open("ab") as output:
        start = output.tell()
        try:
            code = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                timeout=STEP_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{words[0]} took longer than {STEP_SECONDS:.0f} s") from None
        except OSError as error:
            raise Unavailable(f"{words[0]}: {error}") from None
    if code:
        tail = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()[-3:]
        raise Unavailable(f"{' '.join(words)[:100]} ended with {code}: {' | '.join(tail)}")


def make_venv(folder: Path, packages: Sequence[str], *, options: Sequence[str] = ()) -> Path:
    """Make a virtual environment in ``folder`` with these packages, and return its interpreter.

    A stamp with the packages' names makes the second call free. Raises Unavailable.
    """
    python = folder / "venv" / "bin" / "python"
    stamp = folder / "venv" / ".packages"
    wanted = "\n".join([*packages, *options])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    log = folder / "setup.log"
    if not python.exists():
        run_step([sys.executable, "-m", "venv", folder / "venv"], log=log)
    run_step([python, "-m", "pip", "install", *options, *packages], log=log)
    stamp.write_text(wanted)
    return python


def torch_options() -> tuple[str, ...]:
    """Return pip's options for environments with torch: the index of TORCH_INDEX, as in make."""
    index = os.environ.get("TORCH_INDEX")
    return ("--extra-index-url", index) if index else ()
