"""Files and batches over HTTP: what is refused, who sees what, and how batches end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.backends.null import NullBackend
from paceline.core.errors import EngineDeadError, QueueFullError
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from paceline.server.app import batches_of, service_of
from paceline.server.batch_config import BatchConfig
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.store import BatchStore
from paceline.server.keys import ApiKey
from tests.server.helpers import VOCAB, connect

pytestmark = pytest.mark.anyio

ENDED = ("completed", "failed", "expired", "cancelled")
ALICE, BOB = "alice-key-0123456789", "bobs-key-0123456789"
KEYS = (ApiKey.of("alice", "user", ALICE), ApiKey.of("bob", "user", BOB))
URL = "/v1/completions"


class Server:
    """An app over its own engine, with a clock that tests set."""

    def __init__(self, http: httpx.AsyncClient, app: Any) -> None:
        self.http = http
        self.app = app
        self.service = service_of(app)
        self.batches = batches_of(app)

    async def upload(self, content: bytes, **headers: str) -> httpx.Response:
        return await self.http.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", content)},
            headers=headers,
        )

    async def submit(
        self, lines: Sequence[dict[str, Any] | bytes], endpoint: str = URL, **fields: Any
    ) -> dict[str, Any]:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file = (await self.upload(b"\n".join(raw))).json()
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "1h"}
        answer = await self.http.post("/v1/batches", json={**body, **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def get(self, batch: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"/v1/batches/{batch['id']}")).json()
        return found

    async def until(self, batch: dict[str, Any], *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while (found := await self.get(batch))["status"] not in (statuses or ENDED):
                await asyncio.sleep(0.005)
        return found

    async def records(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        if file_id is None:
            return {}
        text = (await self.http.get(f"/v1/files/{file_id}/content")).text
        found = [json.loads(line) for line in text.splitlines()]
        assert len({record["custom_id"] for record in found}) == len(found)
        return {record["custom_id"]: record for record in found}


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, step_time: float = 0.0, keys: tuple[ApiKey, ...] = (), **config: Any
) -> AsyncGenerator[Server, None]:
    backend = NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=step_time, poison_token=7)
    client = null_client(backend, max_num_seqs=8)
    batches = BatchConfig(folder=folder, **config)
    app = create_app(client, ServerConfig(api_keys=keys, batches=batches, max_body_bytes=5000))
    async with connect(app) as http:
        server = Server(http, app)
        try:
            yield server
        finally:
            await server.batches.stop()
            await client.close()


def line(custom_id: str, prompt: Any = "hi", url: str = URL, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


async def test_every_endpoint_is_answered_as_over_http(tmp_path: Path) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/v1/completions": {"prompt": "x", "max_tokens": 3},
        "/v1/responses": {"input": "x", "max_output_tokens": 3},
        "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 3}},
    }
    async with running(tmp_path) as server:
        for url, body in bodies.items():
            one = {"custom_id": "a", "method": "POST", "url": url, "body": body}
            batch = await server.until(await server.submit([one], endpoint=url))
            assert batch["status"] == "completed", (url, batch)
            (record,) = (await server.records(batch["output_file_id"])).values()
            answer = record["response"]["body"]
            over_http = (await server.http.post(url, json=body)).json()
            assert answer.keys() == over_http.keys()
            for name in ("choices", "object"):
                assert answer.get(name) == over_http.get(name) or url == "/v1/responses"
            if url == "/v1/responses":
                # thousands of them would push everybody's out of memory
                found = await server.http.get(f"/v1/responses/{answer['id']}")
                assert found.status_code == 404


async def test_a_bad_file_is_a_failed_batch(tmp_path: Path) -> None:
    async with running(tmp_path, max_requests=3) as server:
        for lines, code in (
            ([line("a"), b"{"], "invalid_json_line"),
            ([line("a"), line("a")], "duplicate_custom_id"),
            ([line("a", url="/v1/chat/completions")], "mismatched_url"),
            ([line("a"), b'{"prompt": "x"}'], "missing_required_parameter"),
            ([line("a", "x" * 6000)], "line_too_long"),
            ([line(f"{i}") for i in range(4)], "too_many_requests"),
            ([b"\n\n"], "empty_file"),
        ):
            batch = await server.until(await server.submit(lines))
            assert batch["status"] == "failed" and batch["output_file_id"] is None
            assert [fault["code"] for fault in batch["errors"]["data"]] == [code]
            assert batch["failed_at"] and batch["in_progress_at"] is None


async def test_one_lines_fault_is_its_own(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        lines = [line("ok"), line("poison", [7]), line("long", "x" * 600), line("stop", best_of=3)]
        batch = await server.until(await server.submit(lines))
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        errors = await server.records(batch["error_file_id"])
        statuses = {name: record["response"]["status_code"] for name, record in errors.items()}
        assert statuses == {"poison": 500, "long": 400, "stop": 400}


async def test_lines_are_best_effort_without_a_target(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        seen: list[Any] = []
        client: Any = server.service.client
        original = client.generate
        client.generate = lambda request: (seen.append(request), original(request))[1]
        slo = {"class": "interactive", "queue_ttl_ms": 1}
        await server.until(await server.submit([line("a"), line("b", slo=slo)]))
        assert len(seen) == 2
        assert all(request.slo.background and request.slo.queue_ttl is None for request in seen)


class Counted:
    """How many requests an engine has at once."""

    def __init__(self, client: Any) -> None:
        self.now = self.most = 0
        self._original = client.generate
        client.generate = self.generate

    async def generate(self, request: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async for output in self._original(request):
                yield output
        finally:
            self.now -= 1


async def test_concurrency_is_bounded(tmp_path: Path) -> None:
    for concurrency in (1, 3):
        folder = tmp_path / str(concurrency)
        async with running(folder, concurrency=concurrency, step_time=0.001) as server:
            count = Counted(server.service.client)
            ids = [await server.submit([line(f"{i}") for i in range(10)]) for _ in range(2)]
            for batch in ids:
                await server.until(batch)
            assert count.most == concurrency


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    async with running(tmp_path, step_time=0.005, concurrency=2) as server:
        batch = await server.submit([line(f"{i}") for i in range(200)])
        while (await server.get(batch))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0.005)
        cancelling = (await server.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling"
        batch = await server.until(batch)
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        answers = await server.records(batch["output_file_id"])
        errors = await server.records(batch["error_file_id"])
        assert len(answers) >= 3 and len(answers) + len(errors) == 200
        assert {record["error"]["code"] for record in errors.values()} == {"batch_cancelled"}
        async with asyncio.timeout(5):
            while server.service.client.stats.num_running:
                await asyncio.sleep(0.01)
        again = await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.status_code == 409


async def test_a_window_ends(tmp_path: Path) -> None:
    async with running(tmp_path, step_time=0.005, concurrency=2) as server:
        lines = [line(f"{i}") for i in range(400)]
        batch = await server.until(await server.submit(lines, completion_window="1s"))
        assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
        errors = await server.records(batch["error_file_id"])
        answers = await server.records(batch["output_file_id"])
        assert errors and len(answers) + len(errors) == 400
        assert {record["error"]["code"] for record in errors.values()} == {"batch_expired"}


async def test_refusals_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, float]] = []

    def no_wait(attempt: int, advised: float, number: int) -> float:
        waits.append((attempt, advised))
        return 0.0

    monkeypatch.setattr("paceline.server.batches.answering.backoff", no_wait)
    async with running(tmp_path) as server:
        client: Any = server.service.client
        original = client.generate
        left = 3

        async def refusing(request: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise QueueFullError("full", retry_after=7.2, reason="queue-full")
            async for output in original(request):
                yield output

        client.generate = refusing
        batch = await server.until(await server.submit([line("a")]))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert waits == [(0, 8), (1, 8), (2, 8)]


async def test_trouble_is_told_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine away, then the disk full: the batch pauses, the server stays, and it goes on."""
    monkeypatch.setattr("paceline.server.batches.runner.backoff", lambda *_: 0.01)
    async with running(tmp_path, concurrency=2) as server:
        client: Any = server.service.client

        async def paused(batch: dict[str, Any], says: str) -> None:
            async with asyncio.timeout(10):
                while (await server.get(batch))["errors"] is None:
                    await asyncio.sleep(0.005)
            (fault,) = (await server.get(batch))["errors"]["data"]
            assert fault["code"] == "paused" and says in fault["message"], fault
            assert "/var" not in fault["message"] and "0x" not in fault["message"]

        def away() -> None:
            raise EngineDeadError("the engine at 0x7fffdeadbeef left /var/log/engine")

        healthy = client.check_health
        client.check_health = away
        batch = await server.submit([line(f"{i}", "x" * 100, echo=True) for i in range(60)])
        await paused(batch, "the engine at")
        # SQLite's own "disk full", by its own limit
        pages: int = await server.batches.call(
            lambda s: s._db.execute("PRAGMA page_count").fetchone()[0]
        )
        await server.batches.call(lambda s: s._db.execute(f"PRAGMA max_page_count={pages + 1}"))
        client.check_health = healthy
        async with asyncio.timeout(10):
            while "full" not in str((await server.get(batch))["errors"]):
                await asyncio.sleep(0.005)
        await paused(batch, "the disk that files and batches are stored on is full")
        assert (await server.http.get("/health")).status_code == 200
        await server.batches.call(lambda s: s._db.execute("PRAGMA max_page_count=100000"))
        batch = await server.until(batch)
        assert batch["status"] == "completed" and batch["errors"] is None
        assert len(await server.records(batch["output_file_id"])) == 60


@pytest.mark.parametrize("between", ["the server stays", "the server ends"])
async def test_a_line_that_kills_engines_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    monkeypatch.setattr("paceline.server.batches.runner.backoff", lambda *_: 0.01)
    deaths = 0
    batch: dict[str, Any] = {}
    while deaths < 20:
        async with running(tmp_path, concurrency=4) as server:
            client: Any = server.service.client
            original = client.generate
            died = asyncio.Event()

            async def deadly(request: Any, original: Any = original, died: Any = died) -> Any:
                nonlocal deaths
                if len(request.prompt_token_ids) == 5:
                    # the others run by now
                    await asyncio.sleep(0.02)
                    deaths += 1
                    died.set()
                if died.is_set():
                    if between == "the server stays":
                        asyncio.get_running_loop().call_soon(died.clear)
                    raise EngineDeadError("killed")
                async for output in original(request):
                    yield output

            def health(died: Any = died) -> None:
                if died.is_set():
                    raise EngineDeadError("killed")

            client.generate, client.check_health = deadly, health
            if not batch:
                lines = [line(f"{i}", [1] * (5 if i == 6 else 4)) for i in range(20)]
                batch = await server.submit(lines)
            await server.batches.start()
            if between == "the server stays":
                batch = await server.until(batch)
            else:
                ended = asyncio.create_task(server.until(batch))
                dead = asyncio.create_task(died.wait())
                await asyncio.wait((ended, dead), return_when=asyncio.FIRST_COMPLETED)
                dead.cancel()
                if not ended.done():
                    ended.cancel()
                    await asyncio.gather(ended, return_exceptions=True)
                    continue
                batch = await ended
            errors = await server.records(batch["error_file_id"])
            break
    assert deaths == 3
    assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 19
    assert list(errors) == ["6"]
    assert "died 3 times" in errors["6"]["response"]["body"]["error"]["message"]


async def test_keys_see_their_own(tmp_path: Path) -> None:
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in (ALICE, BOB))
    async with running(tmp_path, keys=KEYS) as server:
        http = server.http
        file = (await server.upload(json.dumps(line("a")).encode(), **alice)).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "1h"}
        assert (await http.post("/v1/batches", json=body, headers=bob)).status_code == 404
        batch = (await http.post("/v1/batches", json=body, headers=alice)).json()
        path = f"/v1/batches/{batch['id']}"
        async with asyncio.timeout(10):
            while (found := (await http.get(path, headers=alice)).json())["status"] not in ENDED:
                await asyncio.sleep(0.005)
        assert found["status"] == "completed", found
        for method, hidden in (
            ("GET", path),
            ("POST", f"{path}/cancel"),
            *(
                (method, f"/v1/files/{file_id}{more}")
                for file_id in (file["id"], found["output_file_id"])
                for method, more in (("GET", ""), ("GET", "/content"), ("DELETE", ""))
            ),
        ):
            assert (await http.request(method, hidden, headers=bob)).status_code == 404, hidden
        for listed in ("/v1/files", "/v1/batches"):
            assert (await http.get(listed, headers=bob)).json()["data"] == []
            assert (await http.get(listed, headers=alice)).json()["data"]
        content = await http.get(f"/v1/files/{found['output_file_id']}/content", headers=alice)
        assert json.loads(content.text)["custom_id"] == "a"


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
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint must be one of"),
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


async def test_lists(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        ids = [(await server.upload(b"x")).json()["id"] for _ in range(3)]
        page = (await server.http.get("/v1/files?limit=2")).json()
        assert [file["id"] for file in page["data"]] == [ids[2], ids[1]] and page["has_more"]
        assert (page["first_id"], page["last_id"]) == (ids[2], ids[1])
        page = (await server.http.get(f"/v1/files?order=asc&after={ids[1]}&purpose=batch")).json()
        assert [file["id"] for file in page["data"]] == [ids[2]] and not page["has_more"]
        for query in ("limit=0", "limit=x", "limit=99999", "order=up", "purpose=vision"):
            answer = await server.http.get(f"/v1/files?{query}")
            assert answer.status_code == 400 and query.split("=")[0] in answer.text
        assert (await server.http.get("/v1/batches?after=nobody")).status_code == 404


async def test_without_a_folder(tmp_path: Path) -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    async with connect(create_app(client, ServerConfig())) as http:
        answer = await http.get("/v1/files")
        assert answer.status_code == 501 and "--batch-dir" in answer.text
    taken = BatchStore(tmp_path / "taken", 1000)
    config = ServerConfig(batches=BatchConfig(folder=tmp_path / "taken"))
    async with connect(create_app(client, config)) as http:
        answer = await http.get("/v1/batches")
        assert answer.status_code == 503 and str(tmp_path) not in answer.text
    taken.close()
    await client.close()


async def test_a_server_that_ends_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, step_time=0.005, concurrency=2) as server:
        batch = await server.submit([line(f"{i}") for i in range(100)])
        while (await server.get(batch))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0.005)
        await server.batches.stop()
        assert (await server.http.get(f"/v1/batches/{batch['id']}")).status_code == 503
    async with running(tmp_path) as server:
        # as the lifecycle does; nobody asks
        await server.batches.start()
        assert isinstance(await server.batches.runner(), BatchRunner)
        batch = await server.until(batch)
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert len(await server.records(batch["output_file_id"])) == 100
