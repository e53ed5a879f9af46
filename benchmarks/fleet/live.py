"""A fleet of real processes: a gateway, ``paceline fleet up``, and streams whose every token is
known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from paceline.fleet.driver import STATUS
from paceline.fleet.replica import Record, read_records

__all__ = ["Fleet", "Stream", "Streams", "running_fleet"]

KEY = "fleet-admin-key-0123"
STEP = 0.02
_CHAT = "/v1/chat/completions"
# a client without one reads the system's certificates
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# seconds; more for a machine that does other work too
_PATIENCE = float(os.environ.get("PATIENCE", "90"))
COMMAND = (sys.executable, "-m", "paceline.cli.main")


@dataclass
class Fleet:
    """One fleet in a folder."""

    folder: Path
    port: int = 0
    gateway: subprocess.Popen[str] | None = None
    controller: subprocess.Popen[str] | None = None
    replicas: int = 3
    serve: tuple[str, ...] = ("--backend", "null", "--null-step-time", str(STEP))
    drain_seconds: float = 2.5
    # further lines of [fleet], and of the pool
    fleet_lines: str = ""
    pool_lines: str = ""
    pool: str = "chat"
    # the gateway's pools, where it listens, and what its pools need beside their names
    pools: tuple[str, ...] = ("chat",)
    host: str = "127.0.0.1"
    listens: str = ""
    gateway_lines: str = ""
    # words before the controller's command, such as those that run it in a network of its own, and
    # the URL that it knows the gateway by
    around: tuple[str, ...] = ()
    gateway_url: str = ""
    more_environ: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def file(self) -> Path:
        return self.folder / "fleet.toml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def environ(self) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **{n: v for n, v in os.environ.items() if n != "PACELINE_API_KEY"},
            "FLEET_KEY": KEY, "PYTHONPATH": os.pathsep.join(paths), **self.more_environ,
        }  # fmt: skip

    def write(self) -> None:
        self.file.write_text(
            f'[fleet]\ngateways = ["{self.gateway_url or self.url}"]\n'
            f'admin_key_env = "FLEET_KEY"\nstate_dir = "state"\n{self.fleet_lines}\n'
            f'[[pools]]\nname = "{self.pool}"\n'
            f"replicas = {self.replicas}\nserve = {json.dumps(self.serve)}\n"
            f"drain_seconds = {self.drain_seconds}\n{self.pool_lines}\n"
        )

    def start_gateway(self) -> None:
        config = self.folder / "gateway.toml"
        tier = json.dumps([f"@{name}" for name in self.pools])
        config.write_text(
            f'spend_storage = ""\n[[models]]\nname = "chat"\ntiers = [{tier}]\n{self.gateway_lines}'
        )
        self.gateway = self._start(
            "gateway", *COMMAND, "gateway", str(config), "--port", str(self.port),
            "--host", self.listens or self.host, PACELINE_API_KEY=KEY,
        )  # fmt: skip
        assert self.gateway.stdout is not None
        line = self.gateway.stdout.readline()
        assert "ready" in line, (self.folder / "gateway.log").read_text()[-2000:]
        self.port = int(line.split("/v1")[0].rpartition(":")[2])

    def start_controller(self) -> None:
        self.write()
        words = (*self.around, *COMMAND, "fleet", "up", str(self.file))
        self.controller = self._start("controller", *words)

    def _start(self, log: str, *words: str, **environ: str) -> subprocess.Popen[str]:
        with open(self.folder / f"{log}.log", "a") as errors:
            return subprocess.Popen(
                words, env=self.environ | environ, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip

    def change(self, *flags: str) -> None:
        """Add flags to the replicas and have the controller read its file again."""
        assert self.controller is not None
        self.serve = (*self.serve, *flags)
        self.write()
        self.controller.send_signal(signal.SIGHUP)

    def kill_controller(self) -> None:
        assert self.controller is not None
        _end(self.controller)
        self.controller = None

    def run(self, action: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "fleet", action, str(self.file), *flags], env=self.environ,
            capture_output=True, text=True, timeout=_PATIENCE,
        )  # fmt: skip

    def records(self) -> list[Record]:
        return [each for each in read_records(self.state) if each.lives()]

    def record(self, name: str) -> Record:
        return next(each for each in self.records() if each.name == name)

    def engine_of(self, record: Record) -> int:
        """Return the process of a replica's engine."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == record.pid and "engine" in _command(int(path.parent.name)):
                    return int(path.parent.name)
        raise AssertionError("the replica has no engine")

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.state / STATUS).read_text())["pools"][
                self.pool
            ]
        except (OSError, KeyError, ValueError):
            return {"is_settled": False, "members": [], "version": ""}
        return found

    def log(self, name: str = "controller") -> str:
        return (self.folder / f"{name}.log").read_text()

    async def until(self, condition: Any, seconds: float = _PATIENCE) -> float:
        """Wait for it; return the seconds it took."""
        began = time.monotonic()
        while not condition(self.status()):
            assert time.monotonic() - began < seconds, (self.status(), self.log()[-4000:])
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def settled(self, but: Sequence[str] = ()) -> float:
        """Wait until the pool is as the file says, without the replicas ``but``."""
        return await self.until(
            lambda s: s["is_settled"] and not {m["name"] for m in s["members"]} & set(but)
        )

    def close(self) -> None:
        for process in (self.controller, self.gateway):
            if process is not None:
                _end(process)
        for record in read_records(self.state):
            record.end(kill=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@contextlib.contextmanager
def running_fleet(folder: Path, **fields: Any) -> Iterator[Fleet]:
    """A gateway and a controller whose replicas are about to start."""
    fleet = Fleet(folder, **fields)
    try:
        fleet.start_gateway()
        fleet.start_controller()
        yield fleet
    finally:
        fleet.close()


@dataclass
class Stream:
    """One stream as its caller had it."""

    text: str = ""
    error: str = ""
    done: bool = False
    # when it was asked for, by time.monotonic()
    began: float = 0.0
    first: float = 0.0
    # longest time between two parts, s
    gap: float = 0.0


@dataclass
class Streams:
    """Callers that stream one answer after another until they are told to stop."""

    fleet: Fleet
    count: int
    tokens: int = 100
    # rest between a caller's streams, s
    rest: float = 0.0
    # seconds over which their first streams begin
    spread: float = 0.0
    found: list[tuple[int, Stream]] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    num_parts: int = 0
    _stop: bool = False

    def body(self, number: int) -> dict[str, Any]:
        return {
            "model": "chat", "stream": True, "max_tokens": self.tokens, "temperature": 0.0,
            "ignore_eos": True, "messages": [{"role": "user", "content": f"Tell me {number}."}],
        }  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Streams]:
        """Stream; at the end every stream is waited for."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, verify=_NO_TLS, limits=limits) as client:
            client.headers["Authorization"] = f"Bearer {KEY}"
            tasks = [asyncio.create_task(self._call(client, n)) for n in range(self.count)]
            try:
                yield self
            finally:
                self._stop = True
                await asyncio.gather(*tasks)
            # what they say where nothing happens
            replies = [self._stream(client, n) for n in range(self.count)]
            for number, stream in enumerate(await asyncio.gather(*replies)):
                assert stream.done, stream
                self.expected[number] = stream.text

    async def parts(self, count: int) -> None:
        """Wait for so many more parts of all streams together."""
        until = self.num_parts + count
        async with asyncio.timeout(_PATIENCE):
            while self.num_parts < until:
                await asyncio.sleep(0.01)

    async def _call(self, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(self.spread * number / self.count)
        while not self._stop:
            self.found.append((number, await self._stream(client, number)))
            await asyncio.sleep(self.rest)

    async def _stream(self, client: httpx.AsyncClient, number: int) -> Stream:
        began = last = time.monotonic()
        stream = Stream(began=began)
        try:
            async with client.stream("POST", self.fleet.url + _CHAT, json=self.body(number)) as got:
                if got.status_code != 200:
                    stream.error = f"{got.status_code} {(await got.aread())[:300]!r}"
                    return stream
                async for line in got.aiter_lines():
                    if line == "data: [DONE]":
                        stream.done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        if "error" in chunk:
                            stream.error = str(chunk["error"])
                        said = "".join(
                            c["delta"].get("content") or "" for c in chunk.get("choices", ())
                        )
                        if said:
                            now = time.monotonic()
                            if stream.text:
                                stream.gap = max(stream.gap, now - last)
                            else:
                                stream.first = now - began
                            last = now
                            stream.text += said
                            self.num_parts += 1
        except httpx.HTTPError as error:
            stream.error = repr(error)
        return stream

    def counts(self) -> dict[str, float]:
        """Return how many streams there were, failed, lost text, and had text twice; and gaps."""
        failed = [s for _, s in self.found if s.error or not s.done]
        whole = [(self.expected[n], s.text) for n, s in self.found if not s.error and s.done]
        gaps = sorted(s.gap for _, s in self.found)
        return {
            "streams": len(self.found),
            "failed": len(failed),
            "lost": sum(len(text) < len(want) or (len(text) == len(want) and text != want)
                        for want, text in whole),
            "doubled": sum(len(text) > len(want) for want, text in whole),
            "gap_p99_s": gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0,
            "gap_max_s": gaps[-1] if gaps else 0.0,
            "first_p99_s": self.first_p99(),
        }  # fmt: skip

    def first_p99(self, begun: float = -math.inf, until: float = math.inf) -> float:
        """Return the 99th percentile of first tokens of the streams that began in this time."""
        firsts = sorted(s.first for _, s in self.found if begun <= s.began < until)
        return firsts[int(0.99 * (len(firsts) - 1))] if firsts else 0.0

    def errors(self) -> list[str]:
        return [s.error or "no end" for _, s in self.found if s.error or not s.done][:5]
