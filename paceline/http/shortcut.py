"""The short way of a streamed token: from the message that brought it onto the connection at once.

::

    the usual way   message -> stream -> (its task's turn) -> generators -> send() -> connection
    the short way   message -> sink -> Shortcut -> BodyWriter -> connection

Both carry the same bytes in the same order; the short one costs no turn of the event loop, and few
calls, which is what there is to save: all of it happens for every token of every stream. Whoever
brings the message asks a **sink** first, which either takes an output or leaves it to the usual
way. The sink of a streamed answer gives it to a ``Shortcut``, which knows two things: from the
endpoint how an output **reads** (``render_with``), from the response where that **goes** (``open``,
with the ``BodyWriter`` that the server's own protocol puts into the scope).

It is open between a stream's first event and its last, while the protocol writes and the connection
takes more. What keeps both ways in order:

* the sink is asked only while the stream's reader has read everything and waits for more;
* the first output, the last, and whatever ends a choice go the usual way, so errors, waiting and
  disconnects are handled there alone;
* while a reader is slow, outputs go the usual way, where they are joined until they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["BODY_WRITER", "AnswerWriter", "BodyWriter", "Shortcut"]

_Output = TypeVar("_Output")

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

    @property
    def is_gone(self) -> bool:
        """Whether the caller has hung up, as far as its connection was read."""
        ...

    def write(self, body: bytes) -> None:
        """One part, not empty, while ``is_ready``."""
        ...


class AnswerWriter(BodyWriter, Protocol):
    """One that can begin an answer, too."""

    def offer(self, body: bytes) -> bool:
        """``write`` if it ``is_ready``; whether it was."""
        ...

    def finish(self, body: bytes) -> bool:
        """The last part of an answer in parts, not empty, and its end, if it ``is_ready``; whether
        it was."""
        ...

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """The head of an answer in parts, and its first part; False: nothing was written, as the
        connection takes nothing now or the head is out already.

        Args:
            headers: names in small letters; none of them says how the body is framed.

        Raises:
            ValueError: a value has more than one line.
        """
        ...

    def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """All of an answer that is not in parts; otherwise as ``start``."""
        ...


class Shortcut(Generic[_Output]):
    """Of one answer, which is made of outputs of any one type. The endpoint says what an output
    reads as, the response where that goes; until both have, and once the response has closed it,
    nothing is taken."""

    __slots__ = ("_render", "_writer", "written_at")

    def __init__(self) -> None:
        self._render: Callable[[_Output], bytes] | None = None
        self._writer: BodyWriter | None = None
        # of the last part, seconds of ``time.monotonic()``; 0.0: there was none
        self.written_at = 0.0

    def render_with(self, render: Callable[[_Output], bytes]) -> None:
        """``render``: the events of an output that is neither the first nor ends a choice; empty
        where there is nothing to tell yet."""
        self._render = render

    def open(self, writer: BodyWriter) -> None:
        """From now on."""
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
