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
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from paceline.engine.blocks.store import Counts
from paceline.errors import ConfigError
from paceline.files import make_private_folder, private_opener

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


class _Segment:
    """One segment's files. Used under the store's lock."""

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path, self.used = path, 0
        self.hashes: set[bytes] = set()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if new else os.O_RDONLY
        self.data = private_opener(str(path), flags)
        try:
            self.index = private_opener(str(path.with_suffix(".idx")), flags)
        except BaseException:
            os.close(self.data)
            raise
        self.size = os.fstat(self.data).st_size

    def close(self) -> None:
        os.close(self.data)
        os.close(self.index)

    def delete(self) -> None:
        self.close()
        # rows without their bytes are ignored, so the order does not matter
        for path in (self.path, self.path.with_suffix(".idx")):
            path.unlink(missing_ok=True)


class _Place(NamedTuple):
    segment: _Segment
    offset: int
    checksum: int


class DiskStore:
    """A ``store.BlockStore``.

    Args:
        folder: made if it is missing; each fingerprint has a folder in it.
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
            self._held = private_opener(str(self._folder / "lock"), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"--kv-store {folder}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._fail(f"another process uses {self._folder}: give each its own folder")
            return
        self._others = {
            path: _bytes_of(path)
            for path in folder.iterdir()
            if path.is_dir() and path != self._folder
        }
        self._load()

    # ------------------------------------------------------------------ a BlockStore

    def find(self, hashes: Sequence[bytes]) -> int:
        places = self._places
        return next((i for i, each in enumerate(hashes) if each not in places), len(hashes))

    def read(self, hashes: Sequence[bytes], timeout: float) -> Iterator[bytes]:
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
        with self._lock:
            for index, block_hash in enumerate(hashes):
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
            for segment in self._segments:
                segment.close()
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
                assert segment.size == os.fstat(segment.data).st_size, segment.path
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
        for path in sorted(self._folder.glob("*.seg")):
            with contextlib.suppress(ValueError):
                self._next = max(self._next, int(path.stem) + 1)
            try:
                segment = _Segment(path, new=False)
            except OSError:
                # no index: nothing of it can be found
                path.unlink(missing_ok=True)
                continue
            if not self._load_segment(segment):
                segment.delete()
        self._count()

    def _load_segment(self, segment: _Segment) -> bool:
        """Enter a segment's whole blocks; return whether there are any."""
        if os.pread(segment.data, _HEAD.size, 0) != self._head():
            return False
        rows = os.pread(segment.index, os.fstat(segment.index).st_size, 0)
        whole = len(rows) - len(rows) % _ROW.size
        for block_hash, offset, checksum in _ROW.iter_unpack(rows[:whole]):
            if offset + self._block <= segment.size and block_hash not in self._places:
                self._places[block_hash] = _Place(segment, offset, checksum)
                segment.hashes.add(block_hash)
        if segment.hashes:
            self._segments.append(segment)
        return bool(segment.hashes)

    def _head(self) -> bytes:
        return _HEAD.pack(_MAGIC, self._fingerprint, self._block)

    def _read(self, hashes: Sequence[bytes]) -> bytes:
        found: list[bytes] = []
        for block_hash in hashes:
            place = self._places.get(block_hash)
            if place is None:
                break
            try:
                data = os.pread(place.segment.data, self._block, place.offset)
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
        whole = 0
        try:
            segment = self._writable()
            offset = whole = segment.size
            _append(segment.data, data)
            checksum = crc32(data, crc32(block_hash))
            _append(segment.index, _ROW.pack(block_hash, offset, checksum))
        except OSError as error:
            self._fail(f"{self._folder}: {error.strerror or error}")
            if self._open is not None:
                with contextlib.suppress(OSError):
                    # give back what part of a block took
                    os.ftruncate(self._open.data, whole)
                    self._open.size = whole
            return
        segment.size += self._block
        self._places[block_hash] = _Place(segment, offset, checksum)
        segment.hashes.add(block_hash)
        self.counts.written_bytes += self._block
        self.counts.num_bytes += self._block + _ROW.size

    def _writable(self) -> _Segment:
        """Return the segment to append a block to. Raises OSError."""
        segment = self._open
        if segment is not None and segment.size + self._block <= self._segment_bytes:
            return segment
        self._make_room()
        segment = _Segment(self._folder / f"{self._next:05d}.seg", new=True)
        self._next += 1
        self._segments.append(segment)
        self._open = segment
        segment.used = next(self._clock)
        _append(segment.data, self._head())
        segment.size = _HEAD.size
        return segment

    def _make_room(self) -> None:
        """Give up what was used least recently until one more segment fits."""
        rows = (self._segment_bytes // self._block + 1) * _ROW.size
        needed = self._segment_bytes + rows
        self._count()
        for other in sorted(self._others, key=_age):
            if self.counts.num_bytes + needed <= self._max:
                return
            if _delete_unused(other):
                del self._others[other]
                self._count()
        while self._segments and self.counts.num_bytes + needed > self._max:
            self._remove(min(self._segments, key=lambda each: each.used))
            self._count()
        if self.counts.num_bytes + needed > self._max:
            others = sum(self._others.values())
            raise OSError(f"folders of other models have {others} of {self._max} bytes")

    def _remove(self, segment: _Segment) -> None:
        for block_hash in segment.hashes:
            del self._places[block_hash]
        self._segments.remove(segment)
        if segment is self._open:
            self._open = None
        with contextlib.suppress(OSError):
            segment.delete()

    def _count(self) -> None:
        """Count the bytes of all folders."""
        own = sum(s.size + os.fstat(s.index).st_size for s in self._segments)
        self.counts.num_bytes = own + sum(self._others.values())

    def _fail(self, why: str) -> None:
        self.counts.failure = why
        self.counts.errors["disk"] += 1
        _log.warning("kv_store_off: %s; prompts are computed, and nothing is written", why)


def _append(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at the end of a file. Raises OSError."""
    place, view = os.lseek(fd, 0, os.SEEK_END), memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def _bytes_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def _age(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _delete_unused(folder: Path) -> bool:
    """Delete another fingerprint's folder unless a process holds it; return whether it is gone."""
    try:
        held = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        # not one of ours
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    finally:
        os.close(held)
