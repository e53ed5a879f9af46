"""gpt-oss: ``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``.

``server.harmony`` reads the other channels and leaves such messages as they are. Source: OpenAI's
"harmony response format" (developers.openai.com/cookbook/articles/openai-harmony).
"""

from __future__ import annotations

import re
from typing import Final

from paceline.server.tool_formats.base import CallDelta, CallReader, Piece, ToolParser, held_back
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
        if self._count and any(end.startswith(rest) for end in _ENDS):
            rest = ""
        return [rest] if rest.strip() else []

    def _find(self, pieces: list[Piece]) -> bool:
        """Whether there is more to read: text before a call, and the end of a message, which is no
        text, are taken off, and a call is begun once its arguments do."""
        found = [(p, mark) for mark in (CALL, *_ENDS) if (p := self._text.find(mark)) >= 0]
        if not found:
            kept = max(held_back(self._text, mark) for mark in (CALL, *_ENDS))
            said = self._text[: len(self._text) - kept]
            if said:
                pieces.append(said)
                self._text = self._text[len(said) :]
            return False
        place, mark = min(found)
        if place:
            pieces.append(self._text[:place])
        self._text = self._text[place:]
        if mark != CALL:
            self._text = self._text.removeprefix(mark)
            return True
        header, whole, rest = self._text[len(CALL) :].partition(_MESSAGE)
        name = _NAME.match(header)
        if len(header) > _MOST_HEADER or (whole and name is None):
            pieces.append(self._text)
            self._text = ""
            return False
        body = rest.lstrip()
        if not whole or name is None or not body:
            return False
        if body[0] == "{":
            self._call = CallReader(self._count, name[0])
        elif any(end.startswith(body) for end in _ENDS):
            return False
        elif body.startswith(_ENDS):
            pieces += [CallDelta(self._count, name[0], ""), CallDelta(self._count, None, "{}")]
            self._count += 1
        # anything else is text
        self._text = body
        return True

    def _read(self, call: CallReader, pieces: list[Piece]) -> None:
        self._text = call.take(self._text)
        pieces.extend(call.deltas())
        if call.done:
            self._count += 1
            self._call = None
