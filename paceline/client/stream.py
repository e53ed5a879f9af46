"""Driver of one call with a blocking socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator, Iterator, Sequence

from paceline.client.driver import carry_out
from paceline.client.events import Event, Finished
from paceline.client.machine import Machine
from paceline.client.steps import Broken, Connected, Input, Open, Start, Tick
from paceline.client.transport import Address, AnswerReader

__all__ = ["Stream"]

_READ_BYTES = 65536


class Stream(Iterator[Event]):
    """The events of one call, which begins when the first event is read.

    Closing it, also by leaving its ``with`` block, closes the connection, and the server stops.
    """

    def __init__(self, machine: Machine, addresses: Sequence[Address]) -> None:
        self._events = _events(machine, addresses)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        """Return the next event; raises ClientError if the call fails."""
        return next(self._events)

    def result(self) -> Finished:
        """Read to the end and return the whole answer. Raises ClientError as iterating does."""
        for event in self:
            if isinstance(event, Finished):
                self.close()
                return event
        raise ValueError("the stream has been read or closed")

    def close(self) -> None:
        """End the call; harmless when it is over."""
        self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection:
    """One socket or none, and the answer on it."""

    def __init__(self, machine: Machine, addresses: Sequence[Address]) -> None:
        self._machine = machine
        self._addresses = addresses
        self._socket: socket.socket | None = None
        self._reader = AnswerReader()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def open(self, action: Open) -> Input:
        address = self._addresses[action.target]
        self._reader = AnswerReader()
        try:
            self._socket = socket.create_connection(
                (address.host, address.port), timeout=self._seconds_left()
            )
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is not None:
                self._socket = address.tls.wrap_socket(self._socket, server_hostname=address.host)
            self._socket.settimeout(self._seconds_left())
            self._socket.sendall(address.request(action))
        except TimeoutError:
            return Broken("no connection in time")
        except OSError as error:
            return Broken(f"no connection: {error.strerror or type(error).__name__}")
        return Connected()

    def wait(self) -> list[Input]:
        """Return the next inputs, at the machine's deadline at the latest."""
        if self._socket is None:
            time.sleep(self._seconds_left())
            return [Tick()]
        try:
            # data received already count, however late the caller reads them
            self._socket.settimeout(self._seconds_left())
            data = self._socket.recv(_READ_BYTES)
        except TimeoutError:
            return [Tick()]
        except OSError as error:
            return [Broken(f"the connection was lost: {error.strerror or type(error).__name__}")]
        return self._reader.feed(data, time.time())

    def _seconds_left(self) -> float:
        return max(0.001, self._machine.deadline - time.monotonic())


def _events(machine: Machine, addresses: Sequence[Address]) -> Generator[Event, None, None]:
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
            inputs = [connection.open(opening)] if opening is not None else connection.wait()
    finally:
        machine.cancel()
        connection.close()
