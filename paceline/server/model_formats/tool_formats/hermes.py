"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, amid text."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from paceline.server.model_formats.tool_formats.amid_text import GAP, CallsAmidText, Shape
from paceline.server.model_formats.tool_formats.base import ToolParser

__all__ = ["Hermes"]

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_SHAPE: Final = Shape(
    marks=(_BEGIN,),
    head=re.compile(GAP + r"(?=\{)"),
    part_of_head=re.compile(GAP),
    ends=(_END,),
)


class Hermes:
    """A ``base.ToolFormat``."""

    name = "hermes"
    marks = ("<tool_call>",)
    arguments_key = "arguments"

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        # every call is marked, also under a grammar
        return CallsAmidText(_SHAPE, names)

    def rule(self, *, parallel: bool) -> str:
        more = r' ("\n" one){0,15}' if parallel else ""
        return f'calls: one{more}\none: "{_BEGIN}\\n" call "\\n{_END}"\n'
