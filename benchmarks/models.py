"""Several models in one server: swaps, floods that take turns, and what a neighbour costs.

Method. ``paceline serve`` with two formats of one model, as two models, is asked over HTTP by
callers that each wait for their answer. MODELS names them (default: smollm2-135m as int8 and q4;
``null`` needs none), COUNT the requests of a flood for each, FLAGS more flags of every server, such
as ``--packed-cache 2GiB``. QUICK=1 takes fewer.

* ``swap_s``: a request for the model that is not in memory, room for one, until its answer of one
  token, less that of a model in memory; median of the swaps.
* ``resident_p99_ratio_while_loading``: p99 of such answers of a model in memory while the other is
  loaded and unloaded all the time, over p99 without.
* ``alternating_fraction``: both have a queue, room for one: requests a second over those if each
  queue is served whole, with one swap between.
* ``two_resident_fraction``: the same queues, both in memory and at once: the seconds of one after
  the other over the seconds together.
* ``one_model_cost``: requests a second of a server with ``--models-dir`` over those of plain
  ``serve``, in turns.
* ``tpot_within``: not measured here. ``evicted_in_use`` counts answers cut short in all of this,
  ``errors_5xx`` answers of that class.

The last line is JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.common.server import PacelineServer
from benchmarks.common.statistics import percentile
from paceline.bench.machine import machine

QUICK: Final = bool(os.environ.get("QUICK"))
MODELS: Final = os.environ.get("MODELS", "smollm2-135m,dtype=int8 smollm2-135m,dtype=q4").split()
COUNT: Final = int(os.environ.get("COUNT", "8" if QUICK else "60"))
FLAGS: Final = os.environ.get("FLAGS", "").split()
TOKENS: Final = 32
CALLERS: Final = 4
SWAPS: Final = 4 if QUICK else 12
PAIRS: Final = 1 if QUICK else 5


class Callers:
    """Requests, and how they ended."""

    def __init__(self) -> None:
        self.errors_5xx = self.cut_short = 0
        self._lock = threading.Lock()

    def ask(self, server: PacelineServer, model: str | None, tokens: int = TOKENS) -> float:
        """Return the seconds of one answer."""
        body: dict[str, Any] = {
            "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0,
        }  # fmt: skip
        if model is not None:
            body["model"] = model
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        read = json.loads(answer.read())
        connection.close()
        if 400 <= answer.status < 500:
            # a refusal would pass for a fast answer
            raise RuntimeError(f"{answer.status}: {read}")
        made = read.get("usage", {}).get("completion_tokens", 0)
        with self._lock:
            self.errors_5xx += answer.status >= 500
            self.cut_short += answer.status < 400 and made < tokens
        return time.monotonic() - began

    def flood(self, server: PacelineServer, models: list[str | None], count: int) -> float:
        """Have CALLERS for each model ask ``count`` times; return the seconds."""
        left = {model: iter(range(count)) for model in models}

        def call(model: str | None) -> None:
            for _ in left[model]:
                self.ask(server, model)

        began = time.monotonic()
        _together([lambda m=model: call(m) for model in models for _ in range(CALLERS)])  # type: ignore[misc]
        return time.monotonic() - began


def _together(work: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(work)) as threads:
        for each in [threads.submit(one) for one in work]:
            each.result()


@contextmanager
def serving(*flags: str, log: Path) -> Iterator[PacelineServer]:
    server = PacelineServer(*flags, "--no-ui", "--prefix-cache-memory", "1MiB", *FLAGS, log=log)
    try:
        yield server
    finally:
        server.close()


def two(*flags: str) -> tuple[str, ...]:
    names = zip("ab", MODELS, strict=True)
    return (*(each for name, model in names for each in ("--model", f"{name}={model}")), *flags)


def room_for_one(callers: Callers, log: Path) -> dict[str, float]:
    """Return the swap's seconds, and the part of the rate that alternating floods reach."""
    with serving(*two("--models-max", "1", "--memory", "4GiB"), log=log) as server:
        warm = statistics.median(callers.ask(server, "a", 1) for _ in range(5))
        swaps = [callers.ask(server, "ba"[n % 2], 1) - warm for n in range(SWAPS)]
        callers.ask(server, "a", 1)
        whole = callers.flood(server, ["a"], COUNT)
        whole += callers.flood(server, ["b"], COUNT)
        callers.ask(server, "a", 1)
        both = callers.flood(server, ["a", "b"], COUNT)
    return {"swap_s": statistics.median(swaps), "alternating_fraction": whole / both}


def both_resident(callers: Callers, log: Path) -> dict[str, float]:
    """Return what two models in memory reach, and what a load costs the other."""
    with serving(*two("--memory", "4GiB"), log=log) as server:
        for name in ("a", "b"):
            callers.ask(server, name)
        apart = callers.flood(server, ["a"], COUNT) + callers.flood(server, ["b"], COUNT)
        together = callers.flood(server, ["a", "b"], COUNT)
        alone = [callers.ask(server, "a", 1) for _ in range(10 * COUNT)]
        done = threading.Event()
        beside: list[float] = []

        def watch() -> None:
            while not done.is_set():
                beside.append(callers.ask(server, "a", 1))

        def swap() -> None:
            try:
                for _ in range(SWAPS):
                    _post(server, "/models/unload")
                    _post(server, "/models/load")
            finally:
                done.set()

        _together([watch, swap])
    return {
        "two_resident_fraction": apart / together,
        "resident_p99_ratio_while_loading": percentile(beside, 0.99) / percentile(alone, 0.99),
    }


def _post(server: PacelineServer, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = json.dumps({"model": "b"})
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    read = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status}: {read!r}")


def one_model(callers: Callers, folder: Path, log: Path) -> dict[str, float]:
    """Return the rate of a server of one model in a folder over that of plain ``serve``."""
    model, *options = MODELS[0].split(",")
    flags = [f"--{option}" for option in options]
    plain: tuple[str, ...]
    several: tuple[str, ...]
    if model == "null":
        plain, several = ("--backend", "null"), ("--model", "a=null")
    else:
        plain, several = (model,), ("--model", f"a={model}", "--models-dir", str(folder))
    ratios = []
    with (
        serving(*plain, *flags, log=log.with_suffix(".plain")) as one,
        serving(*several, *flags, log=log.with_suffix(".several")) as other,
    ):
        for server in (one, other):
            callers.flood(server, [None], CALLERS)
        for _ in range(PAIRS):
            seconds = callers.flood(one, [None], COUNT)
            ratios.append(seconds / callers.flood(other, [None], COUNT))
    return {"one_model_cost": statistics.median(ratios)}


def main() -> None:
    callers = Callers()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        # a file that cannot be read is listed, and stops nothing
        (folder / "models" / "broken.gguf").write_bytes(b"GGUF")
        for part in (room_for_one, both_resident):
            results |= part(callers, folder / f"{part.__name__}.log")
        results |= one_model(callers, folder / "models", folder / "one.log")
    results |= {"evicted_in_use": callers.cut_short, "errors_5xx": callers.errors_5xx}
    print(f"models: {' and '.join(MODELS)}; {COUNT} requests of {TOKENS} tokens for each")
    for key, value in results.items():
        print(f"{key:34} {value:.3f}")
    results = {key: round(value, 4) for key, value in results.items()}
    print(json.dumps({"bench": "models", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
