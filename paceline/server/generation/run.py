"""A request on the engine: its deltas for the caller, and every delivery for its observers.

::

    engine --sink--> observers, then the shortcut or the held outputs; wakes no reader
       `--outputs--> observers, then the reader

Each observer gets every delivery once, as soon as it arrives, on either path. The shortcut is
explained in ``http.shortcut``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol, TypeVar

import msgspec

from paceline.engine.protocol import EngineClient
from paceline.engine.text.output_processor import merge_outputs
from paceline.engine.types import TOO_AMBIGUOUS, GenerationOutput, GenerationRequest
from paceline.errors import (
    NOTHING_LEFT,
    EngineDrainingError,
    InvalidRequestError,
    RequestFailedError,
)
from paceline.http.shortcut import Shortcut

__all__ = ["RunObserver", "merged", "run_one"]

_T = TypeVar("_T")

# sources started in one turn of the loop: two thousand texts would block it for 0.2 s
_STARTED: Final = 64
# outputs of a whole answer that are kept before they are merged
_HELD: Final = 256


class RunObserver(Protocol):
    """Watches one request, on the event loop. Times are seconds of ``time.monotonic()``."""

    def output(self, output: GenerationOutput, now: float) -> None:
        """Take in a delivery. Called for every token, so it must be quick."""

    def end(self, error: Exception | None, now: float) -> None:
        """Take in the end; called once. Without an error, either all was delivered or the caller
        went away."""


async def run_one(
    client: EngineClient,
    request: GenerationRequest,
    observe: Callable[[], Sequence[RunObserver]],
    shortcut: Shortcut[GenerationOutput] | None = None,
) -> AsyncGenerator[GenerationOutput, None]:
    """Yield the deltas of one request, except those that ``shortcut`` takes; for a ``whole``
    request yield counts, and at the end the whole answer.

    Args:
        observe: makes the observers when the run begins; they are called in this order.

    Raises:
        InvalidRequestError: the request turned out to be impossible.
        RequestFailedError: it failed inside the engine.
        EngineDrainingError: it was aborted, and not by its caller.
        And the errors of ``EngineClient.generate``.
    """
    observers = observe()
    heard = tuple(observer.output for observer in observers)
    failure: Exception | None = None
    # outputs of a request whose answer is sent whole
    held: list[GenerationOutput] = []

    def hold(output: GenerationOutput) -> None:
        held.append(output)
        if len(held) >= _HELD:
            held[:] = [merge_outputs(held)]

    def sink(output: GenerationOutput) -> bool:
        """Take an output without waking the reader, if possible."""
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
                # only the counts; the text follows at the end
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
    """Yield the items of all ``sources`` as they arrive, each with its source's index. Closing it
    closes them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    # bounded, so that a slow reader slows down the engine client, which then merges deltas
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
            # only a shutdown ends a request whose caller still listens
            raise EngineDrainingError("the request was aborted: the server is shutting down")


async def _close(outputs: AsyncIterator[GenerationOutput]) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()
