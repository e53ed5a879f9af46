"""A server that shares its processors with other work: are predictions true, are targets met?

Method: ``paceline serve`` on the default model and CALLERS callers that each stream one answer
after another, with targets for the first token and for the pace. In turn it runs

* alone;
* next to a busy loop that is bound to one processor;
* next to such a loop that is stopped and continued (SIGSTOP, SIGCONT), half of the time each;
* next to a busy loop on every processor;
* in a control group that allows 1.5 processors, with the threads that it chooses by itself;
* in the same group with ``--threads 2``, for comparison.

After a change the server gets SETTLE seconds; then figures are taken for WINDOW seconds. The time
of steps as predicted before each of them is compared with the measured time of the same steps
(``paceline:step_seconds_total``) and with the callers' mean time per token. Pacing admits a request
only if running ones keep their targets; missed targets are counted
(``paceline:slo_violations_total``) of requests that ended in the window. A gap is the time between
two events of a stream by the client's clock. The client shares the processors with the server.

If no control group can be made, the server is stopped for 25 of every 100 ms instead, and the
report says so. LONG=1 takes windows of five minutes. A caller's next request follows its last
answer, so no queue grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.common.client import Timing, check_answered, complete, get
from benchmarks.common.processes import Process, Unavailable
from benchmarks.common.server import PacelineServer
from benchmarks.common.setup import Places
from benchmarks.common.statistics import percentile
from benchmarks.common.unmeasured import Unmeasured
from paceline.server.observability.snapshot.frame import make_frame
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics

__all__ = ["ControlGroup", "Neighbour", "figures"]

QUICK = bool(os.environ.get("QUICK"))
CALLERS = 8
# Tokens of a prompt and of an answer: few against many, so that steps with prompts in them hardly
# count in either mean, and of different lengths, so that callers do not keep in step.
PROMPTS = (16, 32)
OUTPUTS = (96, 192)
LONG = bool(os.environ.get("LONG"))
SETTLE = 3.0 if QUICK else 5.0
WINDOW = 300.0 if LONG else 8.0 if QUICK else 25.0
TARGETS = {"ttft_ms": 1000, "tpot_ms": 60}
QUOTA = 1.5
# seconds for which a neighbour that works half of the time is on, and then off
HALF = 0.05
PATIENCE = 120.0
# largest relative error of a prediction that counts as true
WITHIN = 0.1
_PERIOD = 100_000
_LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
_CGROUP: Final = Path("/sys/fs/cgroup")


class _Toggle:
    """Stops a process and its descendants for ``off`` seconds after every ``on`` seconds, on a
    thread of its own, until it is closed."""

    def __init__(self, process: Process, on: float, off: float) -> None:
        self._over = threading.Event()

        def work() -> None:
            while not self._over.wait(on):
                process.freeze()
                self._over.wait(off)
                process.thaw()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class Neighbour:
    """A busy loop on one processor; with ``half`` it is stopped half of the time."""

    def __init__(self, cpu: int, *, half: bool = False) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _LOOP, str(cpu)])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stop_and_go, daemon=True)
        if half:
            self._thread.start()

    def _stop_and_go(self) -> None:
        stopped = False
        while not self._over.wait(HALF):
            self.process.send_signal(signal.SIGCONT if stopped else signal.SIGSTOP)
            stopped = not stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.process.kill()
        self.process.wait()


class ControlGroup:
    """A control group with a quota of ``cpus`` processors, of version 2 or, if that has no
    controller for it, of version 1. Raises OSError if none can be made."""

    def __init__(self, cpus: float, root: Path = _CGROUP) -> None:
        name = f"paceline-bench-{os.getpid()}"
        quota = str(int(cpus * _PERIOD))
        controllers = root / "cgroup.subtree_control"
        if controllers.is_file() and "cpu" in controllers.read_text().split():
            self.folder = root / name
            limits = {"cpu.max": f"{quota} {_PERIOD}"}
        else:
            self.folder = root / "cpu" / name
            limits = {"cpu.cfs_period_us": str(_PERIOD), "cpu.cfs_quota_us": quota}
        self.folder.mkdir()
        try:
            for file, text in limits.items():
                (self.folder / file).write_text(text)
        except OSError:
            self.close()
            raise

    def around(self) -> tuple[str, ...]:
        """Prefix of a command that runs it in the group."""
        join = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        return ("sh", "-c", join, "sh")

    def throttled(self) -> tuple[int, float]:
        """Return the periods in which the group was throttled, and the seconds in all, so far."""
        words = (self.folder / "cpu.stat").read_text().split()
        found = dict(zip(words[::2], words[1::2], strict=True))
        seconds = int(found.get("throttled_usec", 0)) / 1e6
        return int(found["nr_throttled"]), seconds or int(found.get("throttled_time", 0)) / 1e9

    def close(self) -> None:
        # the last process may still be ending
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


class Played:
    """A server under load, and its own metrics."""

    def __init__(self, model: Path, vocab_size: int, log: Path, *, around: Sequence[str] = (),
                 flags: Sequence[str] = ()) -> None:  # fmt: skip
        # with draft tokens, steps would bring several tokens at once
        off = ("--speculative-config", json.dumps({"method": "off"}))
        self.server = PacelineServer(str(model), *off, *flags, log=log, around=around)
        self.vocab_size = vocab_size
        self._seed = 0
        try:
            _, body = asyncio.run(get(self.server.port, "/v1/models"))
            self.model: str = json.loads(body)["data"][0]["id"]
        except BaseException:
            self.server.close()
            raise

    @property
    def threads(self) -> str:
        """Number of threads in the ready line."""
        return self.server.line(r"^paceline ready: .*; (\d+ threads?\b[^;]*)\) - try: ")[1]

    async def _scrape(self) -> Scrape:
        status, body = await get(self.server.port, "/metrics", timeout=PATIENCE)
        if status != 200:
            raise RuntimeError(f"/metrics answered {status}")
        return parse_metrics(body.decode(), time.monotonic())

    async def _call(self, until: float, rng: random.Random) -> list[Timing]:
        found = []
        while time.monotonic() < until:
            prompt = [rng.randrange(100, self.vocab_size) for _ in range(rng.randint(*PROMPTS))]
            found.append(
                await complete(self.server.port, self.model, prompt, rng.randint(*OUTPUTS),
                               timeout=PATIENCE, fields={"slo": TARGETS})
            )  # fmt: skip
        return found

    async def _play(self) -> tuple[Scrape, Scrape, list[Timing]]:
        self._seed += 1
        began = time.monotonic() + SETTLE
        callers = [
            asyncio.create_task(self._call(began + WINDOW, random.Random(f"{self._seed} {number}")))
            for number in range(CALLERS)
        ]
        await asyncio.sleep(SETTLE)
        before = await self._scrape()
        await asyncio.sleep(WINDOW)
        after = await self._scrape()
        answered = await asyncio.gather(*callers)
        return before, after, [timing for found in answered for timing in found]

    def window(self) -> dict[str, Any]:
        """Measure one window, after the server has settled."""
        spent = self.server.cpu_seconds()
        began = time.monotonic()
        before, after, timings = asyncio.run(self._play())
        used = (self.server.cpu_seconds() - spent) / (time.monotonic() - began)
        return {**figures(before, after, timings), "processors_used": round(used, 2)}


def figures(before: Scrape, after: Scrape, timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the figures between two readings; times in milliseconds. Raises Unavailable for
    requests that failed, and for a window without steps."""
    check_answered(timings)
    inside = [each for each in timings if before.time <= each.events[-1] <= after.time]
    frame = make_frame(before, after)
    if not inside or not frame.step_seconds or frame.predicted_step_seconds is None:
        raise Unavailable("no request ended, or no step was predicted, in the window")
    tpot = statistics.fmean(each.tpot for each in inside if each.tpot is not None)
    gaps = [gap for each in inside for gap in each.gaps]
    missed = {
        kind: int(count - before.by("paceline:slo_violations_total", "kind").get(kind, 0.0))
        for kind, count in after.by("paceline:slo_violations_total", "kind").items()
    }
    return {
        "requests": len(inside),
        "tpot_ms": round(1e3 * tpot, 2),
        "step_ms": round(1e3 * frame.step_seconds, 2),
        "predicted_ms": round(1e3 * frame.predicted_step_seconds, 2),
        "predicted_by_measured_step": round(frame.predicted_step_seconds / frame.step_seconds, 3),
        "predicted_by_measured_tpot": round(frame.predicted_step_seconds / tpot, 3),
        "gap_p99_ms": round(1e3 * percentile(gaps, 0.99), 1),
        "gap_max_ms": round(1e3 * max(gaps), 1),
        "output_tokens_per_s": round(frame.output_tokens_per_s, 1),
        "missed": {kind: count for kind, count in missed.items() if count},
    }


@contextlib.contextmanager
def limited() -> Iterator[ControlGroup | None]:
    """Yield a control group of QUOTA processors, or None if none can be made."""
    try:
        group = ControlGroup(QUOTA)
    except OSError as error:
        print(f"no control group can be made: {error}", flush=True)
        yield None
        return
    try:
        yield group
    finally:
        group.close()


def beside(
    played: Played, cpus: Sequence[int], unmeasured: Unmeasured
) -> dict[str, dict[str, Any]]:
    """Measure all situations of a server without a limit; those without figures are left out."""
    found: dict[str, dict[str, Any]] = {}
    situations: Mapping[str, Callable[[], Sequence[Neighbour]]] = {
        "alone": lambda: (),
        "busy neighbour": lambda: [Neighbour(cpus[-1])],
        "half a neighbour": lambda: [Neighbour(cpus[-1], half=True)],
        "a neighbour everywhere": lambda: [Neighbour(cpu) for cpu in cpus],
        "alone again": lambda: (),
    }
    for name, start in situations.items():
        with unmeasured.part(name), contextlib.ExitStack() as stack:
            for neighbour in start():
                stack.enter_context(neighbour)
            found[name] = played.window()
    return found


def measure(places: Places, vocab: int, unmeasured: Unmeasured) -> dict[str, Any]:
    """Return the figures by situation, and print them."""
    logs = places.folder("logs")
    played = Played(places.model, vocab, logs / "neighbours.log")
    try:
        threads = {"alone": played.threads}
        results = beside(played, places.cpus, unmeasured)
    finally:
        played.server.close()
    for name, flags in (("quota 1.5", ()), ("quota 1.5, 2 threads", ("--threads", "2"))):
        with unmeasured.part(name), limited() as group:
            around = () if group is None else group.around()
            log = logs / "neighbours-quota.log"
            played = Played(places.model, vocab, log, around=around, flags=flags)
            stopping = None if group else _Toggle(played.server, 0.075, 0.025)
            try:
                threads[name] = played.threads
                before = group.throttled() if group else (0, 0.0)
                row = played.window()
                if group:
                    now = group.throttled()
                    row["stopped_periods"] = now[0] - before[0]
                    row["stopped_s"] = round(now[1] - before[1], 2)
                results[name] = row
            finally:
                if stopping is not None:
                    stopping.close()
                played.server.close()
    print(table(results))
    print("\n".join(f"{name}: {said}" for name, said in threads.items()))
    # the last one is only for comparison
    judged = [row for name, row in results.items() if name != "quota 1.5, 2 threads"]
    made = "stopped_s" in results.get("quota 1.5", {})
    return {
        "predicted_within": bool(judged)
        and all(abs(row["predicted_by_measured_tpot"] - 1.0) <= WITHIN for row in judged),
        "promises_broken": sum(sum(row["missed"].values()) for row in judged),
        "targets": TARGETS,
        "callers": CALLERS,
        "control_group": "made" if made else "played by stopping the server for 25 of every 100 ms",
        "threads": threads,
        "results": results,
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("tpot_ms", "step_ms", "predicted_ms", "predicted_by_measured_tpot", "gap_p99_ms",
               "gap_max_ms", "output_tokens_per_s", "processors_used", "missed")  # fmt: skip
    heads = ("TPOT ms", "step ms", "predicted", "by TPOT", "gap p99", "gap max", "tokens/s",
             "cores", "missed")  # fmt: skip
    lines = [f"{'':24}" + "".join(f"{head:>11}" for head in heads)]
    for name, row in results.items():
        lines.append(f"{name:24}" + "".join(f"{row[column]!s:>11}" for column in columns))
    return "\n".join(lines)
