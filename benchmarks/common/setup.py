"""What an engine to be measured is, and what setting one up takes."""

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

# a step of a set-up that takes longer than this is given up
STEP_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are and what every peer may use."""

    # environments, builds, converted models and logs; one folder a peer
    root: Path
    # the GGUF file all engines take their weights from
    model: Path
    # processors of this process
    cpus: tuple[int, ...]

    def folder(self, name: str) -> Path:
        """A peer's own folder, made if need be."""
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def hf_folder(self) -> Path:
        """The same weights as a Hugging Face folder, for engines that read nothing else."""
        return self.root / "models" / f"{self.model.stem}-bf16"


class Peer(Protocol):
    """One engine. ``variants`` are its choices of precision and tokens of a step; a row shows the
    best of them. ``served`` is what its server computes in, weights/KV cache."""

    name: str
    variants: tuple[str, ...]
    served: str

    def setup(self) -> None:
        """Make the environment, once; a second call finds it done. Raises Unavailable."""
        ...

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        """The process that answers ``jobs``. Where an engine caches prefixes unless told not to,
        both values give the same command."""
        ...

    def server(self, port: int) -> Command:
        """An OpenAI-compatible server on 127.0.0.1. Raises Unavailable where there is none."""
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
    """A virtual environment in ``folder`` with these packages; its interpreter.

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
    """pip's options for environments with torch: the index that TORCH_INDEX names, as in make."""
    index = os.environ.get("TORCH_INDEX")
    return ("--extra-index-url", index) if index else ()
