"""Several models in one server: swaps, floods, promises, and what a neighbour costs.

Method. ``paceline serve`` with two formats of one model, as two models, is asked over HTTP by
callers that each wait for their answer. MODELS names them (default: smollm2-135m as int8 and q4;
``null`` needs none), COUNT the requests of a flood for each, FLAGS more flags of every server, such
as ``--packed-cache 2GiB``. QUICK=1 takes fewer. PARTS names what is measured, separated by commas:

* ``swaps``. A request for the model that is not in memory, room for one, until its answer of one
  token, less that of a model in memory; median of the swaps, each a second after the last, as a
  model stays for two of its loads. ``swap_s``: from packed copies, which the first loads made;
  ``swap_packing_s``: with weights packed by each load, whatever FLAGS say of copies;
  ``swap_without_spare_s``: with packing, and the process ended that waits for the next load.
  ``swap_at_once_s``: from packed copies, without that second.
* ``alternating``. ``alternating_fraction``: both have a queue, room for one: requests a second over
  those if each queue is served whole, with one swap between.
* ``loads``. ``resident_p99_ratio_while_loading``: p99 of answers of one token of a model in memory
  while the other is loaded and unloaded all the time, over p99 without, by turns.
* ``resident``. ``two_resident_fraction``: the queues of ``alternating``, both in memory and at
  once: the seconds of one after the other over the seconds together.
* ``one``. ``one_model_cost``: requests a second of a server with ``--models-dir`` over those of
  plain ``serve``, in turns; median of the pairs.
* ``promises``. ``tpot_within``: share of the first model's answers within 100 ms a token while the
  other, random weights in the shape of a model of 1.7B, gets prompts of 2,000 tokens without end.
  ``large_seconds_ratio``: such a prompt's seconds over those without the first model's callers.

``evicted_in_use`` counts answers cut short in all of this, ``errors_5xx`` answers of that class.

The last line is JSON.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.common.parts import chosen
from benchmarks.common.server import PacelineServer
from benchmarks.common.statistics import percentile
from benchmarks.memory import write_quantised_model
from benchmarks.peers.sizes import SHAPES
from paceline.bench.machine import machine

QUICK: Final = bool(os.environ.get("QUICK"))
MODELS: Final = os.environ.get("MODELS", "smollm2-135m,dtype=int8 smollm2-135m,dtype=q4").split()
COUNT: Final = int(os.environ.get("COUNT", "8" if QUICK else "60"))
FLAGS: Final = os.environ.get("FLAGS", "").split()
TOKENS: Final = 32
CALLERS: Final = 4
SWAPS: Final = 4 if QUICK else 12
LOADS: Final = 4 if QUICK else 40
PAIRS: Final = 1 if QUICK else 20
# seconds after which a model that was loaded may go, with room to spare
RESTS: Final = 1.0
# requests by turns of a model in memory, between loads of the other
ALONE: Final = 20
TPOT_MS: Final = 100
PROMPT: Final = 2000
# the shape of promises, and the tokens of its vocabulary that prompts are drawn from
LARGE: Final = "1.7b"
IDS: Final = 50_000


class Callers:
    """Requests, and how they ended."""

    def __init__(self) -> None:
        self.errors_5xx = self.cut_short = 0
        self._lock = threading.Lock()

    def ask(
        self,
        server: PacelineServer,
        model: str | None,
        tokens: int = TOKENS,
        prompt: str | list[int] = "Once upon a time",
        **more: Any,
    ) -> float:
        """Return the seconds of one answer."""
        return self.read(server, model, tokens, prompt, more)[0]

    def read(
        self,
        server: PacelineServer,
        model: str | None,
        tokens: int,
        prompt: str | list[int],
        more: dict[str, Any],
    ) -> tuple[float, dict[str, Any]]:
        """Return the seconds of one answer, and the answer."""
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more,
        }  # fmt: skip
        if model is not None:
            body["model"] = model
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
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
        return time.monotonic() - began, read

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
def serving(*flags: str, log: Path, more: Sequence[str] = FLAGS) -> Iterator[PacelineServer]:
    server = PacelineServer(*flags, "--no-ui", "--prefix-cache-memory", "1MiB", *more, log=log)
    try:
        yield server
    finally:
        server.close()


def two(*flags: str) -> tuple[str, ...]:
    names = zip("ab", MODELS, strict=True)
    return (*(each for name, model in names for each in ("--model", f"{name}={model}")), *flags)


def swaps(callers: Callers, folder: Path) -> dict[str, float]:
    """Return the seconds of a swap of each kind."""
    found: dict[str, float] = {}
    at = [n for n, flag in enumerate(FLAGS) if flag == "--packed-cache"]
    more = [flag for n, flag in enumerate(FLAGS) if n not in at and n - 1 not in at]
    # NullBackend has no weights to pack
    copies = () if "null" in str(MODELS) else ("--packed-cache", "2GiB")

    def measure(server: PacelineServer, key: str, rests: float = RESTS) -> None:
        seconds = []
        for n in range(SWAPS):
            time.sleep(rests)
            if key == "swap_without_spare_s":
                _end_spare(server)
            seconds.append(callers.ask(server, "ba"[n % 2], 1) - warm)
        found[key] = statistics.median(seconds)

    for flags in dict.fromkeys((copies, ())):
        models, log = two("--models-max", "1", "--memory", "4GiB", *flags), folder / "swaps"
        with serving(*models, log=log, more=more) as server:
            warm = statistics.median(callers.ask(server, "a", 1) for _ in range(5))
            # the first loads of both are no swaps yet: files are read, and copies made
            for name in "ba":
                callers.ask(server, name, 1)
            if flags == copies:
                measure(server, "swap_s")
                measure(server, "swap_at_once_s", 0.0)
            if not flags:
                measure(server, "swap_packing_s")
                measure(server, "swap_without_spare_s")
    return found


def _end_spare(server: PacelineServer) -> None:
    """End the process that engines are forked from: the next one does its imports itself."""
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0forks\0"):
                os.kill(int(pid), signal.SIGKILL)
                return
    raise RuntimeError("no process waits for the next load")


def alternating(callers: Callers, folder: Path) -> dict[str, float]:
    """Return the part of the rate that alternating floods reach, room for one."""
    with serving(*two("--models-max", "1", "--memory", "4GiB"), log=folder / "floods") as server:
        for name in "aba":
            callers.ask(server, name, 1)
        whole = callers.flood(server, ["a"], COUNT)
        whole += callers.flood(server, ["b"], COUNT)
        callers.ask(server, "a", 1)
        both = callers.flood(server, ["a", "b"], COUNT)
    return {"alternating_fraction": whole / both}


def resident(callers: Callers, folder: Path) -> dict[str, float]:
    """Return what two models in memory reach."""
    with serving(*two("--memory", "4GiB"), log=folder / "resident") as server:
        for name in "ab":
            callers.ask(server, name)
        apart = callers.flood(server, ["a"], COUNT) + callers.flood(server, ["b"], COUNT)
        together = callers.flood(server, ["a", "b"], COUNT)
    return {"two_resident_fraction": apart / together}


def loads(callers: Callers, folder: Path) -> dict[str, float]:
    """Return what loads of one model cost the other."""
    alone: list[float] = []
    beside: list[float] = []
    with serving(*two("--memory", "4GiB"), log=folder / "loads") as server:
        for name in "ab":
            callers.ask(server, name)
        for _ in range(LOADS):
            # what starts after a load has time to end
            time.sleep(RESTS)
            alone += [callers.ask(server, "a", 1) for _ in range(ALONE)]
            done = threading.Event()

            def watch(done: threading.Event = done) -> None:
                while not done.is_set():
                    beside.append(callers.ask(server, "a", 1))

            def swap(done: threading.Event = done) -> None:
                try:
                    _post(server, "/models/unload")
                    _post(server, "/models/load")
                finally:
                    done.set()

            _together([watch, swap])
    ratio = percentile(beside, 0.99) / percentile(alone, 0.99)
    print(
        f"one token while loading: {len(beside)} answers, p50 {percentile(beside, 0.5):.4f} s, p99 "
        f"{percentile(beside, 0.99):.4f} s; else {len(alone)}, {percentile(alone, 0.5):.4f} s, "
        f"{percentile(alone, 0.99):.4f} s"
    )
    return {"resident_p99_ratio_while_loading": ratio}


def _tpot(answer: dict[str, Any]) -> float:
    """Return the seconds a token after the first."""
    timings = answer["timings"]
    return float(timings["predicted_ms"]) / 1000 / max(1, int(timings["predicted_n"]) - 1)


def promises(callers: Callers, folder: Path) -> dict[str, float]:
    """Return the share of promises that a small model keeps next to prompts of a large one."""
    large = folder / "large.gguf"
    write_quantised_model(large, SHAPES[LARGE])
    draw = random.Random(0)
    paces: list[float] = []

    def prompt() -> float:
        ids = [draw.randrange(IDS) for _ in range(PROMPT)]
        return callers.ask(server, "large", 1, ids)

    flags = ("--model", f"a={MODELS[0]}", "--model", f"large={large}", "--memory", "8GiB")
    with serving(*flags, log=folder / "promises") as server:
        for name in ("a", "large"):
            # in memory from here on
            callers.ask(server, name, 1, [1])
        alone = statistics.median(prompt() for _ in range(1 if QUICK else 3))
        done = threading.Event()

        def small() -> None:
            while not done.is_set():
                _, answer = callers.read(
                    server, "a", 48, "Once upon a time",
                    {"slo": {"tpot_ms": TPOT_MS}, "timings_per_token": True},
                )  # fmt: skip
                paces.append(_tpot(answer))

        together: list[float] = []

        def others() -> None:
            try:
                together.extend(prompt() for _ in range(1 if QUICK else 5))
            finally:
                done.set()

        _together([small, small, others])
    print(
        f"promises: {len(paces)} answers, at p50 {percentile(paces, 0.5):.3f} and at most "
        f"{max(paces):.3f} s a token; a prompt takes {alone:.1f} s alone"
    )
    return {
        "tpot_within": sum(pace <= TPOT_MS / 1000 for pace in paces) / len(paces),
        "large_seconds_ratio": statistics.median(together) / alone,
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


def one(callers: Callers, folder: Path) -> dict[str, float]:
    """Return the rate of a server of one model in a folder over that of plain ``serve``."""
    (folder / "models").mkdir()
    # a file that cannot be read is listed, and stops nothing
    (folder / "models" / "broken.gguf").write_bytes(b"GGUF")
    log = folder / "one"
    model, *options = MODELS[0].split(",")
    flags = [f"--{option}" for option in options]
    plain: tuple[str, ...]
    several: tuple[str, ...]
    if model == "null":
        plain, several = ("--backend", "null"), ("--model", "a=null")
    else:
        plain, several = (model,), ("--model", f"a={model}", "--models-dir", str(folder / "models"))
    ratios = []
    with (
        serving(*plain, *flags, log=log.with_suffix(".plain")) as one,
        serving(*several, *flags, log=log.with_suffix(".several")) as other,
    ):
        for server in (one, other):
            callers.flood(server, [None], CALLERS)
        for n in range(PAIRS):
            seconds = {}
            for server in (one, other) if n % 2 else (other, one):
                seconds[server is one] = callers.flood(server, [None], COUNT)
            ratios.append(seconds[True] / seconds[False])
    quarter = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-1 - len(ratios) // 4]
    print(f"one model: {len(ratios)} pairs, the middle half {quarter[0]:.3f} to {quarter[1]:.3f}")
    return {"one_model_cost": statistics.median(ratios)}


ALL: Final = {each.__name__: each for each in (swaps, alternating, loads, resident, one, promises)}


def main() -> None:
    callers = Callers()
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for part in chosen(ALL):
            results |= ALL[part](callers, Path(name))
    results |= {"evicted_in_use": callers.cut_short, "errors_5xx": callers.errors_5xx}
    print(f"models: {' and '.join(MODELS)}; {COUNT} requests of {TOKENS} tokens for each")
    for key, value in results.items():
        print(f"{key:34} {value:.3f}")
    results = {key: round(value, 4) for key, value in results.items()}
    print(json.dumps({"bench": "models", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
