"""Driver of one call with asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from paceline.client.driver import carry_out
from paceline.client.events import Event, Finished
from paceline.client.machine import Machine
from paceline.client.steps import Broken, Connected, Input, Open, Start, Tick
from paceline.client.transport import Address, AnswerReader

__all__ = ["AsyncStream"]

_READ_BYTES = 65536


class AsyncStream(AsyncIterator[Event]):
    """The events of one call, which begins when the first event is read.

    ``aclose``, leaving its ``async with`` block and cancelling the task that reads it close the
    connection, and the server stops.
    """

    def __init__(self, machine: Machine, addresses: Sequence[Address]) -> None:
        self._events = _events(machine, addresses)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        """Return the next event; raises ClientError if the call fails."""
        return await anext(self._events)

    async def result(self) -> Finished:
        """Read to the end and return the whole answer. Raises ClientError as iterating does."""
        async for event in self:
            if isinstance(event, Finished):
                await self.aclose()
                return event
        raise ValueError("the stream has been read or closed")

    async def aclose(self) -> None:
        """End the call; harmless when it is over."""
        await self._events.aclose()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Connection:
    """One connection or none, and the answer on it."""

    def __init__(self, machine: Machine, addresses: Sequence[Address]) -> None:
        self._machine = machine
        self._addresses = addresses
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._reader = AnswerReader()

    def close(self) -> None:
        if self._streams is not None:
            # at once, as closing TLS in order would wait for the server
            self._streams[1].transport.abort()
            self._streams = None

    async def open(self, action: Open) -> Input:
        address = self._addresses[action.target]
        self._reader = AnswerReader()
        try:
            async with asyncio.timeout(self._seconds_left()):
                self._streams = await asyncio.open_connection(
                    address.host, address.port, ssl=address.tls
                )
                writer = self._streams[1]
                writer.write(address.request(action))
                await writer.drain()
        except TimeoutError:
            return Broken("no connection in time")
        except OSError as error:
            return Broken(f"no connection: {error.strerror or type(error).__name__}")
        return Connected()

    async def wait(self) -> list[Input]:
        """Return the next inputs, at the machine's deadline at the latest."""
        if self._streams is None:
            await asyncio.sleep(self._seconds_left())
            return [Tick()]
        # a delayed loop sees data and the deadline at once: data received already counts
        for seconds in (self._seconds_left(), 0.0):
            try:
                async with asyncio.timeout(seconds):
                    data = await self._streams[0].read(_READ_BYTES)
            except TimeoutError:
                continue
            except OSError as error:
                why = error.strerror or type(error).__name__
                return [Broken(f"the connection was lost: {why}")]
            return self._reader.feed(data, time.time())
        return [Tick()]

    def _seconds_left(self) -> float:
        return max(0.001, self._machine.deadline - time.monotonic())


async def _events(machine: Machine, addresses: Sequence[Address]) -> AsyncGenerator[Event, None]:
    connection = _Connection(machine, addresses)
    inputs: list[Input] = [Start()]
    try:
        while True:
            opening: Open | None = None
            for told in carry_out(machine, inputs, connection.close):
                if isinstance(told, Open):
                    opening = told
                else:
                    yield told
            if machine.over:
                return
            inputs = [await connection.open(opening)] if opening else await connection.wait()
    finally:
        machine.cancel()
        connection.close()
