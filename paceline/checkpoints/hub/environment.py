"""Folders of the hub's files and of the user's token, by the variables of Hugging Face's tools.

::

    HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub      models
    HF_TOKEN, else the file HF_TOKEN_PATH, else HF_HOME/token                the token
    HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE                                     nothing is fetched

Source: huggingface_hub's documentation of its environment variables. The package itself, which
comes with tokenizers, is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["CachedRepository", "cached_repositories", "hub_cache", "is_offline", "token"]

_TRUE: Final = ("1", "ON", "YES", "TRUE")


def _home() -> Path:
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "huggingface"


def hub_cache() -> Path:
    """Return the folder of the hub's models."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(own).expanduser() if own else _home() / "hub"


def is_offline() -> bool:
    """Tell whether the user asked for no requests to the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _TRUE for name in names)


def token() -> str | None:
    """Return the user's token; None without one."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if found := "".join(os.environ.get(name, "").split()):
            return found
    path = os.environ.get("HF_TOKEN_PATH")
    file = Path(path).expanduser() if path else _home() / "token"
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class CachedRepository(NamedTuple):
    """A repository of models in the cache."""

    # "org/name"
    name: str
    num_bytes: int
    # seconds since the epoch
    modified: float
    folder: Path


def cached_repositories() -> Iterator[CachedRepository]:
    """Yield those that have a file, in any order; links to blobs are counted once."""
    for folder in hub_cache().glob("models--*"):
        files = [path for path in folder.glob("blobs/*") if path.is_file()]
        # without links, where a system has none, the files are in the snapshots
        files += [p for p in folder.glob("snapshots/**/*") if p.is_file() and not p.is_symlink()]
        if files:
            stats = [path.stat() for path in files]
            yield CachedRepository(
                name=folder.name.removeprefix("models--").replace("--", "/"),
                num_bytes=sum(each.st_size for each in stats),
                modified=max(each.st_mtime for each in stats),
                folder=folder,
            )
