from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.client import Timing, complete
from benchmarks.common.load import (
    MAX_OUTPUT,
    MAX_PROMPT,
    TRACE,
    Load,
    arrivals,
    describe,
    name_lengths,
    read_lengths,
    replay,
)
from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.server import Server
from benchmarks.common.statistics import percentile
from benchmarks.peers.report import online_table


class FakeServer:
    """Streams as many events as asked for; a prompt's first id chooses what goes wrong: 1 no
    chunked encoding, 2 status 400, 3 an error event, 4 a token too few, 5 nothing, 6 ends early."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        kind, wanted = body["prompt"][0], body["max_tokens"]
        chunked = kind != 1
        if kind == 5:
            # until the client gives up
            await reader.read()
            return
        status = b"400 Bad Request" if kind == 2 else b"200 OK"
        encoding = b"Transfer-Encoding: chunked\r\n" if chunked else b""
        writer.write(b"HTTP/1.1 " + status + b"\r\n" + encoding + b"\r\n")

        def send(event: dict[str, Any] | str) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}\n\n".encode()
            # cut in the middle, as networks do
            for part in (data[:9], data[9:]) if chunked else (data,):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)

        if kind == 2:
            send({"error": {"message": "prompt of 1 token"}})
        elif kind == 3:
            send({"error": {"message": "the engine died"}})
        else:
            for _ in range(wanted - (kind == 4)):
                send({"choices": [{"text": "x"}], "usage": None})
            if kind != 6:
                usage = {"completion_tokens": wanted - (kind == 4)}
                send({"choices": [], "usage": usage})
                send("[DONE]")
        if chunked and kind != 6:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


async def with_server(prompts: list[list[int]], output: int) -> tuple[FakeServer, list[Timing]]:
    fake = FakeServer()
    port = await fake.start()
    timings = [
        await complete(port, "m", prompt, output, timeout=0.3 if prompt[0] == 5 else 30)
        for prompt in prompts
    ]
    await fake.stop()
    return fake, timings


def test_a_completion_is_timed_event_by_event() -> None:
    fake, (chunked, plain) = asyncio.run(with_server([[0, 7], [1, 7]], 5))
    for timing in (chunked, plain):
        assert not timing.error and timing.output_tokens == 5 and len(timing.events) == 5
        assert timing.ttft > 0 and len(timing.gaps) == 4
    body = fake.bodies[0]
    assert body["prompt"] == [0, 7] and body["max_tokens"] == 5
    assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0


def test_what_a_server_does_wrong_is_an_error_and_never_a_timing() -> None:
    _, timings = asyncio.run(with_server([[2], [3], [4], [5], [6]], 3))
    for timing, message in zip(
        timings,
        ("prompt of 1 token", "the engine died", "asked for 3 tokens, got 2", "not done within",
         "Incomplete|asked for 3 tokens, got 0"),
        strict=True,
    ):  # fmt: skip
        assert any(part in timing.error for part in message.split("|")), timing.error
        assert timing.output_tokens == 0 and timing.events == ()
    refused = asyncio.run(complete(1, "m", [0], 1, timeout=5))
    assert "Error" in refused.error


def test_figures_by_hand() -> None:
    timings = [
        # TTFT 0.5, TPOT 0.05: within
        Timing(10.0, (10.5, 10.55, 10.6), 3),
        # one event of two tokens counts as two: TPOT 0.1
        Timing(10.0, (10.4, 10.6), 3),
        # late first token
        Timing(10.0, (11.5, 11.51), 2),
        # slow tokens
        Timing(10.0, (10.1, 10.4), 2),
        # a single token has no TPOT
        Timing(10.0, (10.2,), 1),
        Timing(10.0, (), 0, "lost"),
    ]
    figures = describe(timings)
    assert figures["requests"] == 6 and figures["failed"] == 1
    assert figures["first_error"] == "lost"
    assert figures["attainment"] == pytest.approx(3 / 6)
    assert figures["ttft_ms"]["p50"] == 400.0
    assert figures["tpot_ms"]["p50"] == pytest.approx(75.0)
    assert figures["itl_ms"]["p99"] == pytest.approx(
        percentile([0.05, 0.05, 0.2, 0.01, 0.3], 0.99) * 1e3, abs=0.1
    )
    table = online_table({"2": {"a": figures, "b": {"absent": "no server"}}}, {"a": "q4/int8"})
    assert len(table.splitlines()) == 2 and "50%" in table and " q4/int8 " in table
    nothing = describe([Timing(0.0, (), 0, "lost")])
    assert nothing["attainment"] == 0 and "ttft_ms" not in nothing


def test_arrivals_are_poisson_with_the_trace_s_lengths_and_repeat() -> None:
    plan = arrivals(20.0, 100.0, None, 1000, seed=3)
    assert plan == arrivals(20.0, 100.0, None, 1000, seed=3)
    assert plan != arrivals(20.0, 100.0, None, 1000, seed=4)
    assert len(plan) == 2000
    gaps = [b.at - a.at for a, b in itertools.pairwise(plan)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.15)
    assert statistics.mean(len(a.prompt) for a in plan) == pytest.approx(313, rel=0.1)
    assert statistics.mean(a.output for a in plan) == pytest.approx(60, rel=0.15)
    assert all(1 <= len(a.prompt) <= MAX_PROMPT and 1 <= a.output <= MAX_OUTPUT for a in plan)


def test_lengths_of_a_trace_are_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,100,40\n1,99999,1\n2,8,99999\n")
    pairs = read_lengths(trace, 6, seed=0)
    # one from each of six equal parts, in random order
    assert Counter(pairs) == {(25, 10): 2, (MAX_PROMPT, 1): 2, (2, MAX_OUTPUT): 2}
    assert pairs != read_lengths(trace, 6, seed=1)
    assert name_lengths(trace) == "trace.csv times 0.25"
    assert name_lengths(tmp_path / "none.csv") == "lognormal, means 313 and 60"


def test_the_real_trace_has_the_means_we_synthesise() -> None:
    if not TRACE.is_file():
        pytest.skip("shared/traces is not here")
    pairs = read_lengths(TRACE, 5000, seed=0)
    assert statistics.mean(prompt for prompt, _ in pairs) == pytest.approx(313, rel=0.1)
    assert statistics.mean(output for _, output in pairs) == pytest.approx(60, rel=0.1)


def test_requests_are_sent_on_time_whether_or_not_others_are_done() -> None:
    async def run() -> list[Timing]:
        fake = FakeServer()
        port = await fake.start()
        stuck = asyncio.create_task(complete(port, "m", [5], 1, timeout=20))
        plan = [Load(0.02 * i, [0], 2) for i in range(5)]
        timings = await replay(port, "m", plan)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        await fake.stop()
        return timings

    began = time.monotonic()
    timings = asyncio.run(run())
    assert all(not timing.error for timing in timings)
    sent = [timing.sent for timing in timings]
    assert sent == sorted(sent)
    # never early; late it may be, on a busy machine
    assert sent[-1] - began >= 0.02 * 4


class NullPeer:
    """``paceline serve`` with the null backend, or a command that is no server."""

    name = "null"
    variants = ("x",)
    served = "auto/auto"

    def __init__(self, *argv: str) -> None:
        self._argv = argv

    def setup(self) -> None:
        pass

    def worker(self, variant: str, *, prefix_caching: bool) -> Command:
        raise AssertionError("not used")

    def server(self, port: int) -> Command:
        return Command((sys.executable, *(part.format(port=port) for part in self._argv)))


def test_a_real_server_is_waited_for_frozen_and_measured(tmp_path: Path) -> None:
    from benchmarks.common.processes import free_port

    peer = NullPeer(
        "-m", "paceline.cli.main", "serve", "--backend", "null", "--host", "127.0.0.1",
        "--port", "{port}",
    )  # fmt: skip
    # the null backend's vocabulary is bytes and a few more
    server = Server(peer, free_port(), tmp_path / "log", vocab_size=250)
    try:
        assert server.startup > 0
        assert server.served == "int64/int64", "what its ready line says it chose"
        server.freeze()
        plan = [Load(0.01 * i, [100 + i] * 20, 4) for i in range(5)]
        figures = server.measure(plan)
        assert figures["requests"] == 5 and figures["failed"] == 0, figures
        assert figures["itl_ms"]["p50"] >= 0
        assert server.peak_rss_mb() > 20
    finally:
        server.close()


def test_a_server_that_ends_is_absent_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="the server ended: bad flag 9"):
        Server(
            NullPeer("-c", "raise SystemExit('bad flag 9')"),
            9,
            tmp_path / "log",
            vocab_size=250,
        )
