"""Calls amid text: a model's output is searched for calls, and the rest is text, verbatim.

::

    said ... mark  head  {"name": ...}  end mark ... said
             `---------------.-----------------'
              held until it is complete; then a call, or text like the rest

The result does not depend on how the text is split: a decision waits for the text it depends on.
White space that stands alone before, between or after calls is layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from paceline.server.model_formats.tool_formats.base import CallDelta, Piece, held_back
from paceline.server.model_formats.tool_formats.call_json import (
    BLANK,
    JsonEnd,
    Written,
    arguments_of,
    call_of,
)

__all__ = ["GAP", "CallsAmidText", "Shape", "begins"]

# white space between a mark and the text that belongs to it
GAP: Final = r"\s{0,64}"


def begins(text: str) -> str:
    """Return a pattern of every beginning of ``text``, including "" and all of it."""
    pattern = ""
    for char in reversed(text):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The syntax of calls within text in one format."""

    # marks that begin a call
    marks: tuple[str, ...]
    # from the mark's end to the start of the JSON; with a group ``name`` the JSON is only the
    # arguments, and a group ``id`` is the call's id
    head: re.Pattern[str]
    # every beginning of a match of ``head``
    part_of_head: re.Pattern[str]
    # from a call's end to the JSON of the next one without a mark, or with a group ``over`` to the
    # end of the list; None: every call has a mark
    next: re.Pattern[str] | None = None
    part_of_next: re.Pattern[str] | None = None
    # one of these must follow the JSON, if anything follows before the next mark
    ends: tuple[str, ...] = ()
    # members of ``marks`` that are text after text
    separators: tuple[str, ...] = ()
    # ids that the JSON may give its call; None: this format has none
    id: re.Pattern[str] | None = None
    # characters that are layout where they stand alone
    blank: str = BLANK


@dataclass(slots=True)
class _Candidate:
    """A possible call, at the beginning of the held text."""

    # start of the JSON
    start: int
    end: JsonEnd
    # name of a call whose JSON is only the arguments; None: the JSON has the name
    name: str | None
    id: str
    # characters that become text if it is not a call; the search continues after them
    skip: int
    # its JSON, once that has ended
    call: Written | None = None
    # where the search for an end mark continues
    seen: int = 0


class CallsAmidText:
    """A ``base.ToolParser`` for output that may be text.

    Args:
        names: names of the tools that may be called.
        at_start: a call may begin without a mark at the start, as after another call.
    """

    def __init__(self, shape: Shape, names: Collection[str], *, at_start: bool = False) -> None:
        self._shape = shape
        self._names = frozenset(names)
        self._held = ""
        self._candidate: _Candidate | None = None
        # the held text begins where a call needs no mark
        self._follows = at_start
        # text since the last call, as long as it is layout; else None
        self._layout: str | None = ""
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        return self._pieces(last=False)

    def finish(self) -> list[Piece]:
        pieces = self._pieces(last=True)
        if self._layout and not self._count:
            pieces.append(self._layout)
        return pieces

    def _pieces(self, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            step = self._find if self._candidate is None else self._read
            if not step(pieces, last):
                break
        return pieces

    def _say(self, count: int, pieces: list[Piece]) -> None:
        """Emit ``count`` characters of the held text as text."""
        text, self._held = self._held[:count], self._held[count:]
        if self._layout is not None:
            if not text.strip(self._shape.blank):
                self._layout += text
                return
            text, self._layout = self._layout + text, None
        if text:
            pieces.append(text)

    def _find(self, pieces: list[Piece], last: bool) -> bool:
        """Look for a call; return whether to read on, after text or in a possible call."""
        if self._follows and (found := self._follow(last)) is not None:
            return found
        shape = self._shape
        marks_at = [(p, mark) for mark in shape.marks if (p := self._held.find(mark)) >= 0]
        if not marks_at:
            kept = 0 if last else max(held_back(self._held, mark) for mark in shape.marks)
            self._say(len(self._held) - kept, pieces)
            return False
        place, mark = min(marks_at)
        if place:
            self._say(place, pieces)
        head = shape.head.match(self._held, len(mark))
        if head is not None and mark in shape.separators:
            self._say(head.end(), pieces)
            self._candidate = _Candidate(0, JsonEnd(0), None, "", 1)
            return True
        if head is not None:
            self._begin(head, len(mark))
            return True
        if not last and shape.part_of_head.fullmatch(self._held, len(mark)):
            return False
        self._say(len(mark), pieces)
        return True

    def _follow(self, last: bool) -> bool | None:
        """Look for a call that needs no mark, like ``_find``; None if none follows."""
        shape = self._shape
        assert shape.next is not None and shape.part_of_next is not None, "calls follow calls"
        found = shape.next.match(self._held)
        if found is None:
            if not last and shape.part_of_next.fullmatch(self._held):
                return False
            self._follows = False
            return None
        if not found.groupdict().get("over"):
            self._begin(found, found.end() + 1)
            return True
        self._follows = False
        if self._layout is None:
            # the list's last item was text
            return None
        self._held = self._held[found.end() :]
        return True

    def _begin(self, head: re.Match[str], skip: int) -> None:
        groups = head.groupdict()
        start = head.end()
        self._candidate = _Candidate(
            start, JsonEnd(start), groups.get("name"), groups.get("id") or "", skip
        )
        self._follows = False

    def _read(self, pieces: list[Piece], last: bool) -> bool:
        """Return whether a possible call was decided: it is a call, or text."""
        candidate, shape = self._candidate, self._shape
        assert candidate is not None, "there is one to read"
        if candidate.call is None:
            ended = self._json_ended(candidate)
            if ended is False and not last:
                return False
            call = self._written(candidate) if ended else None
            if call is None:
                return self._reject(candidate.skip, pieces)
            if call.name not in self._names:
                # all of its JSON is text, whatever it contains
                follows = shape.next is not None and candidate.name is None
                self._reject(candidate.end.place, pieces)
                self._follows = follows
                return True
            candidate.call, candidate.seen = call, candidate.end.place
        end = self._end(candidate, last)
        if end is None:
            return False
        if end < 0:
            return self._reject(candidate.skip, pieces)
        call = candidate.call
        given = call.id if shape.id is not None and shape.id.fullmatch(call.id) else ""
        pieces.append(CallDelta(self._count, call.name, call.arguments, candidate.id or given))
        self._count += 1
        self._layout = ""
        self._follows = shape.next is not None and candidate.name is None
        self._candidate, self._held = None, self._held[end:]
        return True

    def _reject(self, count: int, pieces: list[Piece]) -> bool:
        self._candidate = None
        self._say(count, pieces)
        return True

    def _json_ended(self, candidate: _Candidate) -> bool | None:
        """Return ``JsonEnd.look``; bare arguments may be ``null``, or empty before an end mark."""
        if candidate.name is not None:
            if self._held.startswith("null", candidate.start):
                candidate.end.place = candidate.start + len("null")
                return True
            if self._held.startswith(self._shape.ends, candidate.start):
                return True
        return candidate.end.look(self._held)

    def _written(self, candidate: _Candidate) -> Written | None:
        text = self._held[candidate.start : candidate.end.place]
        if candidate.name is None:
            return call_of(text)
        arguments = arguments_of(text)
        return None if arguments is None else Written(candidate.name, arguments)

    def _end(self, candidate: _Candidate, last: bool) -> int | None:
        """Return where a call with complete JSON ends; below 0 if other text precedes the end mark,
        None if that is still open."""
        shape, held, json_end = self._shape, self._held, candidate.end.place
        if not shape.ends:
            return json_end
        marks = shape.ends + shape.marks
        marks_at = [(p, m) for m in marks if (p := held.find(m, candidate.seen)) >= 0]
        if not marks_at:
            if not last:
                candidate.seen = max(json_end, len(held) - max(map(len, marks)))
                return None
            rest = held[json_end:].strip(BLANK)
            return len(held) if any(m.startswith(rest) for m in shape.ends) else json_end
        place, mark = min(marks_at)
        if mark in shape.marks:
            return json_end
        return -1 if held[json_end:place].strip(BLANK) else place + len(mark)
