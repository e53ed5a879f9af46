"""What the chunks of one stream have in common.

Of two chunks in the middle of an answer the text and the token's id differ, and nothing else. So
once one was read whole, those after it are held against it, in a few comparisons of bytes::

    data: {"id":"x",...,"delta":{"content":"Once"},...,"token_ids":[7]}]}
    |------------ head ----------------|-text-|----- middle ----|ids|tail|

What does not fit, in whatever way, is read whole again: this is never the one that says what an
event means. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

__all__ = ["Relay", "Shape", "relay_nothing"]

# what the caller gets of a part of a stream, one event that looks like those before it; None: it is
# something else
Relay = Callable[[bytes], bytes | None]


def _string(last: bytes) -> bytes:
    """Of a string of JSON that says something, whose bytes go up to ``last``, as far as one can
    tell byte by byte; surrogates, which come in pairs, are left to who reads it whole."""
    return (
        rb'"(?:[ !#-\[\]-%b]++|\\["\\/bfnrt]'
        rb'|\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))++"' % last
    )


_STRING: Final = _string(rb"\xff")
_text: Final = re.compile(_STRING).fullmatch
_ascii_text: Final = re.compile(_string(rb"\x7f")).fullmatch
# the first text of a chunk of chat, or of completions
_split: Final = re.compile(rb'(\{.*?"(?:content|text)": ?)(' + _STRING + rb")(.*)").fullmatch
# and behind it, the ids of its tokens
_split_ids: Final = re.compile(rb'(.*"token_ids": ?\[)([0-9]{1,18})(\].*)').fullmatch
_MOST_DIGITS: Final = 18


def relay_nothing(data: bytes) -> None:
    """The ``Relay`` of a stream of which nothing is known."""


def _is_text(text: bytes) -> bool:
    """Whether it is a string of JSON, in UTF-8."""
    if _text(text) is None:
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class Shape:
    """Of one stream, from a chunk of one choice that says a text, and nothing else of note.

    Args:
        ids: where the ids of tokens are noted; None: its chunks have none.
    """

    __slots__ = (
        "_from", "_head", "_head_out", "_ids", "_middle", "_tail", "_tail_out", "_to", "num_parts",
    )  # fmt: skip

    def __init__(
        self,
        head: bytes,
        middle: bytes,
        tail: bytes,
        out: tuple[bytes, bytes],
        ids: list[int] | None,
    ) -> None:
        self._head, self._middle, self._tail = head, middle, tail
        self._head_out, self._tail_out = out
        # of what is between, where it begins and, from the end, where it ends
        self._from, self._to = len(head), -len(tail)
        self._ids = ids
        # relayed without ids
        self.num_parts = 0

    @classmethod
    def of(cls, payload: bytes, out: bytes, ids: list[int] | None) -> Shape | None:
        """None: it is not of a kind that others can be held against.

        Args:
            payload: of the chunk, one line.
            out: the whole event that the caller gets for it.
        """
        found = _split(payload)
        told = None if found is None else _split(out[6:-2])
        if found is None or told is None or found[2] != told[2] or b'"token_ids"' in told[3]:
            return None
        head, rest = b"data: " + found[1], found[3]
        sides = (b"data: " + told[1], told[3] + b"\n\n")
        if ids is None:
            return None if b'"token_ids":' in rest else cls(head, b"", rest + b"\n\n", sides, None)
        parts = _split_ids(rest)
        if parts is None or b'"token_ids"' in parts[3] or b'"token_ids"' in head:
            return None
        return cls(head, parts[1], parts[3] + b"\n\n", sides, ids)

    def relay(self, data: bytes) -> bytes | None:
        """See ``Relay``; its token is noted, or that there was one."""
        if not (data.startswith(self._head) and data.endswith(self._tail)):
            return None
        text = data[self._from : self._to]
        ids = self._ids
        if ids is not None:
            # a text has no bare quotes, so what divides it from the ids is not in it
            text, middle, number = text.rpartition(self._middle)
            if not middle or not number.isdigit() or len(number) > _MOST_DIGITS:
                return None
        if _ascii_text(text) is None and not _is_text(text):
            return None
        if ids is None:
            self.num_parts += 1
        else:
            ids.append(int(number))
        return b"%b%b%b" % (self._head_out, text, self._tail_out)
