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
from typing import Final

__all__ = ["Shape"]

# a string of JSON that says something, as far as one can tell byte by byte; surrogates, which come
# in pairs, are left to who reads it whole
_STRING: Final = (
    rb'"(?:[ !#-\[\]-\xff]++|\\["\\/bfnrt]'
    rb'|\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))++"'
)
_text: Final = re.compile(_STRING).fullmatch
# the first text of a chunk of chat, or of completions
_split: Final = re.compile(rb'(\{.*?"(?:content|text)": ?)(' + _STRING + rb")(.*)").fullmatch
# and behind it, the ids of its tokens
_split_ids: Final = re.compile(rb'(.*"token_ids": ?\[)([0-9]{1,18})(\].*)').fullmatch
_MOST_DIGITS: Final = 18


class Shape:
    """Of one stream, from a chunk of one choice that says a text, and nothing else of note.

    Args:
        ids: where the ids of tokens are noted; None: its chunks have none.
    """

    __slots__ = ("_head", "_head_out", "_ids", "_middle", "_tail", "_tail_out")

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
        self._ids = ids

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
        """What the caller gets of ``data``, an event of this shape, whose token is noted; None: it
        is something else."""
        head, tail = self._head, self._tail
        if not (data.startswith(head) and data.endswith(tail)):
            return None
        text = data[len(head) : -len(tail)]
        ids = self._ids
        if ids is not None:
            # a text has no bare quotes, so what divides it from the ids is not in it
            text, middle, number = text.rpartition(self._middle)
            if not middle or not number.isdigit() or len(number) > _MOST_DIGITS:
                return None
        if _text(text) is None:
            return None
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError:
                return None
        if ids is not None:
            ids.append(int(number))
        return b"%b%b%b" % (self._head_out, text, self._tail_out)
