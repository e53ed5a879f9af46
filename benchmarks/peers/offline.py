"""Rows of offline work on all engines in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.processes import Command, Unavailable
from benchmarks.common.setup import Peer
from benchmarks.peers.jobs import Done, Job
from benchmarks.peers.process import Worker
from benchmarks.peers.rows import Row, make_job, parse_row

__all__ = ["Contender", "Measured", "Team", "by_variant", "run_rows", "summary"]

# seconds for a row above which a contender does not run it again in later rounds
SLOW_SECONDS = 60.0
# seconds in all below which a contender runs a row again, as short times vary, and rounds then
SHORT_SECONDS = 2.0
SHORT_ROUNDS = 5
# seconds without work before and during the measurement of idling, so that background work of
# loading has ended
IDLE_SECONDS = 1.0
# the row that warms up, which also touches a part of the KV cache for the first time
WARM_UP = "16x128x4"


class Runner(Protocol):
    """A loaded engine, as ``run_rows`` uses it; ``process.Worker`` is one."""

    def run(self, job: Job, timeout: float = ...) -> Done: ...

    def freeze(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine in one precision."""

    peer: str
    variant: str

    @property
    def label(self) -> str:
        return f"{self.peer} {self.variant}"


@dataclass(slots=True)
class Measured:
    """Seconds of a row by contender, and why others have none."""

    row: Row
    seconds: dict[Contender, list[float]] = field(default_factory=dict)
    failed: dict[Contender, str] = field(default_factory=dict)

    def best(self) -> dict[str, tuple[str, float, int]]:
        """Return by peer its fastest variant, its median seconds, and the number of rounds."""
        best: dict[str, tuple[str, float, int]] = {}
        for contender, seconds in self.seconds.items():
            median = statistics.median(seconds)
            if contender.peer not in best or median < best[contender.peer][1]:
                best[contender.peer] = (contender.variant, median, len(seconds))
        return best


class Team:
    """All workers of a run: each is loaded on first use, and frozen except in its turns.

    ``startup`` and ``idle`` are measured while each is loaded, by label: seconds from the process's
    start to its first token, and cores kept busy without work before it was frozen.
    """

    def __init__(self, logs: Path, vocab_size: int, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._logs = logs
        self._idle_seconds = idle_seconds
        self._vocab_size = vocab_size
        self._workers: dict[Command, Worker] = {}
        self._labels: dict[Command, str] = {}
        self._failed: dict[Command, str] = {}
        self._given: Counter[tuple[Command, str]] = Counter()
        self.startup: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        self.about: dict[str, dict[str, Any]] = {}

    def worker(self, label: str, command: Command) -> Worker:
        """Return the loaded worker of a command. Raises Unavailable, on every call alike."""
        if command in self._failed:
            raise Unavailable(self._failed[command])
        worker = self._workers.get(command)
        if worker is None:
            try:
                worker = self._load(label, command)
            except Unavailable as error:
                self._failed[command] = str(error)
                raise
        return worker

    def _load(self, label: str, command: Command) -> Worker:
        print(f"  loading {label}", file=sys.stderr)
        log = self._logs / f"{label.replace(' ', '-').replace('/', '-')}.log"
        began = time.perf_counter()
        worker = Worker(command, log)
        try:
            first = make_job(parse_row("1x128x1"), self._vocab_size, seed=-1)
            worker.run(first)
            self.startup[label] = time.perf_counter() - began
            worker.run(make_job(parse_row(WARM_UP), self._vocab_size, seed=-1))
            time.sleep(self._idle_seconds)
            self.idle[label] = worker.idle_share(self._idle_seconds)
        except BaseException:
            worker.close()
            raise
        worker.freeze()
        self._workers[command] = worker
        self._labels[command] = label
        self.about[label] = worker.about
        return worker

    def job(self, command: Command, row: Row) -> Job:
        """Return the next job of a row for a worker, with prompts new to it: two contenders may
        share a worker, which would answer the second from its prefix cache. Workers that have had
        equally many jobs of a row get the same."""
        seed = self._given[command, row.name]
        self._given[command, row.name] += 1
        return make_job(row, self._vocab_size, seed=seed)

    def drop(self, command: Command, reason: str) -> None:
        """End a worker that failed; ``worker`` raises Unavailable for it afterwards. Idempotent."""
        self._failed[command] = reason
        if command in self._workers:
            self._workers.pop(command).close()

    def peak_rss_mb(self) -> dict[str, float]:
        """Return the peak resident memory, MiB, of workers that still run, by label."""
        return {self._labels[key]: worker.peak_rss_mb() for key, worker in self._workers.items()}

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def run_rows(
    rows: Sequence[Row],
    peers: Iterable[Peer],
    team: Team,
    *,
    rounds: int,
    skip: Callable[[Contender, Row], str | None] = lambda contender, row: None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Run every row on every contender, A B C B C A, with prompts that are new to all workers.

    Prefix caching is on in rows with a shared prefix.

    Args:
        rounds: least number of rounds, but see ``SLOW_SECONDS`` and ``SHORT_SECONDS``.
        skip: returns why a contender is left out of a row, or None.
        report: called with a line for every measurement.
    """
    contenders = [(Contender(peer.name, name), peer) for peer in peers for name in peer.variants]
    results = []
    for row in rows:
        measured = Measured(row)
        commands = {}
        for contender, peer in contenders:
            reason = skip(contender, row)
            if reason is not None:
                measured.failed[contender] = reason
                continue
            command = peer.worker(contender.variant, prefix_caching=bool(row.shared))
            try:
                team.worker(_label(contender, command, peer), command)
            except Unavailable as error:
                measured.failed[contender] = str(error)
            else:
                commands[contender] = command
        for number in range(max(rounds, SHORT_ROUNDS)):
            turns = list(commands.items())
            # another contender begins each round, as the machine has just rested then
            first = number % max(1, len(turns))
            for contender, command in turns[first:] + turns[:first]:
                spent = measured.seconds.get(contender, [])
                if max(spent, default=0.0) > SLOW_SECONDS:
                    continue
                if number >= rounds and sum(spent) > SHORT_SECONDS:
                    continue
                try:
                    # another contender's turn may have ended a worker that both share
                    worker = team.worker(contender.label, command)
                    done = worker.run(team.job(command, row))
                except Unavailable as error:
                    team.drop(command, str(error))
                    measured.failed[contender] = str(error)
                    del commands[contender]
                    continue
                worker.freeze()
                measured.seconds.setdefault(contender, []).append(done.seconds)
                rate = row.total_tokens / done.seconds
                report(
                    f"{row.name:22} {number + 1:2}  {contender.label:28}"
                    f"{done.seconds:9.2f} s {rate:9.0f} tok/s"
                )
        results.append(measured)
    return results


def _label(contender: Contender, command: Command, peer: Peer) -> str:
    """Name a worker; with "prefix" if prefix caching makes it another one."""
    plain = peer.worker(contender.variant, prefix_caching=False)
    return contender.label if command == plain else f"{contender.label} prefix"


def summary(measured: Measured) -> dict[str, Any]:
    """Return a row's part of the JSON: by peer its best variant's rates, or why there are none."""
    row = measured.row
    values: dict[str, Any] = {}
    ran = Counter(contender.peer for contender in measured.seconds)
    for peer, (variant, seconds, rounds) in measured.best().items():
        values[peer] = {
            "output_tps": round(row.count * row.output / seconds, 1),
            "total_tps": round(row.total_tokens / seconds, 1),
            "seconds": round(seconds, 3),
            "variant": variant,
            # number of variants that ran
            "best_of": ran[peer],
            "rounds": rounds,
        }
    for contender, reason in measured.failed.items():
        values.setdefault(contender.peer, {"absent": reason})
    return values


def by_variant(measured: Measured) -> dict[str, list[float]]:
    """Return all seconds of a row by contender's label, in the order of the rounds."""
    return {
        contender.label: [round(value, 3) for value in seconds]
        for contender, seconds in measured.seconds.items()
    }
