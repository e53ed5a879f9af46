"""What the tap costs is bounded, and what it costs it is told by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.grammar import Grammar, TokenMatcher
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import Slo
from paceline.engine.process.loop import EngineLoop
from paceline.engine.process.messages import Abort, Add, ClientMessage, Shutdown, TimelineNews
from paceline.engine.testing import null_core
from paceline.engine.types import GenerationRequest
from paceline.errors import InvalidRequestError
from paceline.timeline.codec import Decoder
from paceline.timeline.events import Done, End, FrameType, Keyframe, Plan, Told
from paceline.timeline.model import Model
from paceline.timeline.steps import LEVELS
from paceline.timeline.tap import Door
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
        # one byte and three zeros are in the times, too
        assert token < 256 or token.to_bytes(4, "little") not in watched.data
    start = next(f for f in watched.frames if isinstance(f, Told) and f.type is FrameType.START)
    assert start.told["max_num_seqs"] == 8


class _Matchers:
    """Compiles when it is told to."""

    timeout = 60.0

    def __init__(self) -> None:
        self.futures: dict[str, Future[None]] = {}

    def prepare(self, grammar: Grammar) -> Future[None]:
        return self.futures.setdefault(grammar.source, Future())

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        raise NotImplementedError("none of these requests comes so far")

    def close(self) -> None:
        pass


class _Script:
    """An inbox that does one thing after the other, and looks at what was told in between."""

    def __init__(self, *acts: Any) -> None:
        self._acts = list(acts)

    def receive(self, timeout: float) -> Sequence[ClientMessage]:
        if not self._acts:
            return [Shutdown()]
        act = self._acts.pop(0)
        return [act] if isinstance(act, Add | Abort) else (act() or [])


def asked(name: str, **more: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt_token_ids": (1, 2, 3), "arrival_time": 7.0}
    sampling = SamplingParams(max_tokens=4, grammar=more.pop("grammar", None))
    return GenerationRequest(request_id=name, sampling=sampling, **fields | more)


def play(*acts: Any) -> Model:
    """What a reader knows after all of it; functions among the acts are called with it."""
    core = null_core(NullBackend(vocab_size=300), timeline=True, max_num_waiting=1, max_num_seqs=1)
    matchers = core.matchers = _Matchers()
    model, decoder = Model(), Decoder()
    now = [100.0]

    def read(message: Any) -> None:
        if isinstance(message, TimelineNews):
            for frame in decoder.feed(message.frames):
                model.take(frame)

    def clock() -> float:
        # so that each news is worth a message
        now[0] += 0.1
        return now[0]

    bound = [
        act if isinstance(act, Add | Abort) else (lambda act=act: act(model, matchers))
        for act in acts
    ]
    try:
        EngineLoop(core, _Script(*bound), read, clock).run()
    finally:
        core.close()
    assert not decoder.num_broken
    return model


def test_waiting_for_a_grammar_is_told_while_it_lasts() -> None:
    seen: list[list[Any]] = []
    word = Grammar("regex", "a+")

    def look(model: Model, _: _Matchers) -> None:
        seen.append([entry[:3] for entry in model.held])

    def fails(_: Model, matchers: _Matchers) -> None:
        matchers.futures["a+"].set_exception(InvalidRequestError("no such grammar", "grammar"))

    slo = Slo(slo_class="batch")
    model = play(
        Add(asked("one", grammar=word, slo=slo, tenant="t")), look, look,
        Add(asked("two", grammar=Grammar("regex", "b+"))), look, look,
        Abort(("two/0",)), look, look,
        fails, look, look,
    )  # fmt: skip
    told = [entry for index, entry in enumerate(seen) if index % 2]
    one, two = ["one", "batch", "t"], ["two", Slo().slo_class, ""]
    assert told == [[one], [one, two], [one], []]
    assert [entry[0] for entry in model.refused] == ["one"]
    # its kind alone: the message may quote what was asked
    assert model.refused[0][1:3] == ["batch", "t"] and model.refused[0][4] == "InvalidRequestError"
    assert model.num_refused == 1 and not model.requests


def test_a_refusal_at_the_door_is_told_with_its_reason() -> None:
    model = play(*(Add(asked(f"r{index}")) for index in range(4)))
    assert model.num_refused >= 1
    assert {entry[4] for entry in model.refused} == {"queue-full"}
    assert all(entry[3] > 100.0 for entry in model.refused)


@pytest.mark.parametrize("kind", ["held", "refused"])
def test_a_flood_is_counted_and_not_named(kind: str) -> None:
    door = Door()
    for index in range(1000):
        if kind == "held":
            door.hold(f"{index}", "c" * 300, "", 1.0)
        else:
            door.refuse(f"{index}", "c" * 300, "", 1.0, "queue-full")
    data = door.take(whole=False)
    assert len(data) < 20_000
    (frame,) = Decoder().feed(data)
    assert isinstance(frame, Told) and frame.type is FrameType.DOOR
    assert frame.told[f"num_{kind}"] == 1000 and len(frame.told[kind]) <= 64
    assert len(frame.told[kind][0][1]) == 128
    assert door.take(whole=False) == b"", "what has not changed is not told again"
    again = door.take(whole=True)
    # whoever begins here is told who waits, and nothing that is over
    assert bool(again) is (kind == "held")
