"""Files and batches on disk: records in SQLite, contents in plain files.

::

    FOLDER/lock            held by the one server that uses the folder
           store.sqlite3   files, batches, and answers that are not in a file yet
           files/ID        contents; ID.part while they are written

A line's answer is one row under (batch, line), so it exists once or not at all, whenever the
process or the machine stops. Contents are written and synced under another name before a row refers
to them; contents without a row are removed when the folder is opened. Output files are made of the
rows when the batch ends; the transaction that names the files deletes the rows.

All calls are synchronous, from one thread at a time. This module does not know the event loop,
HTTP, the engine or the clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Final

from paceline.errors import ConfigError
from paceline.files import tighten
from paceline.http.errors import HttpError
from paceline.server.batches.database import (
    BATCH_COLUMNS,
    FILE_COLUMNS,
    Contents,
    Database,
    Part,
    StorageError,
    as_storage_errors,
)
from paceline.server.batches.records import UNFINISHED, Batch, Result, StoredFile

__all__ = ["BatchStore"]

# maximum batches per owner: unfinished ones, and ended ones that are kept
_MAX_UNFINISHED: Final = 256
_MAX_ENDED: Final = 10_000
# in SQL
_UNFINISHED: Final = str(UNFINISHED)


class BatchStore:
    """The folder of one server.

    Args:
        folder: created if absent.
        max_bytes: limit of all contents together, including answers of unfinished batches.

    Raises:
        ConfigError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # bytes of unfinished uploads
        self._uploading = 0
        try:
            self._contents = Contents(folder / "files")
            # an earlier version may have created it readable by others
            tighten(folder)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the batch folder {folder}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = Database(folder / "store.sqlite3")
            try:
                known = {row["id"] for row in self._db.execute("SELECT id FROM files")}
                self._contents.remove_strays(known)
            except BaseException:
                self._db.close()
                raise
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"the batch folder {folder} is used by another server") from None
        except (OSError, sqlite3.Error, ConfigError) as error:
            os.close(self._lock)
            raise ConfigError(f"the batch folder {folder}: {error}") from error

    def interrupt(self) -> None:
        """Make the running query fail soon. Callable from any thread."""
        self._db.interrupt()

    def close(self) -> None:
        """Release the folder. The store cannot be used afterwards."""
        self._db.close()
        os.close(self._lock)

    # ------------------------------------------------------------------ files

    def begin_upload(self) -> Part:
        """Return a new file for ``write``, ended by ``keep`` or ``drop``. Raises StorageError."""
        return self._contents.begin(f"file-{token_hex(16)}")

    def write(self, part: Part, data: bytes) -> None:
        """Append to an upload. Raises HttpError 413 when the space is used up, StorageError."""
        self._check_room(len(data), 413)
        part.write(data)
        self._uploading += len(data)

    def drop(self, part: Part) -> None:
        """Discard an upload."""
        self._uploading -= part.size
        part.drop()

    def keep(self, part: Part, *, owner: str, filename: str, now: float) -> StoredFile:
        """Keep a complete upload; the caller must drop it if this raises StorageError."""
        part.keep()
        file = StoredFile(
            id=part.id,
            owner=owner,
            filename=filename,
            purpose="batch",
            size=part.size,
            created_at=int(now),
        )
        try:
            with self._db.transaction():
                self._insert(file)
        except BaseException:
            self._remove_unknown(part.id)
            raise
        self._uploading -= part.size
        return file

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Return a file. Raises HttpError 404 unless it exists and is this owner's."""
        row = self._db.row(
            f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND owner = ?", file_id, owner
        )
        if row is None:
            raise HttpError(404, f"no file with id {file_id[:80]!r} is stored here")
        return StoredFile(**row)

    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of an owner's files, and whether there are more."""
        rows, more = self._db.page(
            FILE_COLUMNS,
            "files",
            owner,
            after,
            limit,
            newest_first,
            None if purpose is None else ("AND purpose = ?", purpose),
        )
        return [StoredFile(**row) for row in rows], more

    def open_file(self, file_id: str, owner: str) -> tuple[StoredFile, BinaryIO]:
        """Open a file, which may be deleted while open. Raises HttpError like ``file``."""
        found = self.file(file_id, owner)
        return found, self._contents.open(found.id)

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete a file. Raises HttpError 404 like ``file``, 409 while a batch needs it."""
        found = self.file(file_id, owner)
        row = self._db.row(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {_UNFINISHED} LIMIT 1",
            found.id,
        )
        if row is not None:
            raise HttpError(409, f"batch {row['id']} has not ended and needs this file")
        with self._db.transaction():
            self._db.execute("DELETE FROM files WHERE id = ?", (found.id,))
        self._contents.remove(found.id)

    # ------------------------------------------------------------------ batches

    def create_batch(
        self,
        *,
        owner: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        seconds: int,
        metadata: dict[str, str] | None,
        now: float,
    ) -> Batch:
        """Create a batch, which has to be validated.

        Raises:
            HttpError: 404 if the file does not exist, 400 if its purpose is another, 429 for too
                many unfinished batches.
        """
        found = self.file(input_file_id, owner)
        if found.purpose != "batch":
            raise HttpError(400, f"file {found.id} has the purpose {found.purpose}, not batch")
        row = self._db.row(
            f"SELECT count(*) AS n FROM batches WHERE owner = ? AND status IN {_UNFINISHED}", owner
        )
        if row is not None and row["n"] >= _MAX_UNFINISHED:
            raise HttpError(429, f"{row['n']} batches have not ended; more cannot be created yet")
        batch_id = f"batch_{token_hex(16)}"
        created = int(now)
        with self._db.transaction():
            self._db.execute(
                f"INSERT INTO batches ({BATCH_COLUMNS}) VALUES "
                "(?, ?, ?, ?, ?, 'validating', ?, ?, '{}', ?, '[]', 0, 0, 0, 0, NULL, NULL, '{}')",
                (
                    batch_id, owner, endpoint, input_file_id, window,
                    created, created + seconds, json.dumps(metadata),
                ),
            )  # fmt: skip
            self._db.execute(
                f"DELETE FROM batches WHERE owner = ? AND status NOT IN {_UNFINISHED} AND number "
                "<= (SELECT number FROM batches WHERE owner = ? ORDER BY number DESC LIMIT 1 "
                "OFFSET ?)",
                (owner, owner, _MAX_ENDED),
            )
        return self.batch(batch_id)

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        """Return a batch, of this owner if one is given. Raises HttpError 404."""
        row = self._db.row(f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?", batch_id)
        if row is None or (owner is not None and row["owner"] != owner):
            raise HttpError(404, f"no batch with id {batch_id[:80]!r} is stored here")
        return Batch.of(row)

    def batches(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return a page of an owner's batches, newest first, and whether there are more."""
        rows, more = self._db.page(BATCH_COLUMNS, "batches", owner, after, limit, True)
        return [Batch.of(row) for row in rows], more

    def unfinished(self, limit: int) -> list[str]:
        """Return the ids of unfinished batches: first those that only have to end, then every
        owner's oldest, every owner's next, and so on."""
        return [
            row["id"]
            for row in self._db.rows(
                f"SELECT id FROM batches WHERE status IN {_UNFINISHED} "
                "ORDER BY status IN ('finalizing', 'cancelling') DESC, "
                "row_number() OVER (PARTITION BY owner ORDER BY number), number LIMIT ?",
                limit,
            )
        ]

    def cancel(self, batch_id: str, owner: str, now: float) -> Batch:
        """Request a batch's end. Raises HttpError 404, or 409 if it is over."""
        batch = self.batch(batch_id, owner)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise HttpError(409, f"batch {batch.id} is {batch.status}: it cannot be cancelled")
        return self._move(batch, "cancelling", now)

    def begin(self, batch_id: str, total: int, now: float) -> Batch:
        """Accept the input of a batch; do nothing unless it is being validated."""
        batch = self.batch(batch_id)
        if batch.status != "validating":
            return batch
        return self._move(batch, "in_progress", now, total=total)

    def fail(self, batch_id: str, errors: Sequence[dict[str, Any]], now: float) -> Batch:
        """Reject the input of a batch; do nothing unless it is being validated."""
        batch = self.batch(batch_id)
        if batch.status != "validating":
            return batch
        return self._move(batch, "failed", now, errors=json.dumps(list(errors)))

    def suspect(self, batch_id: str, lines: Iterable[int]) -> None:
        """Count an engine death for lines that ran when it happened."""
        batch = self.batch(batch_id)
        counts = dict(batch.suspects)
        for line in lines:
            counts[line] = counts.get(line, 0) + 1
        with self._db.transaction():
            self._db.execute(
                "UPDATE batches SET suspects = ? WHERE id = ?", (json.dumps(counts), batch_id)
            )

    def answered(self, batch_id: str) -> set[int]:
        """Return the lines that have a record."""
        found = self._db.rows("SELECT line FROM results WHERE batch_id = ?", batch_id)
        return {row["line"] for row in found}

    def record(self, results: Iterable[Result]) -> None:
        """Store the records of lines: all or none. A line that has a record keeps it, and a batch
        that is over does not change.

        Raises:
            StorageError: the space is used up.
        """
        results = list(results)
        self._check_room(sum(len(result.record) for result in results), 507)
        with self._db.transaction():
            for result in results:
                inserted = self._db.execute(
                    "INSERT OR IGNORE INTO results SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM "
                    f"batches WHERE id = ? AND status IN {_UNFINISHED})",
                    (result.batch_id, result.line, result.failed, result.record, result.batch_id),
                ).rowcount
                if inserted:
                    self._db.execute(
                        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
                        "pending_bytes = pending_bytes + ? WHERE id = ?",
                        (not result.failed, result.failed, len(result.record), result.batch_id),
                    )

    def finish(self, batch_id: str, status: str, clock: Callable[[], float]) -> Batch:
        """Write the records to the output files, and end the batch.

        After a crash or an error in between, the records and the batch are still there; the same
        call repeats the work.

        Args:
            status: one of ENDED.
        """
        batch = self.batch(batch_id)
        if status == "completed" and batch.status == "in_progress":
            batch = self._move(batch, "finalizing", clock())
        written: dict[str, StoredFile] = {}
        try:
            for failed, name in ((0, "output"), (1, "error")):
                records = self._records(batch.id, failed)
                first = next(records, None)
                if first is None:
                    continue
                file_id = f"file-{token_hex(16)}"
                size = self._contents.write(file_id, itertools.chain([first], records))
                written[name] = StoredFile(
                    id=file_id,
                    owner=batch.owner,
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose="batch_output",
                    size=size,
                    created_at=int(clock()),
                )
            with self._db.transaction():
                for file in written.values():
                    self._insert(file)
                ids = {f"{name}_file_id": file.id for name, file in written.items()}
                self._update(batch, status, clock(), pending_bytes=0, **ids)
                self._db.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,))
        except BaseException:
            for file in written.values():
                self._remove_unknown(file.id)
            raise
        with contextlib.suppress(sqlite3.Error):
            # each step of the statement frees one page
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return self.batch(batch_id)

    # ------------------------------------------------------------------ within

    def used_bytes(self) -> int:
        """Return the bytes of all contents, unfinished batches' answers and running uploads."""
        row = self._db.row(
            "SELECT (SELECT coalesce(sum(size), 0) FROM files) + "
            "(SELECT coalesce(sum(pending_bytes), 0) FROM batches) AS n"
        )
        return self._uploading + (0 if row is None else int(row["n"]))

    def _remove_unknown(self, file_id: str) -> None:
        """Remove a file's contents, unless the failed transaction took effect after all."""
        with contextlib.suppress(StorageError):
            if self._db.row("SELECT id FROM files WHERE id = ?", file_id) is None:
                self._contents.remove(file_id)

    def _check_room(self, size: int, status: int) -> None:
        used = self.used_bytes()
        if used + size > self._max_bytes:
            raise StorageError(
                status,
                f"the files and batches stored here may have {self._max_bytes} bytes "
                f"together; {used} are used: delete files that are no longer needed",
            )

    def _move(self, batch: Batch, status: str, now: float, **columns: Any) -> Batch:
        with self._db.transaction():
            self._update(batch, status, now, **columns)
        return self.batch(batch.id)

    def _update(self, batch: Batch, status: str, now: float, **columns: Any) -> None:
        times = json.dumps({**batch.times, status: int(now)})
        columns = {"status": status, "times": times, **columns}
        names = ", ".join(f"{name} = ?" for name in columns)
        self._db.execute(f"UPDATE batches SET {names} WHERE id = ?", (*columns.values(), batch.id))

    def _insert(self, file: StoredFile) -> None:
        self._db.execute(
            f"INSERT INTO files ({FILE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, file.owner, file.filename, file.purpose, file.size, file.created_at),
        )

    def _records(self, batch_id: str, failed: int) -> Generator[bytes, None, None]:
        query = "SELECT record FROM results WHERE batch_id = ? AND failed = ? ORDER BY line"
        with as_storage_errors():
            for row in self._db.execute(query, (batch_id, failed)):
                yield row["record"]
