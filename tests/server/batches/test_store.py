"""The store by itself, and what a crash between any two writes leaves of it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.http.errors import HttpError
from paceline.server.batches.database import Part, StorageError
from paceline.server.batches.records import Batch, Result
from paceline.server.batches.store import BatchStore

URL = "/v1/chat/completions"


def put(store: BatchStore, content: bytes = b"input", owner: str = "", name: str = "in") -> str:
    part = store.begin_upload()
    store.write(part, content)
    return store.keep(part, owner=owner, filename=name, now=1.0).id


def create(store: BatchStore, file_id: str, owner: str = "", now: float = 100.0) -> Batch:
    return store.create_batch(
        owner=owner,
        endpoint=URL,
        input_file_id=file_id,
        window="1h",
        seconds=3600,
        metadata={"a": "b"},
        now=now,
    )


def result(batch: Batch, line: int, *, failed: bool = False) -> Result:
    return Result(batch.id, line, failed, json.dumps({"custom_id": str(line)}).encode())


def content(store: BatchStore, file_id: str | None, owner: str = "") -> list[str]:
    """The custom_ids of a file of records."""
    if file_id is None:
        return []
    _, file = store.open_file(file_id, owner)
    with file:
        return [json.loads(line)["custom_id"] for line in file]


def kept(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "files"))


def test_a_file_is_its_owners(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000)
    file_id = put(store, b"hello", owner="alice")
    assert store.file(file_id, "alice").size == 5
    for call in (store.file, store.open_file, store.delete_file):
        with pytest.raises(HttpError, match="no file with id") as error:
            call(file_id, "bob")
        assert error.value.status == 404
    assert store.files("bob", purpose=None, after=None, limit=9, newest_first=True) == ([], False)
    assert kept(tmp_path) == [file_id]
    store.delete_file(file_id, "alice")
    assert kept(tmp_path) == []
    store.close()


def test_pages(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 1000)
    ids = [put(store, name=f"{i}") for i in range(5)]
    put(store, owner="another")

    def page(after: str | None, limit: int, newest_first: bool) -> tuple[list[str], bool]:
        files, more = store.files(
            "", purpose="batch", after=after, limit=limit, newest_first=newest_first
        )
        return [file.id for file in files], more

    assert page(None, 2, False) == (ids[:2], True)
    assert page(ids[1], 3, False) == (ids[2:], False)
    assert page(None, 9, True) == (ids[::-1], False)
    assert page(ids[2], 9, True) == ([ids[1], ids[0]], False)
    with pytest.raises(HttpError, match="after="):
        page("file-nobody", 3, True)
    assert store.files("", purpose="batch_output", after=None, limit=9, newest_first=True)[0] == []
    batches = [create(store, ids[0]).id for _ in range(3)]
    found, more = store.batches("", after=batches[2], limit=1)
    assert ([batch.id for batch in found], more) == ([batches[1]], True)
    store.close()


def test_a_batch_from_begin_to_end(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10_000)
    file_id = put(store)
    batch = create(store, file_id)
    assert (batch.status, batch.expires_at, batch.metadata) == ("validating", 3700, {"a": "b"})
    assert store.unfinished(9) == [batch.id]
    with pytest.raises(HttpError, match="needs this file"):
        store.delete_file(file_id, "")
    assert store.begin(batch.id, 3, 101.0).times == {"in_progress": 101}
    store.record([result(batch, 2), result(batch, 0, failed=True)])
    # a second answer to a line changes nothing
    store.record([Result(batch.id, 2, True, b"other"), result(batch, 1)])
    assert store.answered(batch.id) == {0, 1, 2}
    done = store.finish(batch.id, "completed", lambda: 102.0)
    assert (done.completed, done.failed, done.total, done.pending_bytes) == (2, 1, 3, 0)
    assert done.times == {"in_progress": 101, "finalizing": 102, "completed": 102}
    assert content(store, done.output_file_id) == ["1", "2"]
    assert content(store, done.error_file_id) == ["0"]
    store.record([result(batch, 3)])
    assert store.unfinished(9) == [] and store.answered(batch.id) == set()
    assert store.batch(batch.id) == done
    with pytest.raises(HttpError, match="is completed: it cannot be cancelled"):
        store.cancel(batch.id, "", 103.0)
    assert done.output_file_id is not None
    with pytest.raises(HttpError, match="purpose batch_output"):
        create(store, done.output_file_id)
    store.delete_file(file_id, "")
    shown = done.json()
    assert shown["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert shown["errors"] is None and shown["cancelled_at"] is None
    store.close()


def test_a_batch_that_fails_and_one_that_is_cancelled(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10_000)
    file_id = put(store)
    failed, cancelled = create(store, file_id), create(store, file_id)
    fault = {"code": "empty_file", "message": "no", "param": None, "line": 3}
    assert store.fail(failed.id, [fault], 101.0).status == "failed"
    assert store.batch(failed.id).json()["errors"]["data"] == [fault]
    assert store.begin(failed.id, 3, 102.0).status == "failed"

    with pytest.raises(HttpError) as error:
        store.cancel(cancelled.id, "another", 103.0)
    assert error.value.status == 404
    assert store.cancel(cancelled.id, "", 103.0).status == "cancelling"
    assert store.cancel(cancelled.id, "", 104.0).times == {"cancelling": 103}
    # whoever validates comes too late
    assert store.begin(cancelled.id, 3, 105.0).status == "cancelling"
    assert store.fail(cancelled.id, [fault], 105.0).status == "cancelling"
    ended = store.finish(cancelled.id, "cancelled", lambda: 106.0)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", None, None)
    store.close()


def test_room_is_bounded(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 100)
    file_id = put(store, b"x" * 60)
    part = store.begin_upload()
    store.write(part, b"x" * 30)
    with pytest.raises(HttpError, match=r"100 bytes together; 90 are used") as error:
        store.write(part, b"x" * 11)
    assert error.value.status == 413
    store.drop(part)
    assert store.used_bytes() == 60 and kept(tmp_path) == [file_id]
    batch = create(store, file_id)
    store.begin(batch.id, 2, 1.0)
    store.record([Result(batch.id, 0, False, b"x" * 40)])
    with pytest.raises(StorageError, match="100 are used") as full:
        store.record([Result(batch.id, 1, False, b"x")])
    assert full.value.status == 507
    assert store.answered(batch.id) == {0}
    store.close()


def test_too_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batches.store._MAX_UNFINISHED", 2)
    monkeypatch.setattr("paceline.server.batches.store._MAX_ENDED", 3)
    store = BatchStore(tmp_path, 1000)
    file_id = put(store)
    first = [create(store, file_id).id for _ in range(2)]
    with pytest.raises(HttpError, match="2 batches have not ended") as error:
        create(store, file_id)
    assert error.value.status == 429
    store.fail(first[1], [], 1.0)
    for _ in range(4):
        store.fail(create(store, file_id).id, [], 1.0)
    found, _ = store.batches("", after=None, limit=100)
    # the oldest of those that are over are forgotten, an unfinished one never
    assert first[0] in {batch.id for batch in found} and first[1] not in {b.id for b in found}
    store.close()


def test_one_server_per_folder(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept", 1000)
    assert (tmp_path / "kept" / "files").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="used by another server"):
        BatchStore(tmp_path / "kept", 1000)
    store.close()
    BatchStore(tmp_path / "kept", 1000).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the batch folder"):
        BatchStore(tmp_path / "file", 1000)
    with sqlite3.connect(tmp_path / "kept" / "store.sqlite3") as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(ConfigError, match="another version"):
        BatchStore(tmp_path / "kept", 1000)


# ---------------------------------------------------------------------------- crashes


class Crash(BaseException):
    """The process ends here."""


class Fuse:
    """Ends the process at the n-th write, before or after it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.after = False
        fuse = self

        class Connection(sqlite3.Connection):
            def execute(self, query: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
                if query.startswith("PRAGMA synchronous"):
                    # here processes end, not machines
                    query = "PRAGMA synchronous = OFF"
                if query.split()[0] not in ("INSERT", "UPDATE", "DELETE", "COMMIT"):
                    return super().execute(query, *values)
                return fuse.burn(lambda: super(Connection, self).execute(query, *values))

        connect = sqlite3.connect
        monkeypatch.setattr(
            sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Connection)
        )
        for name, original in (("replace", os.replace), ("fsync", lambda _: None)):

            def call(*values: Any, original: Callable[..., Any] = original) -> Any:
                return fuse.burn(lambda: original(*values))

            monkeypatch.setattr(os, name, call)
        write = Part.write
        monkeypatch.setattr(Part, "write", lambda *a: fuse.burn(lambda: write(*a)))

    def burn(self, write: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Crash
        done = write()
        if self.left == 0:
            raise Crash
        return done


def die(store: BatchStore) -> None:
    """What a killed process leaves: no rollback, no cleaning up."""
    store._db.close()
    os.close(store._lock)


# files that a process had open when it ended
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Upload, create, begin, record, finish; the process ends at the n-th write, for every n, and
    whoever opens the folder again finds each thing there whole or not at all, and ends the batch
    with every line in its files once."""
    fuse = Fuse(monkeypatch)
    # what tidies up after an error is not there for a killed process
    monkeypatch.setattr(Part, "drop", lambda self: None)
    monkeypatch.setattr(BatchStore, "_remove_unknown", lambda self, file_id: None)
    crashes = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        store = BatchStore(folder, 10_000)
        fuse.left, fuse.after = number, after
        told: list[str] = []
        try:
            batch = create(store, put(store))
            told.append(batch.id)
            store.begin(batch.id, 4, 1.0)
            store.record([result(batch, 0), result(batch, 3, failed=True)])
            told.append("recorded")
            store.record([result(batch, 1)])
            store.record([result(batch, 2, failed=True)])
            store.finish(batch.id, "completed", lambda: 2.0)
            told.append("finished")
        except Crash:
            crashes += 1
        fuse.left = -1
        die(store)

        store = BatchStore(folder, 10_000)
        batches, _ = store.batches("", after=None, limit=9)
        if told:
            # what was told to a caller is there
            assert [batch.id for batch in batches] == told[:1]
        files, _ = store.files("", purpose=None, after=None, limit=9, newest_first=True)
        assert kept(folder) == sorted(file.id for file in files)
        for batch in batches:
            if batch.status == "validating":
                batch = store.begin(batch.id, 4, 1.0)
            if batch.status == "in_progress":
                found = store.answered(batch.id)
                assert (batch.completed + batch.failed) == len(found)
                assert "recorded" not in told or {0, 3} <= found
                store.record([result(batch, i, failed=i > 1) for i in range(4) if i not in found])
            if batch.status != "completed":
                assert "finished" not in told
                batch = store.finish(batch.id, "completed", lambda: 3.0)
            assert (batch.completed, batch.failed) == (2, 2)
            assert content(store, batch.output_file_id) == ["0", "1"]
            assert content(store, batch.error_file_id) == ["2", "3"]
            assert len(kept(folder)) == 3
        store.close()
        if "finished" in told:
            break
    assert crashes > 25 and "finished" in told


@pytest.mark.parametrize("number", range(1, 16))
def test_an_error_at_any_write_of_the_end_keeps_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The disk refuses one write; the process lives on and tries again."""
    store = BatchStore(tmp_path, 10_000)
    batch = create(store, put(store))
    store.begin(batch.id, 2, 1.0)
    store.record([result(batch, 0), result(batch, 1, failed=True)])
    left = number

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(28, "No space left on device", "/secret/place")
            return original(*values, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails(os.replace))
        patch.setattr(os, "fsync", fails(os.fsync))
        patch.setattr(BatchStore, "_insert", fails(BatchStore._insert))
        patch.setattr(BatchStore, "_update", fails(BatchStore._update))
        try:
            store.finish(batch.id, "completed", lambda: 2.0)
            assert left > 0
        except StorageError as error:
            assert error.status == 507 and "secret" not in str(error)
            assert store.batch(batch.id).status in ("in_progress", "finalizing")
            assert len(kept(tmp_path)) == 1, "nothing half done stays"
    if store.batch(batch.id).status != "completed":
        store.finish(batch.id, "completed", lambda: 3.0)
    done = store.batch(batch.id)
    assert content(store, done.output_file_id) == ["0"]
    assert content(store, done.error_file_id) == ["1"]
    store.close()
