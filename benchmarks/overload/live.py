"""The same for a live server: ``paceline serve`` over the null backend, through HTTP.

The client is ``paceline bench``. The server's capacity is measured first, by more callers than it
has slots, each of which sends its next request as soon as it has an answer. Then requests arrive at
LOAD times that rate. Forecasts and outcomes are read from the server's log, and the number of
waiting requests from ``/metrics`` every second.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import get
from benchmarks.common.server import PacelineServer
from benchmarks.overload.judging import MINUTE, Ratios, by_minute, of_possible
from benchmarks.overload.serving import CHAT, PLACES
from paceline.server.observability.snapshot.scrape import parse_metrics

__all__ = ["LOAD", "live", "told_and_came"]

LOAD: Final = 2.0
STEP: Final = 0.02
OUTPUT: Final = 50
_LOGGED: Final = re.compile(r"predicted_ttft=([\d.]+) ttft=([\d.]+)")
# seconds of the run that measures the server's capacity
_MEASURED: Final = 20


class _Watch:
    """Reads the number of waiting requests every second."""

    def __init__(self, port: int) -> None:
        self.most = 0
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            status, body = asyncio.run(get(self._port, "/metrics", timeout=30.0))
            if status == 200:
                waiting = parse_metrics(body.decode(), 0.0).total("vllm:num_requests_waiting")
                self.most = max(self.most, int(waiting))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _ask(port: int, output: Path, *flags: str) -> dict[str, Any]:
    """Run the client."""
    assert CHAT.ttft is not None
    target = ("--slo-ttft-ms", f"{1e3 * CHAT.ttft:g}", "--send-slo")
    argv = (
        sys.executable, "-m", "paceline.cli.main", "bench", "--url", f"http://127.0.0.1:{port}",
        "--endpoint", "completions", "--input-len", "8", "--output-len", str(OUTPUT),
        *target, *flags, "--json", "--output", str(output),
    )  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if not output.is_file():
        raise RuntimeError(f"the client failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def told_and_came(log: str) -> list[float]:
    """Return predicted over actual times to first token, from a server's log."""
    pairs = ((float(told), float(came)) for told, came in _LOGGED.findall(log))
    return [max(1e-9, told) / came for told, came in pairs if came]


def live(minutes: int) -> dict[str, Any]:
    """Run for ``minutes`` minutes, and return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        server = PacelineServer(
            "--backend", "null", "--null-step-time", str(STEP), "--max-num-seqs", str(PLACES),
            "--log-level", "info", log=root / "server.log",
        )  # fmt: skip
        try:
            measured = _ask(
                server.port, root / "capacity.json", "--concurrency", str(3 * PLACES),
                "--duration", str(_MEASURED), "--warmup", "20",
            )  # fmt: skip
            capacity = measured["summary"]["request_rate"]
            logged = len(server.log())
            watch = _Watch(server.port)
            try:
                found = _ask(
                    server.port, root / "run.json", "--rate", str(round(LOAD * capacity, 3)),
                    "--duration", str(minutes * MINUTE), "--num-requests", "1000000",
                    "--seed", "1",
                )  # fmt: skip
            finally:
                watch.close()
            forecasts = told_and_came(server.log()[logged:])
        finally:
            server.close()
    return figures(found, capacity, minutes, watch.most, forecasts)


def figures(
    found: dict[str, Any], capacity: float, minutes: int, waiting: int, forecasts: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a run of the client."""
    assert CHAT.ttft is not None
    judged = by_minute(
        (
            (each["sent"], not each["failure"] and each["chunks"][0] - each["sent"] <= CHAT.ttft)
            for each in found["requests"]
        ),
        minutes,
    )
    shares = of_possible(judged, capacity)
    told = Ratios.of(forecasts)
    return {
        "worst_minute_of_possible": round(min(shares), 3),
        "minutes_of_possible": [round(share, 3) for share in shares],
        "load": LOAD,
        "capacity_rps": round(capacity, 2),
        "max_waiting": waiting,
        "forecast_p50_ratio": told.p50,
        "forecast_p90_ratio": told.p90,
        "refused": found["refused"],
        "failed": found["failed"],
        "kept_up": found["kept_up"],
    }
