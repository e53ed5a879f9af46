"""Make the recording that the docs site plays: ``python -m tests.ui.demo``.

The scheduler that serves, on the simulator's clock, tells of forty seconds as a server would: a
HELLO, its tap's frames, and gauges each second. Chats come at random and are promised their first
token; documents are long and have time; memory is short. ``main`` prints what is in it.
"""

from __future__ import annotations

import gzip
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.arrival import Arrival
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes
from paceline.timeline.codec import Decoder, encode
from paceline.timeline.collect import Frames
from paceline.timeline.events import FrameType, Kind, Plan, Told, vocabulary
from paceline.timeline.model import Model

__all__ = ["FILE", "MAX_BYTES", "made", "main"]

FILE: Final = Path(__file__).parents[2] / "docs" / "demo" / "recording.bin"
# what a clone carries for ever
MAX_BYTES: Final = 100_000
SECONDS: Final = 40.0
BLOCK: Final = 16
BLOCKS: Final = 260
_PUT_BACK: Final = (Kind.PREEMPT, Kind.SWAP)
STEP: Final = FixedStepTimes(0.018, 0.00006)


def arrivals(seed: int = 11) -> Iterator[Arrival]:
    rng = random.Random(seed)
    at = 0.5
    while at < SECONDS - 6.0:
        # a burst in the middle
        at += rng.expovariate(9.0 if 14.0 < at < 19.0 else 2.4)
        if rng.random() < 0.18:
            yield Arrival(
                at, rng.randint(700, 1600), rng.randint(60, 140), slo_class="batch",
                deadline=60.0, tenant="library",
            )  # fmt: skip
        else:
            yield Arrival(
                at, rng.randint(30, 260), rng.randint(20, 120), slo_class="interactive",
                ttft=0.4, tpot=0.08, tenant=rng.choice(("ada", "grace")),
            )  # fmt: skip


class Watching:
    """What a page that follows the server would be sent, of what is told to ``frames``."""

    def __init__(self, scheduler: SchedulerConfig, cache: CacheConfig) -> None:
        self.frames = Frames(scheduler, cache, self._take, enough=0)
        self._decoder, self._model = Decoder(), Model()
        self._gauged_at, self._free, self._preemptions = 0.0, cache.num_blocks, 0
        self._blocks = cache.num_blocks
        hello = {**vocabulary(), "server": 1, "engine": 1, "first": 0, "now": 0.0, "unix": 0.0}
        hello |= {
            "oldest": {"engine": 1, "step": 0, "time": 0.0},
            "model": "demo",
            "backend": "sim",
        }
        self.data = bytearray(encode(Told(FrameType.HELLO, hello)))

    def end(self) -> None:
        self.frames.close()
        self._gauge(self._model.now)

    def _take(self, data: bytes) -> None:
        self.data += data
        for frame in self._decoder.feed(data):
            self._model.take(frame)
            if isinstance(frame, Plan):
                self._free = frame.free_blocks
                self._preemptions += sum(event.kind in _PUT_BACK for event in frame.events)
        if self.frames.until - self._gauged_at >= 1.0:
            self._gauge(self.frames.until)

    def _gauge(self, now: float) -> None:
        self._gauged_at = now
        gauges = {
            "now": now, "engine": 1, "up": True, "step": self._model.step,
            "running": len(list(self._model.running())),
            "waiting": len(list(self._model.waiting())),
            "blocked_by": None, "pressure": 0, "blocks": self._blocks, "free": self._free,
            "cached": 0, "host": 0, "host_free": 0, "preemptions": self._preemptions, "classes": [],
        }  # fmt: skip
        self.data += encode(Told(FrameType.GAUGES, gauges))


def made() -> bytes:
    """The recording, uncompressed; the same each time."""
    settings = ReplicaConfig(
        scheduler=SchedulerConfig(
            policy="deadline", max_num_seqs=24, max_num_batched_tokens=512, max_model_len=4096
        ),
        cache=CacheConfig(block_size=BLOCK, num_blocks=BLOCKS, watermark=0.01),
        pipeline_depth=2,
    )
    told = Watching(settings.scheduling, settings.cache)
    simulator = Simulator(
        Pool.single(settings, STEP), lambda _: None, recorder=lambda index, config: told.frames
    )
    simulator.run(arrivals())
    told.end()
    return bytes(told.data)


def main() -> int:
    data = made()
    packed = gzip.compress(data, 9, mtime=0)
    kinds = Counter(type(frame).__name__ for frame in Decoder().feed(data))
    print(f"{len(packed)} bytes of {len(data)}: {dict(kinds)}")
    if len(packed) > MAX_BYTES:
        print(f"demo: above {MAX_BYTES} bytes", file=sys.stderr)
        return 1
    FILE.write_bytes(packed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
