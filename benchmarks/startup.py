"""``paceline serve``: seconds to the first token by part, and the memory held.

Method. The server is started ROUNDS times on MODEL, whose file is in the page cache (by a first
start that is not counted), and asked for one token of a prompt of 128 as soon as it reports that it
is ready. Parts are medians of times that both processes log: the API process's follow each other
and add up to ``ready``; the engine's run at the same time as ``web`` and ``engine``, and the
model's are within its ``build``. The last server then gets 64 requests of 128 prompt and 128 output
tokens at once, and as many new ones again, whose prefixes are cached in addition. ``peak`` is the
sum of the processes' peak resident memory, as in ``common.processes``. On a busy machine,
processor time says more than seconds.

QUICK=1 starts three times. The last line is JSON.

BASELINE=PATH compares with another checkout of this repository instead, whose native library is
built: both are started twenty times (QUICK=1: three), in turns, on the same interpreter, until they
report that they are ready. The result is the ratio, this by that, of seconds and of the processor
time of all processes until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.client import complete
from benchmarks.common.processes import REPOSITORY, Process, Unavailable
from benchmarks.common.server import PacelineServer
from paceline.bench.machine import machine

MODEL: Final = "smollm2-135m"
ROUNDS: Final = 3 if os.environ.get("QUICK") else 7
PROMPT: Final = 128
OUTPUT: Final = 128
CONCURRENT: Final = 64
_START_SECONDS: Final = 300.0
# ids above special tokens and below the end of any vocabulary, the null backend's too
_IDS: Final = range(20, 250)
# seed of the first prompt alone, or its prefix would be cached; a seed's sign is ignored
_FIRST_SEED: Final = 0

# event in the log -> name of its parts here
EVENTS: Final = {"started": "api", "engine_built": "engine", "loaded": "model"}
PARTS: Final = {
    "api.start": "interpreter and flags, until the engine's process starts",
    "api.web": "web framework imported, beside the engine",
    "api.engine": "waiting for engine and tokenizer",
    "api.listen": "routes made, listening",
    "engine.import": "engine: interpreter and imports",
    "engine.build": "engine: built, all of it",
    "model.checkpoint": "  the file's header read and checked",
    "model.choice": "  compute path and formats chosen",
    "model.weights": "  weights read and packed",
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds since the command."""

    ready: float
    first_token: float
    # processor time of both processes until then, which does not depend on other load
    cpu: float
    # by the names of PARTS
    parts: dict[str, float]


def parse(lines: Iterable[str]) -> dict[str, float]:
    """Return the parts in a server's JSON log; other lines are skipped."""
    parts: dict[str, float] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            event = EVENTS[entry["message"].split()[0]]
        except (ValueError, KeyError, TypeError, IndexError):
            continue
        for name, seconds in entry.get("fields", {}).items():
            if name != "total":
                parts[f"{event}.{name}"] = seconds
    return parts


def memory(pid: int) -> dict[str, dict[str, float]]:
    """Return MiB of each process of a session: ``now``, ``anonymous`` of that, and ``peak``."""
    found: dict[str, dict[str, float]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) != pid:
                continue
            status = (entry / "status").read_text()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        values = {key: int(value) / 1024 for key, value in re.findall(r"(\w+):\s+(\d+) kB", status)}
        if "VmRSS" in values:
            found["engine" if b"engine_process" in command else "api"] = {
                "now": round(values["VmRSS"], 1),
                "anonymous": round(values["RssAnon"], 1),
                "peak": round(values["VmHWM"], 1),
            }
    return found


class Server:
    """A running server; see ``starting``."""

    def __init__(self, process: Process, port: int, start: Start) -> None:
        self.process = process
        self.start = start
        self.port = port

    def generate(self, count: int, prompt: int, output: int, seed: int) -> None:
        """Send ``count`` requests of random tokens at once. Raises Unavailable if one fails."""
        _ask(self.port, count, prompt, output, seed)


def _ask(port: int, count: int, prompt: int, output: int, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [rng.choices(_IDS, k=prompt) for _ in range(count)]

    async def ask() -> list[str]:
        work = (complete(port, "bench", ids, output, timeout=300) for ids in prompts)
        return [timing.error for timing in await asyncio.gather(*work)]

    for error in asyncio.run(ask()):
        if error:
            raise Unavailable(error)


@contextmanager
def starting(log: Path, *flags: str, generates: bool = True) -> Iterator[Server]:
    """Start a server and, if it ``generates``, get its first token. Raises Unavailable if it does
    not answer."""
    options = ("--log-format", "json", "--served-model-name", "bench", "--batch-dir", "off")
    began = time.monotonic()
    with PacelineServer(*flags, *options, log=log, seconds=_START_SECONDS) as process:
        ready, port = process.startup, process.port
        if generates:
            _ask(port, 1, PROMPT, 1, seed=_FIRST_SEED)
        first_token = time.monotonic() - began
        cpu = process.cpu_seconds()
        parts = parse(process.log().splitlines())
        yield Server(process, port, Start(ready, first_token, cpu, parts))


def measure(model: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure starts and memory, see the module's docstring."""
    starts: list[Start] = []
    stages: dict[str, Any] = {}
    for index in range(rounds + 1):
        with starting(folder / f"{index}.log", model) as server:
            if index:
                starts.append(server.start)
            if index == rounds:
                stages["first token"] = memory(server.process.pid)
                for seed in (1, 2):
                    server.generate(CONCURRENT, PROMPT, OUTPUT, seed)
                    row = f"{seed} x {CONCURRENT} x {PROMPT}/{OUTPUT}"
                    stages[row] = memory(server.process.pid)
                peak = server.process.peak_rss_mb()
    parts = {
        name: round(statistics.median(start.parts[name] for start in starts), 3)
        for name in PARTS
        if all(name in start.parts for start in starts)
    }
    return {
        "ready_s": round(statistics.median(start.ready for start in starts), 2),
        "first_token_s": round(statistics.median(start.first_token for start in starts), 2),
        "first_token_best_s": round(min(start.first_token for start in starts), 2),
        "cpu_s": round(statistics.median(start.cpu for start in starts), 2),
        "parts_s": parts,
        "memory_mb": stages,
        "peak_rss_mb": round(peak),
    }


def show(results: dict[str, Any]) -> None:
    print(f"\n{'part':62}{'seconds':>9}")
    for name, seconds in results["parts_s"].items():
        print(f"{PARTS[name]:62}{seconds:>9.2f}")
    print(f"{'ready, from the command on':62}{results['ready_s']:>9.2f}")
    print(f"{'first token (best ' + str(results['first_token_best_s']) + ')':62}"
          f"{results['first_token_s']:>9.2f}")  # fmt: skip
    print(f"{'processor time until then, both processes':62}{results['cpu_s']:>9.2f}")
    print(f"\n{'memory, MiB':26}{'process':10}{'now':>9}{'anonymous':>11}{'peak':>9}")
    for stage, processes in results["memory_mb"].items():
        for process, row in sorted(processes.items()):
            print(f"{stage:26}{process:10}{row['now']:>9}{row['anonymous']:>11}{row['peak']:>9}")
    print(f"{'peak, both processes':54}{results['peak_rss_mb']:>11}")


def start_once(root: Path, model: str) -> tuple[float, float]:
    """Return seconds until a checkout's server is ready, and processor seconds of its processes."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "paceline.cli.main", "serve", model, "--port", "0"]
    with subprocess.Popen(
        argv, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        if not any("paceline ready" in line for line in server.stdout):
            raise Unavailable(f"the server of {root} ended before it was ready")
        ready = time.monotonic() - began
        ticks = sum(_ticks(Path(f"/proc/{pid}/stat"), server.pid) for pid in os.listdir("/proc"))
        os.killpg(server.pid, signal.SIGTERM)
        server.stdout.read()
    return ready, ticks / os.sysconf("SC_CLK_TCK")


def _ticks(stat: Path, session: int) -> int:
    """Return user and system ticks of a process; 0 if it is not in the session."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0


def compare(baseline: Path, model: str, turns: int) -> dict[str, Any]:
    """Compare this checkout with another one."""
    roots = (REPOSITORY, baseline)
    for root in roots:
        start_once(root, model)
    pairs = []
    for turn in range(turns):
        order = roots if turn % 2 == 0 else roots[::-1]
        found = {root: start_once(root, model) for root in order}
        pairs.append((found[REPOSITORY], found[baseline]))
    results: dict[str, Any] = {"turns": turns}
    for place, name in enumerate(("ready_s", "processor_s")):
        ratios = sorted(ours[place] / theirs[place] for ours, theirs in pairs)
        results[name] = {
            "this": round(statistics.median(ours[place] for ours, _ in pairs), 3),
            "baseline": round(statistics.median(theirs[place] for _, theirs in pairs), 3),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(ratios[0], 3),
            "most": round(ratios[-1], 3),
        }
        print(f"{name}: {results[name]}")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=MODEL)
    args = parser.parse_args()
    if baseline := os.environ.get("BASELINE"):
        turns = 3 if os.environ.get("QUICK") else 20
        results = compare(Path(baseline).resolve(), args.model, turns)
    else:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(args.model, ROUNDS, Path(folder))
        show(results)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    print(json.dumps({"bench": "startup", "machine": machine(cpus), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
