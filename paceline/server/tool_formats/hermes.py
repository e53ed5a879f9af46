"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, amid text."""

from __future__ import annotations

from typing import Final

from paceline.server.tool_formats.base import CallReader, Piece, ToolParser, held_back

__all__ = ["Hermes"]

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class Hermes:
    """See ``base.ToolFormat``."""

    name = "hermes"
    marks = ("<tool_call>",)
    arguments_key = "arguments"

    def parser(self, *, forced: bool) -> ToolParser:
        # forced or not, every call is marked
        return _Parser()

    def rule(self, *, parallel: bool) -> str:
        more = r' ("\n" one){0,15}' if parallel else ""
        return f'calls: one{more}\none: "{_BEGIN}\\n" call "\\n{_END}"\n'


class _Parser:
    def __init__(self) -> None:
        self._text = ""
        self._count = 0
        self._call: CallReader | None = None
        # between the end of a call's object and its closing mark
        self._closing = False

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while self._text:
            if self._call is not None:
                self._read(self._call, pieces)
            elif self._closing:
                if not self._find_end():
                    break
            elif not self._find_begin(pieces):
                break
        return pieces

    def finish(self) -> list[Piece]:
        rest = self._text
        self._text = ""
        if self._call is not None and not self._call.named:
            # it broke off before it was a call
            rest = _BEGIN + self._call.text + rest
        elif self._closing:
            rest = ""
        return [rest] if rest and not (self._count and rest.isspace()) else []

    def _find_begin(self, pieces: list[Piece]) -> bool:
        position = self._text.find(_BEGIN)
        if position >= 0:
            before = self._text[:position].rstrip()
            if before:
                pieces.append(before)
            self._text = self._text[position + len(_BEGIN) :]
            self._call = CallReader(self._count)
            return True
        # what may be the beginning of a mark waits, and the white space before one
        keep = held_back(self._text, _BEGIN)
        spoken = self._text[: len(self._text) - keep]
        visible = spoken.rstrip()
        if visible:
            pieces.append(visible)
            self._text = self._text[len(visible) :]
        return False

    def _read(self, call: CallReader, pieces: list[Piece]) -> None:
        self._text = call.take(self._text)
        if call.broken and not call.named:
            pieces.append(_BEGIN + call.text)
            self._call = None
            return
        pieces.extend(call.deltas())
        if call.done:
            self._count += 1
            self._call, self._closing = None, True

    def _find_end(self) -> bool:
        position = self._text.find(_END)
        if position < 0:
            stripped = self._text.lstrip()
            if stripped and not _END.startswith(stripped[: len(_END)]):
                # the mark was left out
                self._closing = False
                return True
            return False
        self._text = self._text[position + len(_END) :].lstrip("\n")
        self._closing = False
        return True
