"""The short way of a streamed token: from the engine's message onto the connection at once.

::

    the usual way   message -> stream -> (its task's turn) -> generators -> send() -> connection
    the short way   message -> Shortcut.take -> BodyWriter -> connection

Both carry the same bytes in the same order; the short one costs no turn of the event loop. It is
open between a stream's first event and its last, while the server's own protocol writes and the
connection takes more. The first output, the last, whatever ends a choice, and what comes while a
reader is slow go the usual way, so waiting, errors and disconnects are nobody's business here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from paceline.engine.types import GenerationOutput

__all__ = ["BODY_WRITER", "BodyWriter", "Shortcut"]

# extension of a scope: its BodyWriter
BODY_WRITER: Final = "paceline.body_writer"


class BodyWriter(Protocol):
    """Writes parts of one answer's body past ``send``, and counts them."""

    # bytes of the body that went this way
    num_bytes: int

    @property
    def is_ready(self) -> bool:
        """Whether a part can go out now: the answer has begun and is not over, somebody listens,
        and what was written before is not waiting for a slow reader."""
        ...

    def write(self, body: bytes) -> None:
        """One part, not empty, while ``is_ready``."""
        ...


class Shortcut:
    """Of one answer. The endpoint says what an output reads as, the response where that goes; until
    both have, and once the response has closed it, nothing is taken."""

    __slots__ = ("_render", "_write", "_writer")

    def __init__(self) -> None:
        self._render: Callable[[GenerationOutput], bytes] | None = None
        self._writer: BodyWriter | None = None
        self._write: Callable[[bytes], None] | None = None

    def render_with(self, render: Callable[[GenerationOutput], bytes]) -> None:
        """``render``: the events of an output; empty where there is nothing to tell yet."""
        self._render = render

    def open(self, writer: BodyWriter, write: Callable[[bytes], None]) -> None:
        """From now on. ``write`` calls ``writer``'s and notes what there is to note."""
        self._writer, self._write = writer, write

    def close(self) -> None:
        self._writer = self._write = None

    @property
    def is_open(self) -> bool:
        return self._render is not None and self._writer is not None and self._writer.is_ready

    def take(self, output: GenerationOutput) -> None:
        """Write what ``output`` adds to the answer. Only while open."""
        assert self._render is not None and self._write is not None, "the shortcut is closed"
        data = self._render(output)
        if data:
            self._write(data)
