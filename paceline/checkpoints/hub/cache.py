"""Hugging Face's cache folder in huggingface_hub's layout, with a note of checked files.

::

    <cache>/models--<org>--<repo>/
        blobs/<digest>                 a file's bytes, complete and checked
        blobs/<digest>.incomplete      its first bytes, while it is fetched
        snapshots/<commit>/<name>      link to its blob
        refs/main                      the commit
        .paceline/<what>.json          name asked for, files and their sizes

So other programs find files fetched here, and files that they fetched are found here. Files are
created with the umask, as theirs are, since a cache may be shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from paceline.checkpoints.hub.environment import hub_cache
from paceline.checkpoints.hub.names import HubReference, Selection
from paceline.checkpoints.hub.pip_models import Progress, locked, silent
from paceline.checkpoints.model.json_file import read_json_object
from paceline.errors import CheckpointError

__all__ = ["HubCache", "HubFile"]

_CHUNK: Final = 1 << 20
# bytes left free on the disk
_SPARE: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    name: str
    size: int
    # kind of digest: "sha256", or git's of a blob (SHA-1 with a header) for small files
    algorithm: Literal["sha256", "git"]
    digest: str


@dataclass(slots=True)
class HubCache:
    """One repository's folder. ``missing`` and ``keep`` raise OSError; both need ``locked``."""

    folder: Path
    _progress: Progress = silent
    # bytes of this pull that are complete, and total
    _done: int = 0
    _total: int = 0

    @staticmethod
    def of(repo: str) -> HubCache:
        return HubCache(hub_cache() / f"models--{repo.replace('/', '--')}")

    def checked(self, what: str) -> tuple[Path, Selection] | None:
        """Return the model that ``keep`` noted for ``what``, if all its files still exist."""
        try:
            note = read_json_object(self._note(what))
            if note is None:
                return None
            snapshot = self.folder / "snapshots" / note["commit"]
            files: dict[str, int] = note["files"]
            if any((snapshot / name).stat().st_size != size for name, size in files.items()):
                return None
            selection = Selection(note["kind"], note["entry"], tuple(files))
        except (OSError, KeyError, TypeError, AttributeError, CheckpointError):
            return None
        return snapshot / selection.entry, selection

    def snapshot(self, revision: str = "main") -> tuple[Path | None, list[str]]:
        """Return the folder that a revision names, and the names of its files."""
        try:
            commit = (self.folder / "refs" / revision).read_text().strip()
        except OSError:
            # a commit names its folder itself
            commit = revision
        snapshot = self.folder / "snapshots" / commit
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*")
                 if path.is_file()]  # fmt: skip
        return (snapshot, names) if names else (None, [])

    @contextmanager
    def locked(self, progress: Progress | None) -> Iterator[None]:
        """Exclude other pulls of the same repository."""
        self._progress = progress or silent
        (self.folder / ".paceline").mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".paceline" / "lock", self._progress):
            yield

    def missing(self, files: Sequence[HubFile]) -> Iterator[tuple[HubFile, IO[bytes]]]:
        """Yield missing files, small ones first, each with its partial copy. The caller completes
        it before it asks for the next one; then it is checked.

        Raises CheckpointError for a file that does not match its digest, which is removed, and
        where there is no room.
        """
        blobs = self.folder / "blobs"
        blobs.mkdir(exist_ok=True)
        absent = {
            file.digest: file
            for file in sorted(files, key=lambda file: file.size)
            if not _is_complete(blobs / file.digest, file)
        }
        self._done, self._total = 0, sum(file.size for file in absent.values())
        self._check_room(absent)
        for file in absent.values():
            part = blobs / f"{file.digest}.incomplete"
            with part.open("ab") as handle:
                yield file, handle
                handle.flush()
                os.fsync(handle.fileno())
            self._progress("checking", self._done, self._total)
            if (found := _digest(part, file)) != file.digest:
                part.unlink()
                raise CheckpointError(
                    f"{file.name} is not the file it should be: its digest is {found}, the hub "
                    f"says {file.digest}. It was removed; try again, or a mirror (HF_ENDPOINT)"
                )
            part.replace(blobs / file.digest)
            self._done += file.size

    def report(self, part: IO[bytes]) -> None:
        """Report progress of the file that ``missing`` yielded last."""
        self._progress("downloading", self._done + part.tell(), self._total)

    def keep(
        self, reference: HubReference, commit: str, selection: Selection, files: Sequence[HubFile]
    ) -> Path:
        """Link the files under their names, note them, and return the path to open."""
        snapshot = self.folder / "snapshots" / commit
        for file in files:
            link = snapshot / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            blob = os.path.relpath(self.folder / "blobs" / file.digest, link.parent)
            if not link.is_symlink() or os.readlink(link) != blob:
                link.unlink(missing_ok=True)
                link.symlink_to(blob)
        note = {
            "commit": commit,
            "kind": selection.kind,
            "entry": selection.entry,
            "files": {file.name: file.size for file in files},
            "digests": {file.name: file.digest for file in files},
        }
        _write(self.folder / "refs" / reference.revision, commit)
        _write(self._note(reference.within), json.dumps(note, indent=1))
        return snapshot / selection.entry

    def _note(self, what: str) -> Path:
        return self.folder / ".paceline" / f"{urllib.parse.quote(what or 'main', safe='')}.json"

    def _check_room(self, absent: dict[str, HubFile]) -> None:
        blobs = self.folder / "blobs"
        begun = sum(
            part.stat().st_size
            for digest in absent
            if (part := blobs / f"{digest}.incomplete").exists()
        )
        free, needed = shutil.disk_usage(blobs).free, self._total - begun
        if needed + _SPARE > free:
            raise CheckpointError(
                f"{self.folder} has room for {free / 1e6:.0f} MB, and {needed / 1e6:.0f} MB are to "
                "come: set HF_HUB_CACHE to a folder with more, or remove models (paceline rm)"
            )


def _is_complete(path: Path, file: HubFile) -> bool:
    """Whether a blob has the file's size: blobs are named only after they were checked."""
    try:
        return path.stat().st_size == file.size
    except OSError:
        return False


def _digest(path: Path, file: HubFile) -> str:
    digest: Any = hashlib.sha256()
    if file.algorithm == "git":
        # not for security: git identifies objects by it
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return str(digest.hexdigest())


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
