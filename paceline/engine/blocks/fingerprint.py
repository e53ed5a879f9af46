"""The fingerprint of what a KV block's bytes depend on, besides its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from paceline.files import write_private

__all__ = ["file_digests", "fingerprint"]

_DIGESTS: Final = "digests.json"


def fingerprint(digests: Iterable[str], about: Mapping[str, object]) -> bytes:
    """Return 32 bytes that are equal only for equal model files and equal ``about``, which is JSON:
    formats, block size, and what the backend's ``block_layout`` says."""
    text = json.dumps({"files": list(digests), **about}, sort_keys=True)
    return hashlib.sha256(b"paceline-blocks" + text.encode()).digest()


def file_digests(files: Iterable[Path], folder: Path | None) -> list[str]:
    """Return the SHA-256 of each file. Whole files are read, since equal fingerprints of unequal
    models would mix their caches; so digests are kept in ``folder``, if there is one, until size or
    time of change differ. Raises OSError where a model's file cannot be read."""
    kept: dict[str, str] = {}
    store = None if folder is None else folder / _DIGESTS
    if store is not None:
        try:
            found = json.loads(store.read_bytes())
            kept = {k: v for k, v in found.items() if isinstance(v, str)}
        except (OSError, ValueError, AttributeError):
            kept = {}
    digests, known = [], {}
    for file in files:
        about = file.stat()
        name = json.dumps([str(file.resolve()), about.st_size, about.st_mtime_ns, about.st_ino])
        digest = kept.get(name)
        if digest is None:
            with file.open("rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
        known[name] = digest
        digests.append(digest)
    if store is not None and known.items() - kept.items():
        try:
            write_private(store, json.dumps(kept | known))
        except OSError:
            # they are computed again next time
            return digests
    return digests
