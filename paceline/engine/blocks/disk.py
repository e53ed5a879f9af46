"""KV blocks on disk: segments that are only appended to, and deleted whole.

::

    DIR/FINGERPRINT/lock        held by the one process that uses this folder
                    00007.seg   head of 64 bytes, then blocks as they lie in memory
                    00007.idx   a row for each: hash 32, offset 8, crc32 4

A block's row follows its bytes, so a process that is killed in the middle leaves bytes without a
row, or part of a row; both are ignored at the next start, which begins a new segment. The checksum
covers hash and bytes, and is checked with every read: nothing has to reach the disk in order.

Errors of the disk end writing for the life of the process, and never the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from paceline.engine.blocks.store import Counts
from paceline.errors import ConfigError
from paceline.files import make_private_folder, private_opener, tighten

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)

# magic, fingerprint, bytes of a block
_HEAD: Final = Struct("<8s32sQ16x")
_ROW: Final = Struct("<32sQI")
_MAGIC: Final = b"PLKV0001"
_SEGMENT: Final = 64 << 20
# fewest segments of a store, so that giving one up does not empty it
_FEWEST: Final = 8
# bytes of one piece of a read
_PIECE: Final = 4 << 20
# name of a fingerprint's folder
_NAME: Final = re.compile("[0-9a-f]{32}")


class _Segment:
    """One segment's files, open only while they are used: a large store has thousands. Used under
    the store's lock; all but ``delete`` raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.index = path, path.with_suffix(".idx")
        # clock of its last use, and bytes of both files
        self.used = self.size = self.index_size = 0
        self.hashes: set[bytes] = set()

    def begin(self, head: bytes) -> None:
        """Make the files."""
        for path in (self.path, self.index):
            os.close(private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self.size = _write_at(self.path, head, 0)

    def load(self, head: bytes) -> bytes:
        """Return the index's whole rows; none of a segment that begins otherwise."""
        self.size, self.index_size = self.path.stat().st_size, self.index.stat().st_size
        if self.read(0, len(head)) != head:
            return b""
        rows = self.index.read_bytes()
        return rows[: len(rows) - len(rows) % _ROW.size]

    def read(self, offset: int, count: int) -> bytes:
        file = private_opener(str(self.path), os.O_RDONLY)
        try:
            return os.pread(file, count, offset)
        finally:
            os.close(file)

    def append(self, block_hash: bytes, data: memoryview) -> _Place:
        """Append a block, or nothing."""
        place = _Place(self, self.size, crc32(data, crc32(block_hash)))
        try:
            end = _write_at(self.path, data, self.size)
            row = _ROW.pack(block_hash, place.offset, place.checksum)
            self.index_size = _write_at(self.index, row, self.index_size)
        except OSError:
            with contextlib.suppress(OSError):
                # give back what part of a block took
                os.truncate(self.path, self.size)
            raise
        self.size = end
        return place

    def delete(self) -> None:
        # rows without their bytes are ignored, so the order does not matter
        for path in (self.path, self.index):
            with contextlib.suppress(OSError):
                path.unlink()


class _Place(NamedTuple):
    segment: _Segment
    offset: int
    checksum: int


class DiskStore:
    """A ``store.BlockStore``.

    Args:
        folder: made if it is missing; each fingerprint has a folder in it. What else is in it is
            left alone.
        max_bytes: most bytes of all folders; those of other fingerprints go first, then the
            segments that were read least recently.

    Raises:
        ConfigError: the folder cannot be written, or the size is not that of a block. A folder that
            another process holds is no error: nothing is read or written then.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int, max_bytes: int) -> None:
        self.counts = Counts()
        self._fingerprint, self._block = fingerprint, block_bytes
        least = _HEAD.size + block_bytes
        if max_bytes < _FEWEST * least:
            raise ConfigError(
                f"--kv-store-size {max_bytes} is too small: at least {_FEWEST * least} bytes, "
                f"{_FEWEST} blocks of {block_bytes}"
            )
        self._max = max_bytes
        self._segment_bytes = max(least, min(_SEGMENT, max_bytes // _FEWEST))
        self._folder = folder / fingerprint.hex()[:32]
        self._lock = threading.Lock()
        self._places: dict[bytes, _Place] = {}
        self._segments: list[_Segment] = []
        self._open: _Segment | None = None
        self._clock = itertools.count(1)
        self._next = 0
        # bytes of other fingerprints' folders
        self._others: dict[Path, int] = {}
        try:
            make_private_folder(self._folder)
            tighten(self._folder)
            self._held = private_opener(str(self._folder / "lock"), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"--kv-store {folder}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._fail(f"another process uses {self._folder}: give each its own folder")
            return
        try:
            self._load()
        except OSError as error:
            self._fail(f"{self._folder}: {error.strerror or error}")

    # ------------------------------------------------------------------ a BlockStore

    def find(self, hashes: Sequence[bytes]) -> int:
        places = self._places
        return next((i for i, each in enumerate(hashes) if each not in places), len(hashes))

    def read(self, hashes: Sequence[bytes], left: Callable[[], float]) -> Iterator[bytes]:
        count = max(1, _PIECE // self._block)
        for first in range(0, len(hashes), count):
            wanted = hashes[first : first + count]
            with self._lock:
                piece = self._read(wanted)
            self.counts.read_bytes += len(piece)
            if piece:
                yield piece
            if len(piece) < len(wanted) * self._block:
                return

    def write(self, hashes: Sequence[bytes], data: bytes) -> None:
        size, view = self._block, memoryview(data)
        for index, block_hash in enumerate(hashes):
            # for each block, so that a reader does not wait for all
            with self._lock:
                if self.counts.failure:
                    return
                if block_hash not in self._places:
                    self._write(block_hash, view[index * size : (index + 1) * size])

    def drop(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            for block_hash in hashes:
                if (place := self._places.get(block_hash)) is not None:
                    # the whole segment, so that no restart finds the block again
                    self._remove(place.segment)

    def close(self) -> None:
        with self._lock:
            self._segments.clear()
            self._places.clear()
            self._open = None
            if self._held >= 0:
                os.close(self._held)
                self._held = -1
            self.counts.failure = self.counts.failure or "closed"

    def check_integrity(self) -> None:
        """Raise AssertionError unless index, segments and sizes agree."""
        with self._lock:
            for segment in self._segments:
                assert segment.size == segment.path.stat().st_size, segment.path
                for block_hash in segment.hashes:
                    assert self._places[block_hash].segment is segment, segment.path
            listed = sum(len(segment.hashes) for segment in self._segments)
            assert listed == len(self._places), f"{len(self._places)} blocks, {listed} listed"
            spans = sorted((id(p.segment), p.offset) for p in self._places.values())
            assert len(set(spans)) == len(spans), "two blocks in one place"
            self._count()
            assert self.counts.num_bytes <= self._max, f"{self.counts.num_bytes} of {self._max}"

    # ------------------------------------------------------------------ under the lock

    def _load(self) -> None:
        numbered = [(int(p.stem), p) for p in self._folder.glob("*.seg") if p.stem.isdecimal()]
        for number, path in sorted(numbered):
            self._next = number + 1
            segment = _Segment(path)
            try:
                rows = segment.load(self._head())
            except FileNotFoundError:
                # no index: nothing of it can be found
                rows = b""
            for block_hash, offset, checksum in _ROW.iter_unpack(rows):
                if offset + self._block > segment.size:
                    continue
                if (older := self._places.get(block_hash)) is not None:
                    # it was written again since that one is broken
                    older.segment.hashes.discard(block_hash)
                self._places[block_hash] = _Place(segment, offset, checksum)
                segment.hashes.add(block_hash)
            if segment.hashes:
                self._segments.append(segment)
            else:
                segment.delete()
        self._count()

    def _head(self) -> bytes:
        return _HEAD.pack(_MAGIC, self._fingerprint, self._block)

    def _read(self, hashes: Sequence[bytes]) -> bytes:
        found: list[bytes] = []
        for block_hash in hashes:
            place = self._places.get(block_hash)
            if place is None:
                break
            try:
                data = place.segment.read(place.offset, self._block)
            except OSError as error:
                data, kind = b"", "disk"
                _log.warning("kv_store_read path=%s error=%s", place.segment.path, error)
            else:
                kind = "checksum"
            if len(data) < self._block or crc32(data, crc32(block_hash)) != place.checksum:
                self.counts.errors[kind] += 1
                del self._places[block_hash]
                place.segment.hashes.discard(block_hash)
                break
            place.segment.used = next(self._clock)
            found.append(data)
        return b"".join(found)

    def _write(self, block_hash: bytes, data: memoryview) -> None:
        try:
            segment = self._writable()
            self._places[block_hash] = segment.append(block_hash, data)
        except OSError as error:
            self._fail(f"{self._folder}: {error.strerror or error}")
            return
        segment.hashes.add(block_hash)
        self.counts.written_bytes += self._block
        self.counts.num_bytes += self._block + _ROW.size

    def _writable(self) -> _Segment:
        """Return the segment to append a block to. Raises OSError."""
        segment = self._open
        if segment is not None and segment.size + self._block <= self._segment_bytes:
            return segment
        self._make_room()
        segment = _Segment(self._folder / f"{self._next:05d}.seg")
        self._next += 1
        try:
            segment.begin(self._head())
        except OSError:
            segment.delete()
            raise
        self._segments.append(segment)
        self._open = segment
        segment.used = next(self._clock)
        self.counts.num_bytes += segment.size
        return segment

    def _make_room(self) -> None:
        """Give up what was used least recently until one more segment fits."""
        rows = (self._segment_bytes // self._block + 1) * _ROW.size
        needed = self._segment_bytes + rows
        self._count()
        for other in sorted(self._others, key=_age):
            if self.counts.num_bytes + needed <= self._max:
                return
            _delete_unused(other)
            self._count()
        others = sum(self._others.values())
        if others + needed > self._max:
            raise OSError(f"folders of other models have {others} of {self._max} bytes")
        while self.counts.num_bytes + needed > self._max:
            self._remove(min(self._segments, key=lambda each: each.used))

    def _remove(self, segment: _Segment) -> None:
        for block_hash in segment.hashes:
            del self._places[block_hash]
        self._segments.remove(segment)
        if segment is self._open:
            self._open = None
        segment.delete()
        self.counts.num_bytes -= segment.size + segment.index_size

    def _count(self) -> None:
        """Count the bytes of all folders; processes with other models may write to theirs."""
        self._others = {
            path: _bytes_of(path)
            for path in self._folder.parent.iterdir()
            if _NAME.fullmatch(path.name) and path != self._folder and not path.is_symlink()
        }
        own = sum(segment.size + segment.index_size for segment in self._segments)
        self.counts.num_bytes = own + sum(self._others.values())

    def _fail(self, why: str) -> None:
        self.counts.failure = why
        self.counts.errors["disk"] += 1
        _log.warning("kv_store_off: %s; prompts are computed, and nothing is written", why)


def _write_at(path: Path, data: bytes | memoryview, place: int) -> int:
    """Write all of ``data`` to a file from ``place`` on; return where it ends. Raises OSError."""
    view, file = memoryview(data), private_opener(str(path), os.O_WRONLY)
    try:
        while len(view):
            written = os.pwrite(file, view, place)
            view, place = view[written:], place + written
    finally:
        os.close(file)
    return place


def _bytes_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _age(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _delete_unused(folder: Path) -> None:
    """Delete another fingerprint's folder unless a process holds it."""
    try:
        held = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # not one of ours
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # only what a store makes, whatever else lies there
        for file in (*folder.glob("*.seg"), *folder.glob("*.idx"), folder / "lock"):
            file.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return
    finally:
        os.close(held)
