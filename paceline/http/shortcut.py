"""The fast path of a streamed token: from the engine's message to the connection at once.

::

    slow path   message -> stream -> (its task's turn) -> generators -> send() -> connection
    fast path   message -> sink -> Shortcut -> BodyWriter -> connection

Both carry the same bytes in the same order; the fast path costs no turn of the event loop, and few
calls, which matters as this happens for every token of every stream. The receiver of a message
calls a **sink** first, which either takes an output or leaves it to the slow path. The sink of a
streamed answer passes it to a ``Shortcut``, which knows two things: from the endpoint how to
**render** an output (``render_with``), from the response where to **write** it (``open``, with the
``BodyWriter`` that the server's own protocol puts into the scope).

It is open between a stream's first event and its last, while the protocol writes and the connection
takes more. The order of both paths is kept, because:

* the sink is called only while the stream's reader has read everything and waits for more;
* the first output, the last, and all that end a choice take the slow path, so errors, waiting and
  disconnects are handled there alone;
* while a reader is slow, outputs take the slow path, where they are merged until they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.http.body_writer import BodyWriter

__all__ = ["Shortcut"]

_Output = TypeVar("_Output")


class Shortcut(Generic[_Output]):
    """The fast path of one answer, for outputs of one type. The endpoint sets how to render an
    output, the response where to write it; before both, and after the response has closed it, it
    takes nothing."""

    __slots__ = ("_render", "_writer", "written_at")

    def __init__(self) -> None:
        self._render: Callable[[_Output], bytes] | None = None
        self._writer: BodyWriter | None = None
        # time of the last part, seconds of ``time.monotonic()``; 0.0: there was none
        self.written_at = 0.0

    def render_with(self, render: Callable[[_Output], bytes]) -> None:
        """Set ``render``, which returns the events of an output that is neither the first nor ends
        a choice; empty if there is nothing to send yet."""
        self._render = render

    def open(self, writer: BodyWriter) -> None:
        """Start writing to ``writer``."""
        self._writer = writer

    def close(self) -> None:
        self._writer = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None and self._render is not None and self._writer.is_ready

    def take(self, output: _Output, now: float) -> None:
        """Write what ``output`` adds to the answer. Only while open; ``now`` as ``written_at``."""
        assert self._render is not None and self._writer is not None, "the shortcut is closed"
        data = self._render(output)
        if data:
            self.written_at = now
            self._writer.write(data)
