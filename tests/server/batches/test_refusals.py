"""Files and batches that are refused, and lists of those that are not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from paceline.server.batches.store import BatchStore
from paceline.server.settings.config import BatchConfig
from tests.server.batches.serving import URL, running
from tests.server.helpers import VOCAB, connect

MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}


def form(*parts: tuple[str, str], end: str = "--b--\r\n") -> bytes:
    return (
        "".join(
            f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n"
            for head, value in parts
        ).encode()
        + end.encode()
    )


PURPOSE = ("name=purpose", "batch")
FILE = ('name="file"; filename="in.jsonl"', "x")


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (form(PURPOSE, FILE), {"Content-Type": "application/json"}, 400, "multipart/form-data"),
        (form(PURPOSE, FILE), {"Content-Type": "multipart/form-data"}, 400, "multipart"),
        (b"", MULTIPART, 400, "ends too early"),
        (b"nonsense", MULTIPART, 400, "multipart/form-data"),
        (form(PURPOSE, FILE, end=""), MULTIPART, 400, "ends too early"),
        (form(FILE), MULTIPART, 400, "purpose is missing"),
        (form(PURPOSE), MULTIPART, 400, "file is missing"),
        (form(PURPOSE, ("name=file", "x")), MULTIPART, 400, "with a file name"),
        (form(PURPOSE, PURPOSE, FILE), MULTIPART, 400, "purpose is there twice"),
        (form(PURPOSE, FILE, FILE), MULTIPART, 400, "file is there twice"),
        (form(PURPOSE, FILE, ("name=expires_after", "x")), MULTIPART, 400, "'expires_after'"),
        (form(("name=purpose", "fine-tune"), FILE), MULTIPART, 400, "'fine-tune'"),
        (form(("name=purpose", "x" * 300), FILE), MULTIPART, 400, "more than 256 bytes"),
        (form(PURPOSE, (FILE[0], "x" * 2000)), MULTIPART, 413, "1000 bytes"),
        (form(PURPOSE, (FILE[0], "x" * 90_000)), MULTIPART, 413, "1000 bytes"),
    ],
)
async def test_uploads_that_are_refused(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    async with running(tmp_path, max_file_bytes=1000) as server:
        answer = await server.http.post("/v1/files", content=body, headers=headers)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), (
            answer.text
        )
        assert (await server.http.get("/v1/files")).json()["data"] == []
        assert list((tmp_path / "files").iterdir()) == []


async def test_a_file_name_is_only_shown(tmp_path: Path) -> None:
    async with running(tmp_path, max_bytes=100) as server:
        for name, shown in (
            ("../../etc/passwd", "passwd"),
            ("..\\\\x\\\\y.jsonl", "y.jsonl"),
            ("a" * 400, "a" * 255),
            ("/", "file"),
        ):
            body = form((f'name="file"; filename="{name}"', "x" * 10), PURPOSE)
            answer = await server.http.post("/v1/files", content=body, headers=MULTIPART)
            assert answer.json()["filename"] == shown
        stored = {path.name for path in (tmp_path / "files").iterdir()}
        assert stored == {
            file["id"] for file in (await server.http.get("/v1/files")).json()["data"]
        }
        full = await server.upload(b"x" * 61)
        assert full.status_code == 413 and "40 are used" in full.json()["error"]["message"]
        assert len(list((tmp_path / "files").iterdir())) == 4


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"input_file_id": None}, 400, "input_file_id is missing"),
        ({"input_file_id": "file-nobody"}, 404, "no file with id"),
        ({"input_file_id": "../../../etc/passwd"}, 404, "no file with id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint must be one of"),
        ({"endpoint": None}, 400, "endpoint must be one of"),
        ({"completion_window": "0s"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": "soon"}, 400, "'soon'"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {f"{i}": "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {}}, 400, "not served"),
        ({"color": "red"}, 400, "'color'"),
    ],
)
async def test_batches_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], status: int, says: str
) -> None:
    async with running(tmp_path) as server:
        file = (await server.upload(b"x")).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "1h", **fields}
        answer = await server.http.post("/v1/batches", json=body)
        assert answer.status_code == status and says in answer.json()["error"]["message"]


async def test_too_many_batches_are_told_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every 429 and 503, whoever says it."""
    monkeypatch.setattr("paceline.server.batches.store._MAX_UNFINISHED", 0)
    async with running(tmp_path) as server:
        file = (await server.upload(b"x")).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "1h"}
        answer = await server.http.post("/v1/batches", json=body)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        await server.batches.stop()
        answer = await server.http.get("/v1/files")
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1


async def test_lists(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        ids = [(await server.upload(b"x")).json()["id"] for _ in range(3)]
        page = (await server.http.get("/v1/files?limit=2")).json()
        assert [file["id"] for file in page["data"]] == [ids[2], ids[1]] and page["has_more"]
        assert (page["first_id"], page["last_id"]) == (ids[2], ids[1])
        page = (await server.http.get(f"/v1/files?order=asc&after={ids[1]}&purpose=batch")).json()
        assert [file["id"] for file in page["data"]] == [ids[2]] and not page["has_more"]
        # the first nine digits of the third are in range
        for query in (
            *("limit=0", "limit=99999", f"limit=000000001{'0' * 5000}", "limit=x"),
            *("order=up", "order=", "purpose=vision"),
        ):
            answer = await server.http.get(f"/v1/files?{query}")
            assert answer.status_code == 400 and query.split("=")[0] in answer.text
        assert (await server.http.get("/v1/batches?after=nobody")).status_code == 404


async def test_without_a_folder(tmp_path: Path) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig())) as http:
        answer = await http.get("/v1/files")
        assert answer.status_code == 501 and "--batch-dir" in answer.text
        # not as too large for nothing
        large = form(PURPOSE, (FILE[0], "x" * 200_000))
        answer = await http.post("/v1/files", content=large, headers=MULTIPART)
        assert answer.status_code == 501 and "--batch-dir" in answer.text
    taken = BatchStore(tmp_path / "taken", 1000)
    config = ServerConfig(batches=BatchConfig(folder=tmp_path / "taken"))
    async with connect(create_app(client, config)) as http:
        answer = await http.get("/v1/batches")
        assert answer.status_code == 503 and str(tmp_path) not in answer.text
    taken.close()
    await client.close()


_FIELD = b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
_OPENED = _FIELD + b"--b\r\nContent-Disposition: form-data; name=file; filename=x\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"-" * 2**23,
        b"\r\n" * 2**22,
        _OPENED + b"-" * 2**23 + b"\r\n--b--\r\n",
        _OPENED + b"\r\n--" * 2**21 + b"\r\n--b--\r\n",
        _FIELD * 100_000,
        b"--b\r\n" + b"A: b\r\n" * 2**20,
        b'--b\r\nContent-Disposition: form-data; name="' + b"\\" * 2**23 + b'"\r\n\r\n',
        _OPENED + b"x\r\n--b--\r\n" + b"\r\n" * 2**22,
    ],
    ids=["dashes", "lines", "file", "nearly", "fields", "headers", "quotes", "after"],
)
async def test_hostile_forms_take_little_time(tmp_path: Path, body: bytes) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    async with running(tmp_path) as server:
        began = time.process_time()
        answer = await server.http.post("/v1/files", content=pieces(), headers=MULTIPART)
        assert answer.status_code in (200, 400), answer.text
        assert time.process_time() - began < 8
