"""gpt-oss: ``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``.

``server.harmony`` reads the other channels and leaves such messages as they are. Source: OpenAI's
"harmony response format" (developers.openai.com/cookbook/articles/openai-harmony).
"""

from __future__ import annotations

import re
from typing import Final

from paceline.server.tool_formats.base import CallReader, Piece, ToolParser, held_back
from paceline.server.tool_formats.llama3_json import Llama3Json

__all__ = ["CALL", "Harmony"]

# how a call begins, once the recipient stands behind its channel
CALL: Final = "<|channel|>commentary to=functions."
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|call|>", "<|end|>")
_NAME: Final = re.compile(r"[^\s<]{1,256}")
_MOST_HEADER: Final = 512


class Harmony:
    """See ``base.ToolFormat``."""

    name = "harmony"
    marks = ("<|channel|>",)
    arguments_key = "arguments"

    def parser(self, *, forced: bool) -> ToolParser:
        # the marks are special tokens, which a grammar of text does not write
        return Llama3Json().parser(forced=True) if forced else _Parser()

    def rule(self, *, parallel: bool) -> str:
        return Llama3Json().rule(parallel=parallel)


class _Parser:
    def __init__(self) -> None:
        self._text = ""
        self._count = 0
        self._call: CallReader | None = None

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._text += text
        while self._text:
            if self._call is not None:
                self._read(self._call, pieces)
            elif not self._find(pieces):
                break
        return pieces

    def finish(self) -> list[Piece]:
        rest, self._text = self._text, ""
        if self._call is not None and not self._call.named:
            rest = self._call.text + rest
        elif self._count and any(end.startswith(rest) for end in _ENDS):
            rest = ""
        return [rest] if rest.strip() else []

    def _find(self, pieces: list[Piece]) -> bool:
        """Whether the arguments of a call begin in the text; what is before it is text."""
        if self._count:
            # what ends a call is no text
            for end in _ENDS:
                self._text = self._text.removeprefix(end)
            if any(end.startswith(self._text) for end in _ENDS):
                return False
        position = self._text.find(CALL)
        if position < 0:
            position = len(self._text) - held_back(self._text, CALL)
        if position:
            pieces.append(self._text[:position])
            self._text = self._text[position:]
        if not self._text.startswith(CALL):
            return False
        header, found, rest = self._text[len(CALL) :].partition(_MESSAGE)
        if not found and len(header) <= _MOST_HEADER:
            return False
        name = _NAME.match(header)
        if not found or name is None or len(header) > _MOST_HEADER:
            pieces.append(self._text)
            self._text = ""
            return False
        self._text = rest
        self._call = CallReader(self._count, name[0])
        return True

    def _read(self, call: CallReader, pieces: list[Piece]) -> None:
        self._text = call.take(self._text)
        if call.broken and not call.named:
            pieces.append(call.text)
            self._call = None
            return
        pieces.extend(call.deltas())
        if call.done:
            self._count += 1
            self._call = None
