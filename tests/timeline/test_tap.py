"""What the tap costs is bounded, and what it costs it is told by."""

from __future__ import annotations

import random

from paceline.timeline.events import Done, End, FrameType, Keyframe, Plan, Told
from paceline.timeline.ladder import LEVELS
from paceline.timeline.model import Model
from tests.driving import make_request
from tests.timeline.watching import Watched


class _Slow:
    """A clock by which every call of the tap takes so long."""

    def __init__(self) -> None:
        self.now, self.cost = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


def levels(watched: Watched) -> list[int]:
    return [f.told["level"] for f in watched.frames if isinstance(f, Told) and "level" in f.told]


def test_the_ladder_goes_down_step_by_step_and_comes_back() -> None:
    """And the model, which missed steps meanwhile, is right again at the top."""
    watched = Watched(num_blocks=200, max_num_seqs=6)
    clock = watched.tap._clock = _Slow()
    random_ = random.Random(3)
    check, watched.check = watched.check, lambda: None  # type: ignore[method-assign]

    def serve(seconds: float) -> None:
        until = watched.now + seconds
        while watched.now < until:
            if len(watched.core.scheduler.state.running.requests) < 5:
                name = f"{watched.now:.3f}"
                watched.add(
                    make_request(
                        name, random_.randint(4, 60), random_.randint(8, 90), arrival=watched.now
                    )
                )
            watched.step()
            data = watched.tap.take(watched.now)
            watched.data += data
            for frame in watched.decoder.feed(data):
                watched.frames.append(frame)
                watched.model.take(frame)

    serve(2.0)
    assert watched.tap.ladder.level == 0 and levels(watched) == []
    # a hundred steps a second, two calls each, and each of a millisecond: a tenth of a core
    clock.cost = 1e-3
    serve(5.0)
    assert watched.tap.ladder.level == LEVELS - 1 and levels(watched) == [1, 2, 3]
    before = len(watched.frames)
    serve(3.0)
    told = watched.frames[before:]
    assert not any(isinstance(f, Plan | Done | Keyframe) for f in told)
    assert any(isinstance(f, End) for f in told), "those that end are told of all the same"
    clock.cost = 0.0
    serve(45.0)
    assert levels(watched) == [1, 2, 3, 2, 1, 0]
    assert sum(isinstance(f, Keyframe) and f.reset for f in watched.frames) == 1
    watched.check = check  # type: ignore[method-assign]
    watched.run()
    assert not watched.model.requests


def test_level_two_sums_steps_up() -> None:
    watched = Watched(step_seconds=0.001)
    watched.tap.ladder.level = 2
    watched.check = lambda: None  # type: ignore[method-assign]
    watched.add(make_request("r", 6, 40, arrival=100.0))
    for _ in range(41):
        watched.step()
    frames = watched.decoder.feed(watched.tap.take(0.0, idle=True))
    plans = [f for f in frames if isinstance(f, Plan)]
    model = Model()
    for frame in frames:
        model.take(frame)
    assert len(plans) <= 7, "six steps a hundredth of a second"
    # the last ones are summed up in a plan that is yet to come
    assert 30 <= sum(p.tokens for p in plans) <= 6 + 40
    assert sum(p.merged for p in plans) <= 41 and max(p.merged for p in plans) >= 9
    assert sum(isinstance(f, Done) for f in frames) == len(plans)


def test_level_one_leaves_chunks_out_but_not_who_comes_and_goes() -> None:
    watched = Watched(max_num_batched_tokens=8)
    watched.tap.ladder.level = 1
    watched.check = lambda: None  # type: ignore[method-assign]
    watched.add(make_request("r", 90, 10, arrival=100.0))
    watched.run()
    frames = watched.decoder.feed(watched.tap.take(0.0, idle=True))
    plans = [f for f in frames if isinstance(f, Plan)]
    assert [p.thin for p in plans[:9]] == [False, *[True] * 7, False]
    assert all(not p.events for p in plans if p.thin)
    assert sum(p.tokens for p in plans) == 99
    assert sum(isinstance(f, End) for f in frames) == 1


def test_news_is_gathered_for_a_twentieth_of_a_second() -> None:
    watched = Watched()
    watched.check = lambda: None  # type: ignore[method-assign]
    assert watched.tap.take(0.5, idle=True) == b"", "there is nothing to tell yet"
    watched.add(make_request("r", 6, 40, arrival=100.0))
    assert watched.tap.take(1.0)
    watched.step()
    assert watched.tap.take(1.02) == b""
    assert watched.tap.take(1.02, idle=True)
    watched.step()
    assert watched.tap.take(1.05) == b"" and watched.tap.take(1.08)


def test_nothing_that_was_said_is_told() -> None:
    """Neither prompts nor outputs nor token ids: a request whose ids are telling numbers."""
    watched = Watched()
    request = make_request("r", [901, 902, 903], 5, arrival=100.0)
    watched.add(request)
    watched.run()
    for token in (*request.asked.prompt_token_ids, *request.output_token_ids):
        assert token < 128 or token.to_bytes(4, "little") not in watched.data
    start = next(f for f in watched.frames if isinstance(f, Told) and f.type is FrameType.START)
    assert start.told["max_num_seqs"] == 8
