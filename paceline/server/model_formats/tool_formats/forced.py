"""Calls in output that a grammar restricts to calls; they are streamed as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from paceline.server.model_formats.tool_formats.base import CallDelta, Piece

__all__ = ["ForcedCalls"]

_SPACE: Final = " \t\r\n"


class ForcedCalls:
    """A ``base.ToolParser`` for output that a grammar restricts to objects of calls, with marks
    without braces between them."""

    def __init__(self) -> None:
        self._count = 0
        self._call: _CallReader | None = None

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                start = text.find("{")
                if start < 0:
                    break
                text = text[start:]
                self._call = _CallReader(self._count)
            text = self._call.take(text)
            pieces.extend(self._call.deltas())
            if self._call.done:
                self._count += 1
                self._call = None
        return pieces

    def finish(self) -> list[Piece]:
        return []


class _CallReader:
    """Reads one ``{"name": ..., "arguments": {...}}``, character by character, until ``done``.

    Arguments are emitted as they are written, once the name is known.
    """

    def __init__(self, index: int) -> None:
        self.done = False
        self._index = index
        self._name: str | None = None
        self._named = False
        self._chars: list[str] = []
        self._depth = 0
        self._quoted = False
        self._escaped = False
        # key of the member being read at depth 1, and the index where its value begins
        self._key: str | None = None
        self._start = 0
        self._arguments_from: int | None = None
        self._arguments_to: int | None = None
        self._num_sent = 0

    def take(self, text: str) -> str:
        """Read on; return the rest of ``text`` after the call's end."""
        for position, char in enumerate(text, 1):
            self._feed(char)
            if self.done:
                return text[position:]
        return ""

    def _feed(self, char: str) -> None:
        self._chars.append(char)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
            return
        if char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
            if self._depth == 1:
                self._start = len(self._chars)
        elif char in "}]":
            if self._depth == 1:
                self._end_of_member()
                self.done = True
            self._depth -= 1
        elif self._depth == 1 and char == ":" and self._key is None:
            self._begin_value()
        elif self._depth == 1 and char == ",":
            self._end_of_member()
            self._start = len(self._chars)
        elif char in _SPACE and self._arguments_from == len(self._chars) - 1:
            # white space before the value is not part of it
            self._arguments_from += 1

    def deltas(self) -> Iterator[CallDelta]:
        """Yield the additions since the last call."""
        if self._name is None or self._arguments_from is None:
            return
        if not self._named:
            self._named = True
            yield CallDelta(self._index, self._name, "")
        end = len(self._chars) if self._arguments_to is None else self._arguments_to
        begin = self._arguments_from + self._num_sent
        if end > begin:
            self._num_sent += end - begin
            yield CallDelta(self._index, None, "".join(self._chars[begin:end]))

    def _begin_value(self) -> None:
        self._key = json.loads("".join(self._chars[self._start : -1]))
        self._start = len(self._chars)
        if self._key in ("arguments", "parameters") and self._arguments_from is None:
            self._arguments_from = self._start

    def _end_of_member(self) -> None:
        end = len(self._chars) - 1
        if self._key == "name" and self._name is None:
            self._name = json.loads("".join(self._chars[self._start : end]))
        elif self._key in ("arguments", "parameters") and self._arguments_to is None:
            self._arguments_to = end
        self._key = None
