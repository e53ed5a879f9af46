"""Faults of a server's storage: the disk under a batch, the Redis behind its rate limits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.callers import ask, counted, mismatches
from benchmarks.faults.rows import STREAMS, TOKENS, WHOLE, Load, Row
from benchmarks.faults.server import FaultyServer, metric

__all__ = ["Redis", "disk_full", "redis_gone", "small_disk"]

LINES = 200
DISK_BYTES = 8 * 2**20
_MODEL_TIMEOUT = 120.0


def small_disk(folder: Path) -> tuple[str, ...] | None:
    """Return a prefix for a command in whose view alone ``folder`` is a file system of DISK_BYTES;
    None if that is not allowed."""
    program = shutil.which("unshare")
    if program is None:
        return None
    mount = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {folder} && exec"
    command = (program, "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} "$@"', "sh")
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return command if tried.returncode == 0 else None


class Redis:
    """A private redis-server, removed when the block ends."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Redis:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "no", "--dir", str(self._folder), "--logfile", "log",
            ]
        )  # fmt: skip
        deadline = time.monotonic() + 10.0
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            if time.monotonic() > deadline:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def _client(server: FaultyServer) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, timeout=_MODEL_TIMEOUT) as client:
        yield client


def _line(load: Load, index: int) -> str:
    body = load.body(index, stream=False, return_token_ids=True)
    return json.dumps(
        {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/completions", "body": body}
    )


async def _upload(http: httpx.AsyncClient, data: bytes) -> httpx.Response:
    files = {"file": ("batch.jsonl", data)}
    return await http.post("/v1/files", data={"purpose": "batch"}, files=files)


async def disk_full(server: FaultyServer, load: Load, folder: Path) -> Row:
    """Fill the disk up in the middle of a batch, then free it again.

    Args:
        folder: the server's ``--batch-dir`` as the server sees it, a ``small_disk``.
    """
    before = server.rss_mb()
    # the server's own view of the file system
    filler = Path(f"/proc/{server.pid}/root{folder}/filler")
    async with _client(server) as http:
        whole = "\n".join(_line(load, index) for index in range(LINES)).encode()
        file_id = (await _upload(http, whole)).raise_for_status().json()["id"]
        order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
        created = (await http.post("/v1/batches", json=order)).raise_for_status().json()
        path = f"/v1/batches/{created['id']}"

        async def done() -> tuple[str, int]:
            batch = (await http.get(path)).raise_for_status().json()
            return batch["status"], batch["request_counts"]["completed"]

        while (await done())[1] < LINES // 4:
            await asyncio.sleep(0.05)
        _fill(filler)
        online = asyncio.gather(
            *(ask(server.port, load.body(i, stream=True)) for i in range(WHOLE))
        )
        # so that every answer that is under way meets the full disk
        await asyncio.sleep(2.0)
        stuck = (await done())[1]
        await asyncio.sleep(1.0)
        status, still = await done()
        refused = await _upload(http, whole)
        seen = await online
        filler.unlink()
        room = time.monotonic()
        async with asyncio.timeout(120.0):
            while (await done())[0] != "completed":
                await asyncio.sleep(0.1)
        resumed = time.monotonic() - room
        batch = (await http.get(path)).json()
        output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    records = [json.loads(line) for line in output.splitlines()]
    times = Counter(record["custom_id"] for record in records)
    wrong = sum(
        _ids(record["response"]["body"]["choices"])
        != load.answer(int(record["custom_id"].removeprefix("line-")))
        for record in records
    )
    return {
        "lines": LINES,
        "answered_exactly_once": sum(count == 1 for count in times.values()),
        "tokens_lost_or_doubled": wrong + mismatches(_with(seen, load)),
        "answered_while_full": still - stuck,
        "batch_while_full": status,
        "upload_while_full": refused.status_code,
        "streams_while_full": counted(seen),
        "seconds_from_room_to_completed": round(resumed, 1),
        "memory_growth_mb": round(server.rss_mb() - before, 1),
    }


def _with(seen: list[Any], load: Load) -> list[tuple[Any, list[int]]]:
    return [(each, load.answer(index)) for index, each in enumerate(seen)]


def _ids(choices: list[Any]) -> list[int]:
    """Return token ids of all choices, in the order of ``Seen.token_ids``."""
    return [each for choice in choices for each in choice["token_ids"]]


def _fill(path: Path) -> None:
    """Write to ``path`` until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


async def redis_gone(server: FaultyServer, load: Load, redis: Redis) -> Row:
    """Kill Redis under streams whose rate it counts, and start it again."""
    before = server.rss_mb()

    async def streams() -> list[Any]:
        return list(
            await asyncio.gather(
                *(ask(server.port, load.body(i, stream=True)) for i in range(STREAMS))
            )
        )

    running = asyncio.create_task(streams())
    while metric(await server.scrape(), "vllm:num_requests_running") < STREAMS:
        await asyncio.sleep(0.02)
    redis.kill()
    gone = time.monotonic()
    # the first request waits until the loss is noticed
    first = await ask(server.port, load.body(0, stream=True, tokens=1))
    noticed = (first.times or [0.0])[0] - gone
    under_way, while_gone = await running, await streams()
    down = metric(await server.scrape(), "paceline:rate_limit_storage_up")
    ready = await server.until("/health", lambda status: status == 200, 5.0) > 0
    redis.start()
    back = time.monotonic()
    async with asyncio.timeout(60.0):
        while metric(await server.scrape(), "paceline:rate_limit_storage_up") < 1:
            await asyncio.sleep(0.05)
    used_again = time.monotonic() - back
    after = await streams()
    return {
        "streams_under_way": counted(under_way),
        "streams_while_gone": counted(while_gone),
        "streams_after": counted(after),
        "tokens_lost_or_doubled": sum(load.wrong(seen) for seen in (under_way, while_gone, after)),
        "first_token_of_the_first_to_notice_seconds": round(noticed, 2),
        "storage_up_while_gone": down,
        "health_while_gone": 200 if ready else 503,
        "seconds_until_used_again": round(used_again, 2),
        "tokens_each": TOKENS,
        "memory_growth_mb": round(server.rss_mb() - before, 1),
    }
