"""Copies of packed weights on disk, from which a model starts without packing them again.

A copy is a file ``<key>.packed``: a header with the sizes of its pieces, the pieces, and the
header's digest at the end. It is written under another name, flushed to disk and then renamed, so
the remains of a crash or a full disk are never taken for a copy. A copy with another size, header
or end than this model needs is not read either. The bytes themselves are trusted: hashing them
would take as long as packing does.

A copy in progress is a ``.part`` of its final size, locked by its writer. So every process counts
it from the start, and a part whose lock is free was left behind by a process that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Final

from paceline.checkpoints.gguf.shards import gguf_files

__all__ = ["PackedCopies", "fingerprint"]

_log = logging.getLogger(__name__)

_MAGIC: Final = b"paceline packed 1"
_SUFFIX: Final = ".packed"
# four bits that were made of a model in 16, which count like copies
_FEW_BITS: Final = ".q4.gguf"
# the folder of layers that are done of them, which ``paceline quantize`` locks while it runs, and
# the file until it is whole
_PARTS: Final = ".parts"
_UNFINISHED: Final = ".partial"
_PARTIAL: Final = ".part"
# bytes per write call
_CHUNK: Final = 64 << 20
# bytes per sample of a file for its fingerprint: both ends, and samples between
_ENDS: Final = 1 << 20
_PLACES: Final = 64
_PLACE: Final = 1 << 14
# seconds after which a part must be locked, since it is locked right after it is made
_NEW_S: Final = 10.0
# seconds without a write after which a part counts as abandoned, without locks
_ABANDONED_S: Final = 3600.0


def fingerprint(path: Path) -> str:
    """Return a digest of a model's files: their names, sizes and times of change, and about two
    megabytes of each. Hashing them whole would take longer than packing."""
    if path.is_dir():
        files: Iterable[Path] = sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    else:
        files = gguf_files(path)
    digest = hashlib.sha256()
    for file in files:
        about = file.stat()
        digest.update(json.dumps([file.name, about.st_size, about.st_mtime_ns]).encode())
        with file.open("rb") as data:
            digest.update(data.read(_ENDS))
            for place in range(_PLACES):
                data.seek(about.st_size * place // _PLACES)
                digest.update(data.read(_PLACE))
            data.seek(max(0, about.st_size - _ENDS))
            digest.update(data.read(_ENDS))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class PackedCopies:
    """Copies in a folder, at most ``max_bytes`` in total: the least recently used go first.

    Several processes may share the folder. No method raises for errors of the disk: a copy that
    cannot be read or written is logged, and the model is packed without it.
    """

    folder: Path
    max_bytes: int
    # digest of the model's files, see ``fingerprint``
    source: str

    def read(self, about: Mapping[str, object], pieces: Sequence[memoryview]) -> bool:
        """Fill ``pieces`` from the copy of this model, if there is one.

        Args:
            about: everything except the model's files that the bytes depend on; JSON.
            pieces: writable; changed only if True is returned or reading fails halfway.
        """
        path, header = self._path(about), self._header(about, pieces)
        trailer = hashlib.sha256(header).digest()
        began = time.monotonic()
        try:
            with path.open("rb", buffering=0) as file:
                wanted = len(header) + sum(map(len, pieces)) + len(trailer)
                found = os.fstat(file.fileno()).st_size
                end = os.pread(file.fileno(), len(trailer), max(0, found - len(trailer)))
                if found != wanted or end != trailer or file.read(len(header)) != header:
                    _log.warning("packed_copy=%s refused: %d bytes, not a whole copy", path, found)
                    return False
                for piece in pieces:
                    _fill(file.fileno(), piece)
            # the time of change records the last use, where this process may set it
            with contextlib.suppress(OSError):
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            _log.warning("packed_copy=%s not read: %s", path, error.strerror)
            return False
        _log.info(
            "packed_copy=%s read: %d MiB in %.2f s", path, wanted >> 20, time.monotonic() - began
        )
        return True

    def write(self, about: Mapping[str, object], pieces: Sequence[memoryview]) -> None:
        """Write a copy of this model, and remove others until all fit."""
        path, header = self._path(about), self._header(about, pieces)
        size = len(header) + sum(map(len, pieces)) + hashlib.sha256().digest_size
        if size > self.max_bytes:
            _log.warning(
                "packed_copy=none: %d MiB are more than the %d MiB of --packed-cache",
                size >> 20, self.max_bytes >> 20,
            )  # fmt: skip
            return
        # random, since processes in containers that share the folder may have equal ids
        partial = path.with_name(f".{path.name}.{token_hex(8)}{_PARTIAL}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with self._reserve(partial, path, size) as file:
                    for piece in (memoryview(header), *pieces):
                        for at in range(0, len(piece), _CHUNK):
                            _put(file.fileno(), piece[at : at + _CHUNK])
                    _put(file.fileno(), memoryview(hashlib.sha256(header).digest()))
                    os.fsync(file.fileno())
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("packed_copy=%s not written: %s", path, error.strerror)
            return
        _log.info("packed_copy=%s written: %d MiB", path, size >> 20)

    def few_bits(self, version: int) -> Path:
        """Return where a model's four bits are kept, once a version of what makes them has."""
        return self.folder / f"{self._key({'few_bits': version})}{_FEW_BITS}"

    def make_room(self, size: int, path: Path) -> str:
        """Make the folder, remove copies until ``size`` at ``path``, see ``few_bits``, fits next to
        the others, and return why it does not; empty: it does."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                self._make_room(size, path)
        except OSError as error:
            return f"{self.folder} has no room for four bits: {error.strerror}"
        return ""

    def _reserve(self, partial: Path, path: Path, size: int) -> FileIO:
        """Make room, and create a part of ``size``. Raises OSError where there is no room."""
        with _locked(self.folder):
            self._make_room(size, path)
            file = partial.open("xb", buffering=0)
            try:
                # on file systems without locks the part's age decides instead
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(file.fileno(), size)
            except BaseException:
                file.close()
                raise
        return file

    def _make_room(self, size: int, path: Path) -> None:
        """Remove abandoned parts, and copies until ``size`` fits next to what others are writing.
        Raises OSError where it does not fit without any copy."""
        taken = 0
        for part in self.folder.glob(f".*{_PARTIAL}"):
            with contextlib.suppress(FileNotFoundError):
                if _is_abandoned(part):
                    part.unlink()
                else:
                    taken += part.stat().st_size
        others: list[tuple[float, int, Path]] = []
        for folder in self.folder.glob(f"*{_FEW_BITS}{_PARTS}"):
            # those of the file that is about to be made are part of its size
            if folder == path.with_name(f"{path.name}{_PARTS}"):
                continue
            with contextlib.suppress(FileNotFoundError):
                of_parts = sum(file.stat().st_size for file in folder.iterdir())
                if _is_abandoned(folder):
                    others.append((folder.stat().st_mtime, of_parts, folder))
                else:
                    taken += of_parts
        if taken + size > self.max_bytes:
            text = (
                f"{size >> 20} MiB do not fit beside {taken >> 20} MiB that other processes are "
                f"writing into the {self.max_bytes >> 20} MiB of --packed-cache"
            )
            raise OSError(errno.EDQUOT, text)
        kept = (*self.folder.glob(f"*{_SUFFIX}"), *self.folder.glob(f"*{_FEW_BITS}"))
        for file in kept:
            with contextlib.suppress(FileNotFoundError):
                # the copy that is about to be replaced takes no room
                if file != path:
                    about = file.stat()
                    others.append((about.st_mtime, about.st_size, file))
        taken += sum(of_file for _, of_file, _ in others)
        for _, of_file, file in sorted(others):
            if taken + size <= self.max_bytes:
                return
            _remove(file)
            taken -= of_file
            _log.info("packed_copy=%s removed: used longest ago", file)

    def _path(self, about: Mapping[str, object]) -> Path:
        return self.folder / f"{self._key(about)}{_SUFFIX}"

    def _key(self, about: Mapping[str, object]) -> str:
        text = json.dumps({"source": self.source, **about}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    def _header(self, about: Mapping[str, object], pieces: Sequence[memoryview]) -> bytes:
        sizes = json.dumps([self._key(about), *map(len, pieces)])
        return _MAGIC + len(sizes).to_bytes(8, "little") + sizes.encode()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from making room in the folder, where its file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_abandoned(part: Path) -> bool:
    """Return whether its writer has ended.

    Raises FileNotFoundError where the part no longer exists.
    """
    age = time.time() - part.stat().st_mtime
    if age < _NEW_S:
        return False
    try:
        handle = os.open(part, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(handle)
    except FileNotFoundError:
        raise
    except BlockingIOError:
        return False
    except OSError:
        return age > _ABANDONED_S
    return True


def _remove(path: Path) -> None:
    """Remove a copy, or a folder of parts with the file that was not finished."""
    if path.suffix == _PARTS:
        path.with_suffix(_UNFINISHED).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fill(file: int, piece: memoryview) -> None:
    while len(piece):
        count = os.readv(file, [piece])
        if not count:
            raise OSError(errno.EIO, "it became shorter while it was read")
        piece = piece[count:]


def _put(file: int, piece: memoryview) -> None:
    while len(piece):
        piece = piece[os.write(file, piece) :]
