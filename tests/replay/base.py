"""The core of another commit, to be imported beside the one of the working tree.

core imports the standard library and itself alone, so a copy under another name is a core of its
own: ``git archive COMMIT paceline/core``, unpacked, with ``paceline.core`` rewritten in all of it.
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

_PACKAGE = "paceline_base"
_FOLDER = "paceline/core"


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
        archive = subprocess.run(
            ["git", "archive", "--format=tar", commit, _FOLDER],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
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
                path = folder / _PACKAGE / Path(member.name).relative_to(_FOLDER)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(re.sub(r"\bpaceline\.core\b", _PACKAGE, source.read().decode()))
    sys.path.insert(0, str(folder))
    return Core(_PACKAGE)


def named_base() -> str:
    """The commit that ``BASE`` names."""
    return BASE.read_text().strip()
