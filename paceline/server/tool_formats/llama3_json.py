"""Llama 3: the whole output is ``{"name": ..., "parameters": {...}}``, or several with ``;``."""

from __future__ import annotations

from typing import Final

from paceline.server.tool_formats.base import CallReader, Piece, ToolParser

__all__ = ["Llama3Json"]

_TAG: Final = "<|python_tag|>"
_BETWEEN: Final = " \t\r\n;"


class Llama3Json:
    """See ``base.ToolFormat``."""

    name = "llama3_json"
    marks = ("<|python_tag|>", "<|eom_id|>")
    arguments_key = "parameters"

    def parser(self, *, forced: bool) -> ToolParser:
        return _Parser()

    def rule(self, *, parallel: bool) -> str:
        more = ' ("; " call){0,15}' if parallel else ""
        return f"calls: call{more}\n"


class _Parser:
    def __init__(self) -> None:
        self._text = ""
        self._count = 0
        self._call: CallReader | None = None
        # nothing but white space so far, or calls
        self._may_call = True

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while self._text:
            if not self._may_call:
                pieces.append(self._text)
                self._text = ""
            elif self._call is not None:
                self._read(self._call, pieces)
            elif not self._begin():
                break
        return pieces

    def finish(self) -> list[Piece]:
        rest = self._text
        if self._call is not None and not self._call.named:
            rest = self._call.text + rest
        self._text = ""
        return [rest] if rest.strip(_BETWEEN) else []

    def _begin(self) -> bool:
        """Whether a call begins in the text; while that is open, False."""
        start = self._text.lstrip(_BETWEEN)
        if not start or (len(start) < len(_TAG) and _TAG.startswith(start)):
            return False
        if start.startswith(_TAG) and not self._count:
            self._text = start[len(_TAG) :]
        elif start[0] == "{":
            self._text = start
            self._call = CallReader(self._count)
        else:
            self._may_call = False
        return True

    def _read(self, call: CallReader, pieces: list[Piece]) -> None:
        self._text = call.take(self._text)
        if call.broken and not call.named:
            self._text = call.text + self._text
            self._call, self._may_call = None, False
            return
        pieces.extend(call.deltas())
        if call.done:
            self._count += 1
            self._call = None
