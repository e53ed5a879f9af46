"""Cost of reporting the timeline, compared with the cost of the decisions that it reports.

The real scheduler over the null backend, ``--running`` requests at a time, arrivals as others end,
prompts of 256 tokens, on a clock with 200 steps in a second, so that keyframes and messages come as
often as at that pace. Steps report that time as well, as the size of chunks, and so which requests
run, follows from the time of steps. Both engines decide the same whatever delays the machine, which
is checked after each block. They take turns, one with the tap and one without, in blocks of steps;
the cost of a step is the processor time of ``schedule`` and ``update`` and of the recorder's calls
alone. ``feed_us_per_step`` is the cost of keeping the frames in the process that answers HTTP,
measured with the same ones. Prints a line per block, and JSON last. It does not measure the speed
of an engine.

    python -m benchmarks.timeline_tap --running 256 --blocks 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from paceline.backends.reference.null import NullBackend
from paceline.bench.machine import machine
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput, StepResult
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.testing import null_client
from paceline.timeline.tap import TimelineTap
from paceline.web.feed import Feed

_PROMPT = 256
STEPS_A_SECOND = 200


class _Timed:
    """Adds up the processor time of calls, less the time to read the clock."""

    def __init__(self) -> None:
        self.seconds = self._own = 0.0
        nothing = self.around(lambda: None)
        for _ in range(20_000):
            nothing()
        self._own, self.seconds = self.seconds / 20_000, 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                self.seconds += time.thread_time() - began - self._own

        return timed


class _EvenBackend(NullBackend):
    """A null backend that reports 1 / ``STEPS_A_SECOND`` as the time of each step."""

    def execute(self, plan: SchedulerOutput) -> Future[StepResult]:
        result = super().execute(plan).result()
        future: Future[StepResult] = Future()
        future.set_result(replace(result, elapsed=1.0 / STEPS_A_SECOND))
        return future


class Side:
    """An engine with or without the tap.

    Args:
        clock: None: a clock with ``STEPS_A_SECOND`` steps in a second.
    """

    def __init__(
        self, running: int, *, told: bool, clock: Callable[[], float] | None = None
    ) -> None:
        scheduler = SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=2048, max_model_len=4096, policy="fcfs"
        )
        blocks = running * 64
        cache = CacheConfig(block_size=16, num_blocks=blocks)
        self._now = 1000.0
        self._clock = clock or (lambda: self._now)
        self.tap = TimelineTap(scheduler, cache) if told else None
        self.core = EngineCore(
            _EvenBackend(num_blocks=blocks, block_size=16, max_model_len=4096),
            scheduler,
            cache,
            pipeline_depth=1,
            clock=self._clock,
            timeline=self.tap,
        )
        self.decided, self.telling = _Timed(), _Timed()
        decides, tells = self.decided.around, self.telling.around
        inner = self.core.scheduler
        inner.schedule = decides(inner.schedule)  # type: ignore[method-assign]
        inner.update = decides(inner.update)  # type: ignore[method-assign]
        self.steps = self._number = 0
        # sum over the steps so far of the requests that ran in each
        self.num_run = 0
        self.messages: list[bytes] = []
        self._random = random.Random(1)
        self._running = running
        if self.tap is not None:
            for name in ("added", "planned", "stepped", "take"):
                setattr(self.tap, name, tells(getattr(self.tap, name)))

    def run(self, steps: int) -> tuple[float, float]:
        """Return microseconds per step (of decisions, of reporting)."""
        self.decided.seconds = self.telling.seconds = 0.0
        core = self.core
        for _ in range(steps):
            alive = core.stats()
            while alive.num_running + alive.num_waiting < self._running + 4:
                core.add_request(self._request())
                alive = core.stats()
            core.step()
            self.num_run += core.stats().num_running
            if self.tap is not None:
                self.tap.ladder.level = 0
                if frames := self.tap.take(self._clock()):
                    self.messages.append(frames)
            self._now += 1.0 / STEPS_A_SECOND
        self.steps += steps
        return 1e6 * self.decided.seconds / steps, 1e6 * self.telling.seconds / steps

    def _request(self) -> Request:
        self._number += 1
        prompt = [self._random.randrange(200) for _ in range(_PROMPT)]
        return Request(
            RequestSpec(
                request_id=f"cmpl-{self._number:032x}/0",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=self._random.randint(100, 400)),
                arrival_time=self._clock(),
            )
        )


class _Quiet:
    """Interface of an engine that a feed needs, without events."""

    on_timeline: Callable[[bytes | None], None] | None = None

    def __init__(self) -> None:
        client = null_client(NullBackend())
        self.info, self.stats, self.faults = client.info, client.stats, client.faults
        asyncio.run(client.close())


def _feed_us(messages: list[bytes], seconds: float) -> float:
    """Return microseconds of processor time per step for keeping ``seconds`` of messages, while the
    memory for them is full."""
    times = iter(range(10**9))
    step = seconds / len(messages)
    client: Any = _Quiet()
    Feed(client, 2 * 2**20, clock=lambda: next(times) * step / 2)
    keep = client.on_timeline
    for frames in messages:
        keep(frames)
    began = time.thread_time()
    for frames in messages:
        keep(frames)
    return 1e6 * (time.thread_time() - began) / (seconds * STEPS_A_SECOND)


def measure(running: int = 256, blocks: int = 12, steps: int = 150) -> dict[str, Any]:
    """Measure ``blocks`` blocks of steps, and print each one's figures."""
    told, silent = Side(running, told=True), Side(running, told=False)
    for side in (told, silent):
        side.run(400)
        side.steps = side.num_run = 0
    told.messages.clear()
    rows = []
    for block in range(blocks):
        first, second = (told, silent) if block % 2 else (silent, told)
        took = {id(side): side.run(steps) for side in (first, second)}
        if told.num_run != silent.num_run:
            raise RuntimeError(
                f"the engines had other requests: {told.num_run} ran in all steps so far with the "
                f"tap, {silent.num_run} without"
            )
        with_tap, telling = took[id(told)]
        without, _ = took[id(silent)]
        rows.append((with_tap, without, telling))
        print(
            f"block {block:2}: schedule+update {with_tap:7.1f} us with the tap, "
            f"{without:7.1f} without; telling {telling:6.1f} us a step"
        )
    with_tap, without, telling = (statistics.median(column) for column in zip(*rows, strict=True))
    # within a block the machine is equally fast
    share = statistics.median(row[2] / row[0] for row in rows)
    feed = _feed_us(told.messages, told.steps / STEPS_A_SECOND)
    return {
        "running": running,
        "running_mean": round(told.num_run / told.steps, 1),
        "schedule_us": round(with_tap, 1),
        "schedule_without_us": round(without, 1),
        "tap_us_per_step": round(telling, 1),
        "tap_share_of_schedule": round(share, 4),
        "feed_us_per_step": round(feed, 1),
        "bytes_per_step": round(sum(map(len, told.messages)) / told.steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    results = measure(args.running, args.blocks, args.steps)
    print(json.dumps({"bench": "timeline_tap", "machine": machine(), "results": results}))


if __name__ == "__main__":
    main()
