"""Template of a stream's chunks, learned from one of them.

Two chunks in the middle of an answer differ only in the text and the token's id. So once one chunk
was parsed, later ones are matched against it with a few comparisons of bytes::

    data: {"id":"x",...,"delta":{"content":"Once"},...,"token_ids":[7]}]}
    |------------ head ----------------|-text-|----- middle ----|ids|tail|

A chunk that does not match in every respect is parsed in full: this module never decides what an
event means. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

__all__ = ["ChunkTemplate", "RelayEvent", "relay_nothing"]

# the output for a read of one event that matches the template; None: the data is anything else
RelayEvent = Callable[[bytes], bytes | None]


def _string(last: bytes) -> bytes:
    """Build the pattern of a non-empty JSON string whose bytes go up to ``last``, as far as bytes
    can tell; surrogates, which come in pairs, are left to the full parser."""
    return (
        rb'"(?:[ !#-\[\]-%b]++|\\["\\/bfnrt]'
        rb'|\\u(?:[0-9a-cA-CefEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))++"' % last
    )


_STRING: Final = _string(rb"\xff")
_text: Final = re.compile(_STRING).fullmatch
_ascii_text: Final = re.compile(_string(rb"\x7f")).fullmatch
# the first text of a chunk of chat or completions
_split: Final = re.compile(rb'(\{.*?"(?:content|text)": ?)(' + _STRING + rb")(.*)").fullmatch
# and after it, the ids of its tokens
_split_ids: Final = re.compile(rb'(.*"token_ids": ?\[)([0-9]{1,18})(\].*)').fullmatch
_MOST_DIGITS: Final = 18


def relay_nothing(data: bytes) -> None:
    """The ``RelayEvent`` of a stream without a template."""


def _is_text(text: bytes) -> bool:
    """Whether it is a JSON string in UTF-8."""
    if _text(text) is None:
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class ChunkTemplate:
    """Template of one stream, from a chunk of one choice with a text and nothing else of note.

    Args:
        ids: list to append token ids to; None: the chunks have none.
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
        # where the part between head and tail begins and, counted from the end, ends
        self._from, self._to = len(head), -len(tail)
        self._ids = ids
        # chunks relayed without ids
        self.num_parts = 0

    @classmethod
    def of(cls, payload: bytes, out: bytes, ids: list[int] | None) -> ChunkTemplate | None:
        """Learn from a chunk; None: it cannot serve as a template.

        Args:
            payload: the chunk, in one line.
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

    def relay_event(self, data: bytes) -> bytes | None:
        """Return the output for a matching event; note its token's id, or count the chunk."""
        if not (data.startswith(self._head) and data.endswith(self._tail)):
            return None
        text = data[self._from : self._to]
        ids = self._ids
        if ids is not None:
            # a text has no bare quotes, so it cannot contain the middle part
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
