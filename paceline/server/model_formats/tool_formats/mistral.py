"""Mistral: ``[TOOL_CALLS]`` and then ``[{"name": ..., "arguments": {...}}, ...]``, or, with the
newer tokenizers, ``name{...}``, ``name[ARGS]{...}`` or ``name[CALL_ID]id[ARGS]{...}``."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from paceline.server.model_formats.tool_formats.amid_text import GAP, CallsAmidText, Shape, begins
from paceline.server.model_formats.tool_formats.base import ToolParser
from paceline.server.model_formats.tool_formats.call_json import BLANK

__all__ = ["Mistral"]

_MARK: Final = "[TOOL_CALLS]"
_NAME: Final = r"[A-Za-z0-9_.:/-]{1,128}+"
_ID: Final = r"[A-Za-z0-9_-]{1,64}+"
_CALL_ID: Final = rf"\[CALL_ID\]{GAP}"
_GIVEN_ID: Final = rf"(?:{_CALL_ID}{_ID}{GAP})?"
_BETWEEN: Final = r"\[?[\s,]{0,64}"
_SHAPE: Final = Shape(
    marks=(_MARK,),
    head=re.compile(
        rf"{GAP}(?:\[?{GAP}(?=\{{)|(?P<name>{_NAME}){GAP}(?:{_CALL_ID}(?P<id>{_ID}){GAP})?"
        rf'(?:\[ARGS\]{GAP}(?=["{{]|null)|(?=\{{)))'
    ),
    part_of_head=re.compile(
        rf"{GAP}(?:\[{GAP}|{_NAME}{GAP}(?:{begins('[CALL_ID]')}|{_CALL_ID}(?:{_ID})?"
        rf"|{_GIVEN_ID}(?:{begins('[ARGS]')}|\[ARGS\]{GAP}{begins('null')})))?"
    ),
    next=re.compile(rf"(?P<over>{GAP}\])|{_BETWEEN}(?=\{{)"),
    part_of_next=re.compile(_BETWEEN),
    id=re.compile(_ID),
    blank=BLANK + ",",
)


class Mistral:
    """A ``base.ToolFormat``."""

    name = "mistral"
    marks = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
    arguments_key = "arguments"

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        # the mark is a special token, which a grammar of text cannot write
        return CallsAmidText(_SHAPE, names, at_start=held)

    def rule(self, *, parallel: bool) -> str:
        more = ' (", " call){0,15}' if parallel else ""
        return f'calls: "[" call{more} "]"\n'
