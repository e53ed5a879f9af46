"""Latency of ``/metrics`` while the server is as busy as possible.

Method: a real ``paceline serve`` over the null backend, whose steps take no time, so that the API
process has new tokens for all STREAMS streams as fast as it can write them; MODEL=NAME takes a
model instead. A separate process keeps STREAMS streamed completions open and discards their
tokens. Meanwhile /metrics is requested RATE times a second for SECONDS seconds, by turns on the
server's port and on ``--metrics-port``, each over a new connection and over one kept open; before
that, 50 times each while the server is idle. A time runs from before the connection (or the
request, if the connection is kept open) to the last byte of the answer, so it includes the client's
own wake-ups. Two more rows show the cost of the rest: ``loop`` is /version, whose handler does
nothing, so the time of any answer of the event loop; ``floor`` is a process that sends as many
bytes and does nothing else, so the time of the machine. The streams' reader, the engine, the API
process and this one share the cores; the streams' rate is printed with the table. ``staleness`` is
the age of its numbers that the exporter reports. The target is for ``--metrics-port``: p99 under
5 ms over either kind of connection, the client's wake-ups included. The last line is JSON.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common.server import PacelineServer
from benchmarks.common.statistics import percentile
from paceline.bench.machine import machine

STREAMS = 64
QUICK = bool(os.environ.get("QUICK"))
SECONDS = 5.0 if QUICK else 20.0
RATE = 10.0
_IDLE_SCRAPES = 50
TARGET_MS = 5.0


def drain(port: int, streams: int, received: multiprocessing.Queue[int]) -> None:
    """Keep ``streams`` streams open until SIGTERM, and count their tokens."""
    body = json.dumps(
        {"prompt": "go", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()

    def start() -> None:
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(head + body)
        selector.register(connection, selectors.EVENT_READ)

    selector = selectors.DefaultSelector()
    for _ in range(streams):
        start()
    events, told = 0, time.monotonic()
    while True:
        for key, _ in selector.select(1.0):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 20)
            events += data.count(b"data: {")
            if not data or b"[DONE]" in data:
                selector.unregister(connection)
                connection.close()
                start()
        if time.monotonic() - told > 0.5:
            received.put(events)
            events, told = 0, time.monotonic()


def floor(body: bytes, told: multiprocessing.Queue[int]) -> None:
    """Answer every request with ``body``, one connection at a time."""
    listener = socket.create_server(("127.0.0.1", 0))
    told.put(listener.getsockname()[1])
    answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    while True:
        connection, _ = listener.accept()
        while connection.recv(65536):
            connection.sendall(answer)


class Port:
    """An address to scrape, over a new connection each time or a kept one."""

    def __init__(self, port: int, path: str, *, keep: bool) -> None:
        self._port, self._path, self._keep = port, path, keep
        self._kept: http.client.HTTPConnection | None = None

    def fetch(self) -> tuple[float, bytes]:
        """Scrape once; return the seconds, and the body."""
        started = time.perf_counter()
        connection = self._kept or http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("GET", self._path)
        answer = connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - started
        assert answer.status == 200, (answer.status, body)
        if self._keep:
            self._kept = connection
        else:
            connection.close()
        return seconds, body


def summary(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    return {
        "p50_ms": round(1e3 * statistics.median(seconds), 3),
        "p90_ms": round(1e3 * percentile(seconds, 0.90), 3),
        "p99_ms": round(1e3 * percentile(seconds, 0.99), 3),
        "max_ms": round(1e3 * max(seconds), 3),
    }


def main() -> None:
    model = os.environ.get("MODEL")
    what = (model,) if model else ("--backend", "null")
    flags = ("--metrics-port", "0", "--max-num-seqs", str(STREAMS))
    with (
        tempfile.TemporaryDirectory() as folder,
        PacelineServer(*what, *flags, log=Path(folder) / "log") as server,
    ):
        measure(model, server.port, int(server.line(r"metrics_listening .*port=(\d+)")[1]))


def measure(model: str | None, port: int, metrics_port: int) -> None:
    """Measure a server with both listeners, and report."""
    context = multiprocessing.get_context("spawn")
    received: multiprocessing.Queue[int] = context.Queue()
    reader = context.Process(target=drain, args=(port, STREAMS, received), daemon=True)
    sample = Port(metrics_port, "/metrics", keep=False).fetch()[1]
    idler = context.Process(target=floor, args=(sample, received), daemon=True)
    idler.start()
    places = {
        "server port, new connection": Port(port, "/metrics", keep=False),
        "server port, kept": Port(port, "/metrics", keep=True),
        "metrics port, new connection": Port(metrics_port, "/metrics", keep=False),
        "metrics port, kept": Port(metrics_port, "/metrics", keep=True),
        "loop (/version, kept)": Port(port, "/version", keep=True),
        "floor (kept)": Port(received.get(timeout=60), "/", keep=True),
    }
    try:
        idle = {
            name: summary([place.fetch()[0] for _ in range(_IDLE_SCRAPES)])
            for name, place in places.items()
        }
        reader.start()
        received.get(timeout=60)
        time.sleep(1.0)
        while not received.empty():
            received.get()
        busy: dict[str, list[float]] = {name: [] for name in places}
        ages: list[float] = []
        size = 0
        began = time.monotonic()
        turn = 0
        while time.monotonic() - began < SECONDS:
            for name, place in places.items():
                seconds, body = place.fetch()
                busy[name].append(seconds)
                if name.startswith("metrics port"):
                    ages.append(float(body.rsplit(b" ", 1)[1]))
                    size = len(body)
            turn += 1
            time.sleep(max(0.0, began + turn / RATE - time.monotonic()))
        took = time.monotonic() - began
        events = 0
        while not received.empty():
            events += received.get()
    finally:
        reader.terminate()
        idler.terminate()
    report(model, idle, busy, ages, events / took, size)


def report(
    model: str | None,
    idle: dict[str, dict[str, float]],
    busy: dict[str, list[float]],
    ages: list[float],
    events_per_second: float,
    size: int,
) -> None:
    """Print a table for people and a line for programs."""
    print(
        f"{STREAMS} streams on {model or 'the null backend'}: {events_per_second:.0f} events/s; "
        f"/metrics is {size} bytes; {len(ages) // 2} scrapes of each, {RATE:g} a second"
    )
    columns = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    heads = "".join(f"{column[:3]:>8}" for column in columns)
    print(f"{'milliseconds':30} idle{heads[5:]}  busy{heads[6:]}")
    rows = {name: summary(seconds) for name, seconds in busy.items()}
    for name, row in rows.items():
        numbers = [idle[name][column] for column in columns] + [row[column] for column in columns]
        print(f"{name:30}" + "".join(f"{number:8.2f}" for number in numbers))
    staleness = summary(ages)
    print(f"staleness of the metrics port: p50 {staleness['p50_ms']} ms, max {staleness['max_ms']}")
    worst = max(row["p99_ms"] for name, row in rows.items() if name.startswith("metrics port"))
    line = {
        "bench": "metrics_latency",
        "machine": machine(),
        "p99_ms": worst,
        "within_target": worst < TARGET_MS,
        "model": model or "null",
        "streams": STREAMS,
        "events_per_s": round(events_per_second),
        "bytes": size,
        "idle": idle,
        "busy": rows,
        "staleness": staleness,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
