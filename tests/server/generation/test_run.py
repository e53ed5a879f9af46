"""Who hears what of a request on the engine, over a client whose outputs are written here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

import pytest

from paceline.core.sampling_params import SamplingParams
from paceline.engine.protocol import EngineClient, Sink
from paceline.engine.types import ChoiceDelta, GenerationOutput, GenerationRequest
from paceline.errors import EngineDrainingError, QueueFullError
from paceline.http.shortcut import Shortcut
from paceline.server.generation.run import merged, run_one


def output(*ids: int, end: str | None = None) -> GenerationOutput:
    return GenerationOutput(
        request_id="r",
        choices=(ChoiceDelta(index=0, text="x" * len(ids), token_ids=ids, finish_reason=end),),
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=len(ids),
        finished=end is not None,
    )


def request(*, whole: bool) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=9),
        arrival_time=0.0,
        whole=whole,
    )


class Client:
    """Offers each output to the sink, but the first."""

    def __init__(self, *outputs: GenerationOutput | Exception) -> None:
        self._outputs = outputs

    async def generate(
        self, request: GenerationRequest, sink: Sink
    ) -> AsyncIterator[GenerationOutput]:
        for number, each in enumerate(self._outputs):
            if isinstance(each, Exception):
                raise each
            if number and sink(each):
                continue
            yield each


class Observer:
    def __init__(self) -> None:
        self.heard: list[tuple[int, ...] | str] = []
        self.ends: list[Exception | None] = []

    def output(self, output: GenerationOutput, now: float) -> None:
        self.heard += [choice.token_ids for choice in output.choices]

    def end(self, error: Exception | None, now: float) -> None:
        self.ends.append(error)


class Writer:
    is_ready = True
    is_gone = False

    def __init__(self) -> None:
        self.num_bytes = 0
        self.written: list[bytes] = []

    def write(self, body: bytes) -> None:
        self.written.append(body)


async def run(
    *outputs: GenerationOutput | Exception, whole: bool = False, opened: bool = False
) -> tuple[list[tuple[int, ...]], Observer, list[bytes]]:
    """What the reader got, what two observers heard (the same), what the shortcut wrote."""
    observers = [Observer(), Observer()]
    shortcut: Shortcut[GenerationOutput] = Shortcut()
    shortcut.render_with(lambda output: output.choices[0].text.encode())
    writer = Writer()
    if opened:
        shortcut.open(writer)
    client = cast("EngineClient", Client(*outputs))
    read: list[tuple[int, ...]] = []
    try:
        async for each in run_one(client, request(whole=whole), lambda: observers, shortcut):
            read += [choice.token_ids for choice in each.choices]
    finally:
        first, second = observers
        assert (first.heard, first.ends) == (second.heard, second.ends)
    return read, first, writer.written


async def test_observers_hear_all_whichever_way_it_goes() -> None:
    outputs = output(1), output(2), output(3, 4), output(5, end="stop")
    everything = [(1,), (2,), (3, 4), (5,)]
    read, observer, written = await run(*outputs)
    assert (read, written) == (everything, [])
    assert (observer.heard, observer.ends) == (everything, [None])
    # the short way takes what neither begins nor ends an answer
    read, observer, written = await run(*outputs, opened=True)
    assert (read, written) == ([(1,), (5,)], [b"x", b"xx"])
    assert (observer.heard, observer.ends) == (everything, [None])
    # a whole answer is read once, at its end
    read, observer, written = await run(*outputs, whole=True)
    assert (read, written) == ([(1, 2, 3, 4, 5)], [])
    assert observer.heard == everything


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (QueueFullError("full", retry_after=1.0), QueueFullError),
        (output(2, end="abort"), EngineDrainingError),
    ],
)
async def test_the_end_is_told_with_its_error(
    last: GenerationOutput | Exception, kind: type[Exception]
) -> None:
    observer = Observer()
    client = cast("EngineClient", Client(output(1), last))
    with pytest.raises(kind):
        async for _ in run_one(client, request(whole=False), lambda: [observer]):
            pass
    (error,) = observer.ends
    assert isinstance(error, kind)


async def test_a_reader_who_goes_away_ends_it_without_an_error() -> None:
    observer = Observer()
    client = cast("EngineClient", Client(output(1), output(2), output(3, end="stop")))
    outputs = run_one(client, request(whole=False), lambda: [observer])
    await anext(outputs)
    await outputs.aclose()
    assert (observer.heard, observer.ends) == ([(1,)], [None])


async def test_several_come_as_they_come_and_end_together() -> None:
    observers = [Observer(), Observer()]
    clients = [
        Client(output(1), output(2, end="stop")),
        Client(output(3), QueueFullError("full", retry_after=1.0)),
    ]
    runs = [
        run_one(cast("EngineClient", client), request(whole=False), lambda o=o: [o])
        for client, o in zip(clients, observers, strict=True)
    ]
    seen = []
    with pytest.raises(QueueFullError):
        async for index, each in merged(runs):
            seen.append((index, each.choices[0].token_ids))
    assert {(0, (1,)), (1, (3,))} <= set(seen)
    assert all(len(observer.ends) == 1 for observer in observers)


async def test_many_sources_begin_in_several_turns() -> None:
    begun = 0
    most = 0

    async def source(number: int) -> AsyncGenerator[int, None]:
        nonlocal begun
        begun += 1
        yield number

    async def others() -> None:
        nonlocal most
        before = 0
        while True:
            most, before = max(most, begun - before), begun
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    found = [item async for item in merged([source(number) for number in range(1000)])]
    beside.cancel()
    assert sorted(found) == [(number, number) for number in range(1000)]
    assert most <= 128


async def test_sources_that_have_not_begun_do_not_when_it_is_closed() -> None:
    begun: set[int] = set()
    ended: set[int] = set()

    async def source(number: int) -> AsyncGenerator[int, None]:
        begun.add(number)
        try:
            yield number
        finally:
            ended.add(number)

    async def read() -> None:
        async with aclosing(merged([source(number) for number in range(1000)])) as found:
            async for _ in found:
                raise AssertionError("it was cancelled before that")

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < len(begun) < 1000 and begun == ended
