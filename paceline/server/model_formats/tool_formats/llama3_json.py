"""Llama 3: the output begins with ``{"name": ..., "parameters": {...}}``, or several with ``;``."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from paceline.server.model_formats.tool_formats.amid_text import GAP, CallsAmidText, Shape, begins
from paceline.server.model_formats.tool_formats.base import ToolParser
from paceline.server.model_formats.tool_formats.call_json import BLANK

__all__ = ["Llama3Json"]

_TAG: Final = "<|python_tag|>"
_BETWEEN: Final = r"[\s;]{0,64}"
_SHAPE: Final = Shape(
    marks=(_TAG, ";"),
    head=re.compile(GAP + r"(?=\{)"),
    part_of_head=re.compile(GAP),
    next=re.compile(_BETWEEN + rf"(?:{re.escape(_TAG)}{GAP})?(?=\{{)"),
    part_of_next=re.compile(_BETWEEN + rf"(?:{begins(_TAG)}|{re.escape(_TAG)}{GAP})"),
    separators=(";",),
    blank=BLANK + ";",
)


class Llama3Json:
    """A ``base.ToolFormat``."""

    name = "llama3_json"
    marks = ("<|python_tag|>", "<|eom_id|>")
    arguments_key = "parameters"

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        return CallsAmidText(_SHAPE, names, at_start=True)

    def rule(self, *, parallel: bool) -> str:
        more = ' ("; " call){0,15}' if parallel else ""
        return f"calls: call{more}\n"
