"""Mistral: ``[TOOL_CALLS]`` and then ``[{"name": ..., "arguments": {...}}, ...]``, or, from the
newer tokenizers on, ``[TOOL_CALLS]name{...}`` and ``[TOOL_CALLS]name[ARGS]{...}`` per call."""

from __future__ import annotations

from typing import Final

from paceline.server.tool_formats.base import CallReader, Piece, ToolParser, held_back

__all__ = ["Mistral"]

_MARK: Final = "[TOOL_CALLS]"
_ARGS: Final = "[ARGS]"
_MAX_NAME: Final = 256


class Mistral:
    """See ``base.ToolFormat``."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
    arguments_key = "arguments"

    def parser(self, *, forced: bool) -> ToolParser:
        # the mark is a special token, which a grammar of text does not write
        return _Parser(marked=forced)

    def rule(self, *, parallel: bool) -> str:
        more = ' (", " call){0,15}' if parallel else ""
        return f'calls: "[" call{more} "]"\n'


class _Parser:
    def __init__(self, *, marked: bool) -> None:
        self._text = ""
        self._count = 0
        self._marked = marked
        self._call: CallReader | None = None

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while self._text:
            if self._call is not None:
                self._read(self._call, pieces)
            elif self._marked:
                if not self._begin(pieces):
                    break
            elif not self._find_mark(pieces):
                break
        return pieces

    def finish(self) -> list[Piece]:
        rest = self._text
        self._text = ""
        if self._call is not None and not self._call.named:
            rest = self._call.text + rest
        if self._count:
            rest = rest.strip(" \t\r\n,]")
        return [rest] if rest else []

    def _find_mark(self, pieces: list[Piece]) -> bool:
        position = self._text.find(_MARK)
        if position >= 0:
            if self._text[:position]:
                pieces.append(self._text[:position])
            self._text = self._text[position + len(_MARK) :]
            self._marked = True
            return True
        spoken = len(self._text) - held_back(self._text, _MARK)
        if spoken:
            pieces.append(self._text[:spoken])
            self._text = self._text[spoken:]
        return False

    def _begin(self, pieces: list[Piece]) -> bool:
        """The beginning of the next call after the mark; False while it is not there."""
        text = self._text.lstrip(" \t\r\n,")
        if text.startswith("[") and not text.startswith(_MARK[: len(text)]):
            text = text[1:].lstrip()
        if not text or text in ("]", "["):
            return False
        if text[0] == "{":
            self._text = text
            self._call = CallReader(self._count)
            return True
        if text[0] == "]":
            # the list is over; nothing else is a call, unless marked anew
            self._text, self._marked = text[1:], False
            return True
        if _MARK.startswith(text[: len(_MARK)]):
            if len(text) < len(_MARK):
                return False
            self._text = text[len(_MARK) :]
            return True
        brace = text.find("{")
        if brace < 0 and len(text) <= _MAX_NAME:
            return False
        name = text[: max(brace, 0)].removesuffix(_ARGS).strip()
        if brace < 0 or not name or len(name) > _MAX_NAME:
            self._marked = False
            pieces.append(text)
            self._text = ""
            return True
        self._text = text[brace:]
        self._call = CallReader(self._count, name)
        return True

    def _read(self, call: CallReader, pieces: list[Piece]) -> None:
        self._text = call.take(self._text)
        if call.broken and not call.named:
            pieces.append(call.text)
            self._call, self._marked = None, False
            return
        pieces.extend(call.deltas())
        if call.done:
            self._count += 1
            self._call = None
