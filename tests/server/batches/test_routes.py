"""Files and batches over HTTP: who sees what, and how batches end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, EngineDeadError, QueueFullError
from paceline.http.bounds import Bounds
from paceline.server import ServerConfig
from paceline.server.batches import runner
from paceline.server.batches.runner import BatchRunner
from paceline.server.batches.store import BatchStore
from tests.server.batches.serving import (
    ALICE,
    BOB,
    ENDED,
    KEYS,
    SMALL_BODIES,
    URL,
    line,
    running,
)


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
        client.generate = lambda request, sink: (seen.append(request), original(request, sink))[1]
        slo = {"class": "interactive", "queue_ttl_ms": 1}
        await server.until(await server.submit([line("a"), line("b", slo=slo)]))
        assert len(seen) == 2
        slos = [request.slo for request in seen]
        assert all(s.best_effort and not s.has_targets and s.queue_ttl is None for s in slos)


class Counted:
    """How many requests an engine has at once."""

    def __init__(self, client: Any) -> None:
        self.now = self.most = 0
        self._original = client.generate
        client.generate = self.generate

    async def generate(self, request: Any, sink: Any = None) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async for output in self._original(request, sink):
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
            while server.service.client.stats.scheduler.num_running:
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

        async def refusing(request: Any, sink: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise QueueFullError("full", retry_after=7.2, reason="queue-full")
            async for output in original(request, sink):
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

            async def deadly(
                request: Any, sink: Any, original: Any = original, died: Any = died
            ) -> Any:
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
                async for output in original(request, sink):
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
    config = replace(SMALL_BODIES, api_keys=KEYS)
    async with running(tmp_path, server_config=config) as server:
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


async def test_bodies_are_bounded_as_everywhere(tmp_path: Path) -> None:
    config = ServerConfig(bounds=Bounds(max_json_items=40, max_json_depth=2))
    async with running(tmp_path, server_config=config) as server:
        for path, body, says in (
            ("/v1/batches", {"metadata": {"a": {}}}, "nested deeper than 2 levels"),
            ("/v1/batches", {"input_file_id": [0] * 50}, "at most 40 are allowed"),
            ("/v1/embeddings", {"input": [[[]]]}, "nested deeper than 2 levels"),
            ("/v1/embeddings", {"input": [0] * 50}, "at most 40 are allowed"),
        ):
            answer = await server.http.post(path, json=body)
            assert answer.status_code == 400 and says in answer.text, (path, answer.text)
        for one, code, says in (
            (line("a", [0] * 50), "invalid_json_line", "at most 40"),
            (line("a", logit_bias={"a": {}}), "invalid_body", "nested deeper than 2 levels"),
        ):
            batch = await server.until(await server.submit([line("ok"), one]))
            (fault,) = batch["errors"]["data"]
            assert (fault["code"], fault["line"]) == (code, 2) and says in fault["message"]
        # a body as deep as may be sent, inside of a line
        batch = await server.until(await server.submit([line("a", [65], logit_bias={"66": 1})]))
        assert batch["request_counts"]["completed"] == 1, batch


async def test_a_folder_without_a_usable_database(tmp_path: Path) -> None:
    """The server starts unless told not to without; and it is not "another server" that is
    the trouble, however often it is asked."""
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite3")) as db:
        # not the columns that are read when it is opened
        db.execute("CREATE TABLE files (number INTEGER PRIMARY KEY, owner TEXT)")
    async with running(tmp_path) as server:
        await server.batches.start()
        for _ in range(2):
            assert (await server.http.get("/v1/files")).status_code == 503
        with pytest.raises(ConfigError, match="no such column: id"):
            BatchStore(tmp_path, 1000)
        here = Path("/proc/self/fd")
        assert not [fd for fd in here.iterdir() if str(tmp_path) in os.path.realpath(fd)]
    async with running(tmp_path, required=True) as server:
        with pytest.raises(ConfigError, match="no such column: id"):
            await server.batches.start()


async def test_large_lines_are_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones are, up to a number; large ones wait for one another."""
    monkeypatch.setattr("paceline.server.batches.runner._MAX_BYTES", 5000)
    monkeypatch.setattr("paceline.server.batches.runner._AHEAD_BYTES", 5000)
    for folder, size, most in (("small", 10, 4), ("large", 2000, 2), ("huge", 4000, 1)):
        async with running(tmp_path / folder, concurrency=4, step_time=0.001) as server:
            count = Counted(server.service.client)
            read: list[int] = []
            original = runner._take

            def take(lines: Any, original: Any = original, read: list[int] = read) -> Any:
                taken = original(lines)
                read.append(sum(line.size for line in taken))
                return taken

            monkeypatch.setattr(runner, "_take", take)
            lines = [line(f"{i}", [1], user="x" * size) for i in range(12)]
            batch = await server.until(await server.submit(lines))
            assert batch["request_counts"]["completed"] == 12
            assert count.most == most, folder
            assert 0 < max(read) < 5000 + size + 200


async def test_an_answer_on_its_way_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch that is cancelled while answers wait to be written."""
    monkeypatch.setattr("paceline.server.batches.runner._GATHER", 0.2)
    async with running(tmp_path) as server:
        client: Any = server.service.client
        original = client.generate

        async def held(request: Any, sink: Any) -> Any:
            if len(request.prompt_token_ids) > 1:
                await asyncio.sleep(30)
            async for output in original(request, sink):
                yield output

        client.generate = held
        batch = await server.submit([line("quick", [65]), line("slow", [65, 65])])
        recorder = (await server.batches.runner())._recorder
        async with asyncio.timeout(10):
            while not recorder._waiting:
                await asyncio.sleep(0.005)
        await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        batch = await server.until(batch)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert list(await server.records(batch["output_file_id"])) == ["quick"]
        assert list(await server.records(batch["error_file_id"])) == ["slow"]
        files = (await server.http.get("/v1/files")).json()["data"]
        # nothing is left over that would count against the storage
        assert await server.batches.call(BatchStore.used_bytes) == sum(f["bytes"] for f in files)
