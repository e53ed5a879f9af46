"""Frames of a whole run, whole or up to so many bytes."""

from __future__ import annotations

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.sim.pool import Pool
from paceline.sim.replica import ReplicaConfig
from paceline.sim.simulator import Simulator
from paceline.sim.step_times.base import FixedStepTimes
from paceline.sim.workload.spec import open_workload
from paceline.timeline.codec import Decoder
from paceline.timeline.collect import Frames

CONFIG = ReplicaConfig(
    scheduler=SchedulerConfig(max_num_batched_tokens=512, max_model_len=512),
    cache=CacheConfig(block_size=16, num_blocks=1000),
)
WORKLOAD = "synthetic:rate=50,prompt=fixed(100),output=fixed(50),n=600"


def told(**settings: float) -> tuple[list[bytes], Frames]:
    pieces: list[bytes] = []
    frames = Frames(CONFIG.scheduler, CONFIG.cache, pieces.append, **settings)
    Simulator(
        Pool.single(CONFIG, FixedStepTimes(0.004, 0.0001)),
        lambda served: None,
        recorder=lambda index, config: frames,
    ).run(open_workload(WORKLOAD, seed=1))
    frames.close()
    return pieces, frames


def test_what_is_told_ends_with_the_piece_that_fills_it() -> None:
    whole, frames = told()
    assert len(whole) > 2 and not frames.is_full
    few, full = told(most=1)
    assert full.is_full and 0.0 < full.until < 0.5 * frames.until
    # the tap has nothing more to hand on
    assert [piece for piece in few if piece] == whole[:1]
    for pieces in (whole, few):
        decoder = Decoder()
        assert all(decoder.feed(piece) for piece in pieces if piece)
