"""Files and folders that only their owner may read, with any umask.

Batches, recordings and outputs contain what people ask a model, and its answers; so files are
created with 0600, and folders with 0700. An existing file keeps its mode where its owner named it,
and is closed to other users where the name is ours (``tighten``).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

__all__ = ["FILE_MODE", "make_private_folder", "private_opener", "tighten", "write_private"]

FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_OTHERS: Final = 0o077


def private_opener(path: str, flags: int) -> int:
    """Open a file for ``open(opener=...)``; one that this creates is its owner's alone."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def write_private(path: Path, text: str) -> None:
    """Write a file of text in UTF-8, its owner's alone if it is new. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """Make the folder and its missing parents. Raises OSError."""
    # Path.mkdir would create parents with the umask's mode
    missing = [path, *path.parents]
    for folder in reversed([each for each in missing if not each.exists()]):
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def tighten(path: Path) -> None:
    """Remove other users' access to a file or folder. One that belongs to another user, such as a
    mounted volume's folder, stays as it is. Raises OSError."""
    mode = path.stat().st_mode
    if mode & _OTHERS:
        with contextlib.suppress(PermissionError):
            path.chmod(mode & ~_OTHERS & 0o7777)
