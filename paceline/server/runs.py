"""A request on the engine: its deltas for whoever asked, and every delivery for whoever watches.

::

    engine --sink--> observers, then the shortcut or what is held     no reader is woken
       `--outputs--> observers, then the reader

An observer hears of each delivery once, as soon as it is there, whichever way it goes. The shortcut
is explained in ``http.shortcut``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

import msgspec

from paceline.core.errors import (
    NOTHING_LEFT,
    EngineDrainingError,
    InvalidRequestError,
    RequestFailedError,
)
from paceline.engine.protocol import EngineClient
from paceline.engine.text.output_processor import merge_outputs
from paceline.engine.types import TOO_AMBIGUOUS, GenerationOutput, GenerationRequest
from paceline.http.shortcut import Shortcut

__all__ = ["RunObserver", "merged", "run_one"]

_T = TypeVar("_T")

# sources that begin in one turn of the loop: two thousand texts would hold it for 0.2 s
_STARTED: Final = 64
# outputs of a whole answer that are kept before they are joined
_HELD: Final = 256


class RunObserver(Protocol):
    """Watches one request, on the event loop. Times are seconds of ``time.monotonic()``."""

    def output(self, output: GenerationOutput, now: float) -> None:
        """A delivery; called for every token, so it is to be quick."""
        ...

    def end(self, error: Exception | None, now: float) -> None:
        """The end, however it came: called once. Without an error, either all was delivered or
        whoever asked went away."""
        ...


async def run_one(
    client: EngineClient,
    request: GenerationRequest,
    observe: Callable[[], Sequence[RunObserver]],
    shortcut: Shortcut[GenerationOutput] | None = None,
) -> AsyncGenerator[GenerationOutput, None]:
    """Deltas of one request, less what ``shortcut`` takes; of a ``whole`` request the counts, and
    at the end all of the answer.

    Args:
        observe: makes the observers when the run begins; they hear in this order.

    Raises:
        InvalidRequestError: what the caller asked for turned out to be impossible.
        RequestFailedError: it failed inside the engine.
        EngineDrainingError: it was aborted, and not by whoever asked.
        And what ``EngineClient.generate`` raises.
    """
    observers = observe()
    heard = tuple(observer.output for observer in observers)
    failure: Exception | None = None
    # of a request whose answer goes out whole
    held: list[GenerationOutput] = []

    def hold(output: GenerationOutput) -> None:
        held.append(output)
        if len(held) >= _HELD:
            held[:] = [merge_outputs(held)]

    def sink(output: GenerationOutput) -> bool:
        """Whatever nobody has to be woken for."""
        for choice in output.choices:
            if choice.finish_reason is not None:
                return False
        if not request.whole and (shortcut is None or not shortcut.is_open):
            return False
        now = time.monotonic()
        for hear in heard:
            hear(output, now)
        if request.whole:
            hold(output)
        elif shortcut is not None:
            shortcut.take(output, now)
        return True

    outputs = client.generate(request, sink)
    try:
        async for output in outputs:
            now = time.monotonic()
            for hear in heard:
                hear(output, now)
            _check(output)
            if not request.whole:
                yield output
                continue
            hold(output)
            if output.finished:
                yield merge_outputs(held)
            else:
                # the counts
                yield msgspec.structs.replace(output, choices=(), prompt_logprobs=None)
    except Exception as error:
        failure = error
        raise
    finally:
        now = time.monotonic()
        for observer in observers:
            observer.end(failure, now)
        await _close(outputs)


async def merged(
    sources: Sequence[AsyncGenerator[_T, None]],
) -> AsyncGenerator[tuple[int, _T], None]:
    """What all of ``sources`` yield as it comes, each with its source's place. Closing it closes
    them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    # bounded, so that a slow reader slows the engine client down, which merges deltas
    queue: asyncio.Queue[tuple[int, _T] | Exception | None] = asyncio.Queue(2 * len(sources))

    async def pump(index: int, source: AsyncGenerator[_T, None]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Future[None]] = []
    try:
        for index, source in enumerate(sources):
            if index and index % _STARTED == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.ensure_future(pump(index, source)))
        running = len(tasks)
        while running:
            found = await queue.get()
            if found is None:
                running -= 1
            elif isinstance(found, Exception):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check(output: GenerationOutput) -> None:
    for choice in output.choices:
        if choice.finish_reason == "error":
            message = choice.error or "the engine failed on this request"
            if TOO_AMBIGUOUS in message or NOTHING_LEFT in message:
                raise InvalidRequestError(message)
            raise RequestFailedError(message)
        if choice.finish_reason == "abort":
            # nobody else ends a request whose caller still listens
            raise EngineDrainingError("the request was aborted: the server is shutting down")


async def _close(outputs: AsyncIterator[GenerationOutput]) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()
