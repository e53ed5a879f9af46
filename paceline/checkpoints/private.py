"""Files and folders that only their owner may read, whatever the umask is.

What people ask a model, and what it answers, is in batches, recordings and outputs; so whatever is
written here is made with 0600, and folders with 0700. A file that exists keeps its mode where its
owner named it, and loses what it grants to others where the name is ours (``tighten``).
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
    """The ``opener`` of ``open``: a file that it makes is its owner's alone."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def write_private(path: Path, text: str) -> None:
    """A file of text in UTF-8, its owner's alone if it is new. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """The folder, and those above it that are missing. Raises OSError."""
    # Path.mkdir makes parents with the umask's mode
    missing = [path, *path.parents]
    for folder in reversed([each for each in missing if not each.exists()]):
        folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def tighten(path: Path) -> None:
    """Nobody but its owner may use what is there from now on. What belongs to another user, such as
    a mounted volume's folder, stays as it is. Raises OSError."""
    mode = path.stat().st_mode
    if mode & _OTHERS:
        with contextlib.suppress(PermissionError):
            path.chmod(mode & ~_OTHERS & 0o7777)
