"""The core of another commit, to be imported beside the one of the working tree.

core imports the standard library and itself alone, and speculation these two, so copies under
another name are a core of their own: ``git archive COMMIT paceline/core paceline/speculation``,
unpacked, with both names rewritten in all of it. Before speculation was a room it lay in core.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.replay.observe import Core

ROOT = Path(__file__).parents[2]
# names the commit that the sample of ``make test`` is compared with
BASE = Path(__file__).with_name("BASE")

# folders of the commit, and the packages that they are unpacked as
_FOLDERS = {"paceline/core": "paceline_base", "paceline/speculation": "paceline_base_speculation"}


class NoBaseError(Exception):
    """git or the commit is not here, as in a source archive or a shallow clone."""


def unpack_core(commit: str, folder: Path) -> Core:
    """Unpack the core of ``commit`` in ``folder``, which has to outlive it, and make it importable.
    One commit for each process: they would have the same name.

    Raises:
        NoBaseError: git or the commit is not here.
    """
    if not (ROOT / ".git").exists():
        raise NoBaseError(f"{ROOT} is no git checkout: the core of {commit[:12]} cannot be had")
    try:
        top = _git("ls-tree", "--name-only", f"{commit}:paceline").decode().split()
        there = [name for name in _FOLDERS if Path(name).name in top]
        archive = _git("archive", "--format=tar", commit, *there)
    except FileNotFoundError:
        raise NoBaseError(
            f"git is not installed: the core of {commit[:12]} cannot be had"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise NoBaseError(
            f"the core of {commit[:12]} cannot be had: {said[-1] if said else 'git archive failed'}"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.name.endswith(".py") else None
            if source is not None:
                name, text = member.name, source.read().decode()
                for old, new in _FOLDERS.items():
                    name = name.replace(f"{old}/", f"{new}/")
                    text = re.sub(rf"\b{old.replace('/', '[.]')}\b", new, text)
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    sys.path.insert(0, str(folder))
    return Core(*_FOLDERS.values())


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def named_base() -> str:
    """The commit that ``BASE`` names."""
    return BASE.read_text().strip()
