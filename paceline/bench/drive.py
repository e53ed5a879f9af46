"""The thin part with sockets and a clock: sends a plan's requests at their times, and feeds the
responses to ``Answer``.

One process on one core: its delay is measured, by every send of an open loop and by a timer, and
reported next to the latencies, which contain it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

import msgspec

from paceline import __version__
from paceline.bench.answers import Answer, Outcome
from paceline.bench.plan import ENDPOINTS, Bodies, Plan
from paceline.errors import ConfigError
from paceline.http.fields import show_url
from paceline.sim.arrival import Arrival

__all__ = ["Run", "Server", "drive", "prepare"]

_READ_BYTES: Final = 1 << 16
# seconds between two measurements of a timer's delay
_TICK_SECONDS: Final = 0.01
# pause, s, of a caller in a closed loop after no answer, or a dead server would get thousands of
# requests a second
_PAUSE_SECONDS: Final = 0.1
# words of the two prompts that measure the tokens of a word
_PROBES: Final = (16, 144)


@dataclass(frozen=True, slots=True)
class Server:
    """Address of the server."""

    host: str
    port: int
    tls: bool
    # prefix of every path, such as "/v1"
    base: str
    # value of the Host header
    authority: str
    key: str = ""

    @classmethod
    def parse(cls, url: str, key: str = "") -> Server:
        """Parse ``http://host:8000``, ``host:8000`` or ``https://host/any/v1``; no path: /v1.

        Raises:
            ConfigError: anything else.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
            # otherwise looking it up would fail later
            (parts.hostname or "").encode("idna")
        except ValueError:
            # the error text is not repeated, as a part of a password may be read as a port
            raise ConfigError(
                f"--url {show_url(url)} has no valid host or port, as http://127.0.0.1:8000 has"
            ) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                f"--url {show_url(url)} is not an address such as http://127.0.0.1:8000, which has "
                "no user or password"
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has characters that are not allowed in a header")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/") or "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), tls, base, parts.netloc, key)

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """Return the bytes of a GET, or of a POST if there is a body."""
        lines = [
            f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1",
            f"Host: {self.authority}",
            f"User-Agent: paceline/{__version__}",
            "Accept: text/event-stream, application/json",
        ]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


class _Connections:
    """Connections to one server, reused if it allows that."""

    def __init__(self, server: Server, clock: Callable[[], float]) -> None:
        self._server = server
        self._clock = clock
        self._tls = ssl.create_default_context() if server.tls else None
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: bytes, timeout: float) -> Answer:
        """Send a request and return its answer. Errors of server or network are in the answer."""
        answer = Answer()
        try:
            async with asyncio.timeout(timeout):
                while not await self._exchange(request, answer):
                    answer = Answer()
        except TimeoutError:
            answer.fail("timeout", f"not done within {timeout:g} s")
        return answer

    async def _exchange(self, request: bytes, answer: Answer) -> bool:
        """Return False if a reused connection turned out to be closed: send again."""
        kept = bool(self._idle)
        try:
            reader, writer = self._idle.pop() if kept else await self._connect()
        except OSError as error:
            answer.fail("cannot connect", str(error) or type(error).__name__)
            return True
        try:
            writer.write(request)
            while not answer.done:
                data = await reader.read(_READ_BYTES)
                answer.feed(self._clock(), data)
        except OSError as error:
            answer.fail("cut off" if answer.begun else "no answer", str(error))
        finally:
            if answer.reusable and not reader.at_eof():
                self._idle.append((reader, writer))
            else:
                writer.close()
        return answer.begun or not kept

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        server = self._server
        return await asyncio.open_connection(server.host, server.port, ssl=self._tls)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self._idle.clear()


async def prepare(server: Server, bodies: Bodies, *, warmup: int, timeout: float) -> Bodies:
    """Ask the server for the facts that a run needs: the model's name if ``bodies`` has none,
    whether it takes ``stream_options``, the tokens of a word; then warm it up. No prompt of the run
    is sent, as it would stay in the server's prefix cache.

    Raises:
        ConfigError: it does not answer, or refuses even this.
    """
    connections = _Connections(server, time.perf_counter)
    try:
        if not bodies.model:
            model = await _model(connections, server, timeout)
            bodies = replace(bodies, model=model)
        samples = []
        for count in _PROBES:
            answer = await _probe(connections, server, bodies, count, timeout)
            if answer.status in (400, 422) and bodies.include_usage:
                bodies = replace(bodies, include_usage=False)
                answer = await _probe(connections, server, bodies, count, timeout)
            found = answer.results()
            if found["failure"]:
                raise ConfigError(
                    f"the server does not answer correctly: {found['failure']}: {found['detail']}"
                )
            if found["prompt_tokens"]:
                samples.append((count, found["prompt_tokens"]))
        if len(samples) == len(_PROBES):
            bodies = replace(bodies, words=bodies.words.fit(samples))
        for number in range(warmup):
            body, _, _ = replace(bodies, prompts=None).make(Arrival(0.0, 256, 32), -1 - number)
            await connections.ask(server.request(ENDPOINTS[bodies.endpoint], body), timeout)
        return bodies
    finally:
        await connections.close()


async def _model(connections: _Connections, server: Server, timeout: float) -> str:
    answer = await connections.ask(server.request("/models"), timeout)
    try:
        name = msgspec.json.decode(answer.body)["data"][0]["id"]
        if answer.status == 200 and isinstance(name, str):
            return name
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        pass
    found = answer.results()
    raise ConfigError(
        f"{server.base}/models names no model ({found['failure']}: {found['detail']}): is the "
        "server up, is the key right? --model NAME names one too"
    )


async def _probe(
    connections: _Connections, server: Server, bodies: Bodies, words: int, timeout: float
) -> Answer:
    plain = replace(bodies, prompts=None, words=replace(bodies.words, per_word=1.0, overhead=0.0))
    body, _, _ = plain.make(Arrival(0.0, words, 1), -(10**6) - words)
    return await connections.ask(server.request(ENDPOINTS[bodies.endpoint], body), timeout)


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a driver."""

    # in order of their numbers
    outcomes: tuple[Outcome, ...]
    # seconds by which timers of the generator were late
    lags: tuple[float, ...]
    # whether it was cancelled; requests in flight then are not among the outcomes
    interrupted: bool = False


async def drive(
    server: Server,
    plan: Plan,
    bodies: Bodies,
    *,
    timeout: float,
    progress: Callable[[Outcome], None] = lambda _: None,
) -> Run:
    """Send a plan's requests, and wait until all are answered or given up, or until the task is
    cancelled.

    Raises:
        ConfigError: a malformed row of a trace.
    """
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    connections = _Connections(server, clock)
    outcomes: list[Outcome] = []
    lags: list[float] = []
    path = ENDPOINTS[bodies.endpoint]
    numbered = enumerate(plan.arrivals)

    async def send(number: int, arrival: Arrival, made: tuple[bytes, int | None, int]) -> None:
        body, prompt_tokens, output_tokens = made
        sent = clock()
        answer = await connections.ask(server.request(path, body), timeout)
        outcome = Outcome(
            number=number,
            due=arrival.at if plan.concurrency is None else None,
            sent=sent,
            ended=clock(),
            asked_prompt_tokens=prompt_tokens,
            asked_output_tokens=output_tokens,
            slo=(arrival.ttft, arrival.tpot, arrival.deadline),
            slo_class=arrival.slo_class,
            tenant=arrival.tenant,
            **answer.results(),
        )
        outcomes.append(outcome)
        progress(outcome)

    async def open_loop() -> None:
        async with asyncio.TaskGroup() as group:
            for number, arrival in numbered:
                # made in the time until it is due
                made = bodies.make(arrival, number)
                await asyncio.sleep(max(0.0, arrival.at - clock()))
                group.create_task(send(number, arrival, made))

    async def one_of_closed_loop() -> None:
        for number, arrival in numbered:
            if plan.duration is not None and clock() >= plan.duration:
                return
            await send(number, arrival, bodies.make(arrival, number))
            if outcomes[-1].status == 0 and outcomes[-1].failure:
                await asyncio.sleep(_PAUSE_SECONDS)

    async def watch() -> None:
        while True:
            due = clock() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            lags.append(max(0.0, clock() - due))

    async def everything() -> None:
        try:
            if plan.concurrency is None:
                await open_loop()
            else:
                async with asyncio.TaskGroup() as group:
                    for _ in range(plan.concurrency):
                        group.create_task(one_of_closed_loop())
        except* ConfigError as errors:
            # such as a malformed row of a trace
            raise errors.exceptions[0] from None

    watching = asyncio.create_task(watch())
    interrupted = False
    try:
        await everything()
    except asyncio.CancelledError:
        # by Ctrl-C: the requests that have ended by then are worth a report
        interrupted = True
    finally:
        watching.cancel()
        await connections.close()
    outcomes.sort(key=lambda outcome: outcome.number)
    return Run(tuple(outcomes), tuple(lags), interrupted)
