"""Execution of a machine's actions, in order, for both drivers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from paceline.client.events import Event
from paceline.client.machine import Machine
from paceline.client.steps import Close, Emit, Fail, Input, Open

__all__ = ["carry_out"]


def carry_out(
    machine: Machine, inputs: Sequence[Input], close: Callable[[], None]
) -> Iterator[Event | Open]:
    """Pass inputs to the machine; yield events for the caller, and at the end the connection to
    open, if one is wanted.

    Args:
        close: drops the connection. Later inputs were read from it, so they are not passed.

    Raises ClientError if the call has failed.
    """
    for given in inputs:
        opening: Open | None = None
        dropped = False
        for action in machine.handle(given, time.monotonic()):
            match action:
                case Emit(event):
                    yield event
                case Open():
                    opening = action
                case Close():
                    close()
                    dropped = True
                case Fail(error):
                    raise error
        if opening is not None:
            yield opening
        if dropped or opening is not None:
            return
