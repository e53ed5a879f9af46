"""The best possible forecast of a first token on arrival: futures, drawn from that moment on.

``Run`` serves a workload with one replica in virtual time, as ``Simulator`` does. At some promises
it draws futures: the process forks, and each child goes on from exactly that state with everything
unknown drawn again: later arrivals and their requests, lengths of outputs, and times of steps, all
from their true distributions. A child ends with the request's first token.

The load never ends: a run is over once all judged requests have their first tokens.

This module does not know how these futures are summed up, or how accurate forecasts are.
"""

from __future__ import annotations

import math
import os
import random
import struct
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final
from unittest.mock import patch

from benchmarks.studies.ablation import Noisy
from paceline.core.pacing.first_token import FirstTokenForecast
from paceline.core.request import Request
from paceline.sim.arrival import Arrival
from paceline.sim.prompts import PromptMaker
from paceline.sim.replica import Job, Replica, ReplicaConfig
from paceline.sim.step_times.base import StepTimes

__all__ = ["Promise", "Run"]

# number of lengths that represent their distribution
_DRAWN: Final = 20_000
_SECONDS: Final = struct.Struct("d")


@dataclass(slots=True)
class Promise:
    """Forecast of a request on arrival, and its outcome."""

    request: Request
    predicted: float
    # seconds to its first token in each future that was drawn and in which it has one
    futures: list[float] = field(default_factory=list)

    @property
    def actual(self) -> float:
        """Return the seconds to the first token; known once the run is over."""
        first = self.request.first_token_time
        assert first is not None, "the run is not over"
        return first - self.request.asked.arrival_time


class Run:
    """One run, see the module's docstring.

    Args:
        workload: the arrivals of a seed, a renewal process, more than are needed.
        judged: numbers of the requests, in order of arrival, whose promises are returned, unless
            they are refused or dropped.
        config: has no prefix caching. If it has ``max_tokens``, outputs end by themselves.
        times: if its steps are random, their source is the run's own.
        sampled: whether futures are drawn for the promise of this number.
        num_futures: number of futures for each of them.
    """

    def __init__(
        self,
        workload: Callable[[int], Iterable[Arrival]],
        config: ReplicaConfig,
        times: StepTimes,
        *,
        seed: int,
        judged: range,
        sampled: Callable[[int], bool] = lambda number: False,
        num_futures: int = 0,
    ) -> None:
        self._workload, self._seed = workload, seed
        self._times, self._config = times, config
        self._judged, self._sampled, self._num_futures = judged, sampled, num_futures
        self._arrivals = iter(workload(seed))
        self._next = next(self._arrivals)
        self._num_jobs = 0
        self._last_noted = -1
        # those that have not ended
        self._jobs: dict[str, Job] = {}
        self._now = self._last_arrival = 0.0
        self._replica = Replica(
            0, config, times, PromptMaker(distinct=False, prefix_block=512), self._ended
        )
        # known lengths, sorted
        self._lengths: list[int] = []
        # in a child: the pipe for its answer, and the request that it is about
        self._answer: tuple[int, Request] | None = None
        self.promises: list[Promise] = []

    def serve(self) -> list[Promise]:
        """Serve, and return the promises in order of arrival."""
        if self._num_futures:
            others = islice(self._workload(self._seed + 1_000_000), _DRAWN)
            self._lengths = sorted(arrival.output_tokens for arrival in others)
        note = FirstTokenForecast.note

        def noted(forecast: FirstTokenForecast, request: Request, longest: float) -> float | None:
            predicted = note(forecast, request, longest)
            number = int(request.request_id.partition("/")[0])
            self._last_noted = number
            if self._answer is None and predicted is not None and number in self._judged:
                self.promises.append(promise := Promise(request, predicted))
                if self._num_futures and self._sampled(number):
                    self._draw(promise)
            return predicted

        try:
            with patch.object(FirstTokenForecast, "note", noted):
                self._go()
        except BaseException:
            if self._answer is None:
                raise
            # a failed child sends its parent no answer
            traceback.print_exc()
            os._exit(1)
        return [
            promise for promise in self.promises if promise.request.first_token_time is not None
        ]

    def _go(self) -> None:
        replica = self._replica
        while not self._is_over():
            due = replica.due
            if due is None or self._next.at <= due:
                self._submit(self._next)
                self._next = next(self._arrivals)
                continue
            self._now = due
            replica.run(due)
            if self._answer is not None:
                pipe, request = self._answer
                if self._is_settled(request):
                    first = request.first_token_time
                    seconds = math.nan if first is None else first - request.asked.arrival_time
                    os.write(pipe, _SECONDS.pack(seconds))
                    os._exit(0)

    def _is_over(self) -> bool:
        """Return whether all judged requests have their first tokens, or will never have one."""
        if self._last_noted < self._judged.stop - 1 or self._answer is not None:
            return False
        return all(self._is_settled(promise.request) for promise in self.promises)

    def _is_settled(self, request: Request) -> bool:
        return request.first_token_time is not None or request.request_id not in self._jobs

    def _submit(self, arrival: Arrival) -> None:
        self._now = max(self._now, arrival.at)
        self._last_arrival = arrival.at
        job = Job(arrival, self._num_jobs, arrival.at, arrival.output_tokens)
        self._jobs[f"{job.number}/0"] = job
        self._num_jobs += 1
        self._replica.submit(job)
        due = self._replica.wakes_at(job.inbox_at)
        if due is not None and (self._replica.due is None or due < self._replica.due):
            self._replica.due = due

    def _ended(self, replica: Replica, job: Job, reason: str, now: float) -> None:
        del self._jobs[f"{job.number}/0"]

    # ------------------------------------------------------------------ futures

    def _draw(self, promise: Promise) -> None:
        for number in range(self._num_futures):
            inlet, outlet = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(inlet)
                self._answer = outlet, promise.request
                self._forget(random.Random(f"{self._seed}/{len(self.promises)}/{number}"))
                return
            os.close(outlet)
            answer = os.read(inlet, _SECONDS.size)
            assert answer, "a future failed, see above"
            os.close(inlet)
            os.waitpid(child, 0)
            (seconds,) = _SECONDS.unpack(answer)
            if not math.isnan(seconds):
                promise.futures.append(seconds)

    def _forget(self, rng: random.Random) -> None:
        """Draw again all that is unknown at this moment."""
        if isinstance(self._times, Noisy):
            self._times.random.seed(rng.random())
        lengths, known = self._lengths, self._config.max_tokens
        for job in self._jobs.values() if known is not None else ():
            request = job.request
            if request is None or request.asked.sampling.max_tokens != known:
                # its max_tokens gives its length
                continue
            so_far = request.num_output_tokens + request.num_pending_tokens
            first, end = bisect_right(lengths, so_far), bisect_right(lengths, known)
            if first < end:
                job.output_tokens = lengths[rng.randrange(first, end)]
        self._arrivals = self._others(rng)
        self._next = next(self._arrivals)

    def _others(self, rng: random.Random) -> Iterator[Arrival]:
        """Yield arrivals from now on: the present gap is at least as long as it already is."""
        gone = self._now - self._last_arrival
        before, offset = 0.0, None
        for arrival in self._workload(rng.randrange(1 << 40)):
            if offset is None and arrival.at - before > gone:
                offset = self._last_arrival - before
            before = arrival.at
            if offset is not None:
                yield replace(arrival, at=arrival.at + offset)
