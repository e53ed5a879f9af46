"""Who waits for a grammar and who was refused, as an engine's loop tells it."""

from __future__ import annotations

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
from paceline.timeline.door import Door
from paceline.timeline.events import FrameType, Told
from paceline.timeline.model import Model


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
