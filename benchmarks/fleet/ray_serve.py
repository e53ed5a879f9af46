"""Ray Serve as a peer: what a replica's end does to streams there and here, and what a token costs.

    python -m benchmarks.fleet.ray_serve      (in an environment that has ray[serve] too)

Three replicas of the null backend, the same 32 streams. Here they are a fleet's behind our
gateway. There a Serve deployment has three replicas, each with one of them as its own process,
whose stream it passes on, as deployments of engines do; the proxy is Ray's in Python. After a first
part of the load, whose first tokens and processor time are counted, one of the three is killed
(SIGKILL of its process group), and the load goes on. ``cut`` counts streams that failed;
``ms_per_token`` is processor time of the gateway here, of proxy and Serve replicas there, without
engines. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.processes import Unavailable
from benchmarks.fleet.live import COMMAND, Streams, running_fleet
from paceline.bench.machine import machine

__all__ = ["compare"]

_STREAMS: Final = 32
_TOKENS: Final = 100
_PARTS: Final = 3000
_NULL: Final = ("--backend", "null", "--null-step-time", "0.02")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SERVE: Final = (b"ray::ServeReplica", b"ray::ProxyActor")


def _seconds(marks: tuple[bytes, ...], pids: tuple[int, ...] = ()) -> float:
    """Return the processor time of processes with these commands or numbers."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) in pids or (path / "cmdline").read_bytes().startswith(
                marks or (b"?",)
            ):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / _TICKS
        except OSError:
            continue
    return total


async def _measure(at: Any, used: Any, kill: Any) -> dict[str, Any]:
    before = Streams(at, _STREAMS, tokens=_TOKENS)
    async with before.running():
        await before.parts(_PARTS // 4)
        began, parts = used(), before.num_parts
        await before.parts(_PARTS)
        cost = (used() - began) / (before.num_parts - parts)
    during = Streams(at, _STREAMS, tokens=_TOKENS)
    async with during.running():
        await during.parts(_PARTS // 6)
        kill()
        await during.parts(_PARTS // 2)
    counts = during.counts()
    return {
        "streams": counts["streams"],
        "cut": counts["failed"],
        "lost": counts["lost"],
        "ms_per_token": round(1e3 * cost, 4),
        "ttft_p99_s": round(before.counts()["first_p99_s"], 3),
    }


async def _here() -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fleet(Path(folder), replicas=3, serve=_NULL) as fleet,
    ):
        await fleet.settled()
        assert fleet.gateway is not None
        pid = fleet.gateway.pid
        return await _measure(
            fleet,
            lambda: _seconds((), (pid,)),
            lambda: os.killpg(fleet.records()[0].pid, signal.SIGKILL),
        )


class Engine:
    """A Serve deployment's replica: a server of its own, whose answers it passes on."""

    def __init__(self) -> None:
        import httpx

        self._process = subprocess.Popen(
            [*COMMAND, "serve", *_NULL, "--port", "0"], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        found = re.search(r"(http://\S+)/v1 ", self._process.stdout.readline())
        assert found is not None, "the server did not start"
        self._client = httpx.AsyncClient(base_url=found[1], timeout=60)

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that is not well."""
        if self._process.poll() is not None:
            raise RuntimeError("the server ended")

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        body = await request.body()

        async def parts() -> AsyncIterator[bytes]:
            headers = {"content-type": "application/json"}
            async with self._client.stream(
                "POST", "/v1/chat/completions", content=body, headers=headers
            ) as got:
                async for part in got.aiter_raw():
                    yield part

        return StreamingResponse(parts(), media_type="text/event-stream")

    def __del__(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)


@dataclass
class _At:
    url: str


def _engines() -> list[int]:
    """Return the servers of Serve's replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
            if b"serve" in words and Path(f"/proc/{parent}/cmdline").read_bytes().startswith(
                b"ray::ServeReplica"
            ):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(found)


async def _there() -> dict[str, Any]:
    import ray
    from ray import serve

    # or other work goes before its replicas and its proxy
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8155})
        deployment = serve.deployment(
            Engine, num_replicas=3, max_ongoing_requests=64, health_check_period_s=1.0,
            ray_actor_options={"num_cpus": 0},
        )  # fmt: skip
        serve.run(deployment.bind(), route_prefix="/")
        until = time.monotonic() + 60.0
        while len(_engines()) < 3 and time.monotonic() < until:
            await asyncio.sleep(0.2)
        return await _measure(
            _At("http://127.0.0.1:8155"),
            lambda: _seconds(_SERVE),
            lambda: os.killpg(_engines()[0], signal.SIGKILL),
        )
    finally:
        left = _engines()
        serve.shutdown()
        ray.shutdown()
        for pid in left:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def compare() -> dict[str, Any]:
    """Return the figures of both. Raises Unavailable without Ray Serve."""
    if importlib.util.find_spec("ray") is None:
        raise Unavailable('Ray is not in this environment: pip install "ray[serve]"')
    ours = asyncio.run(_here())
    print(f"  ours: {ours}", file=sys.stderr, flush=True)
    return {"ours": ours, "ray_serve": asyncio.run(_there())}


if __name__ == "__main__":
    results = compare()
    print(json.dumps({"bench": "fleet", "machine": machine(), "results": {"ray_serve": results}}))
    sys.exit(0)
