"""gpt-oss: ``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``.

``model_formats.reasoning.HarmonyReader`` reads the other channels and leaves such messages as they
are. Source: OpenAI's "harmony response format"
(developers.openai.com/cookbook/articles/openai-harmony).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from paceline.server.model_formats.tool_formats.amid_text import GAP, CallsAmidText, Shape, begins
from paceline.server.model_formats.tool_formats.base import ToolParser
from paceline.server.model_formats.tool_formats.llama3_json import Llama3Json

__all__ = ["CALL", "Harmony"]

# the start of a call whose recipient follows its channel
CALL: Final = "<|channel|>commentary to=functions."
_MESSAGE: Final = r"<\|message\|>"
_ENDS: Final = ("<|call|>", "<|end|>")
_NAME: Final = r"[^\s<]{1,256}+"
_HEADER: Final = rf"(?:(?!{_MESSAGE}).){{0,256}}+"
_SHAPE: Final = Shape(
    marks=(CALL,),
    head=re.compile(
        rf'(?P<name>{_NAME}){_HEADER}{_MESSAGE}{GAP}(?=["{{]|null|<\|call\|>|<\|end\|>)', re.DOTALL
    ),
    part_of_head=re.compile(
        rf"(?:{_NAME}{_HEADER}(?:{_MESSAGE}{GAP}"
        rf"(?:{begins('null')}|{begins(_ENDS[0])}|{begins(_ENDS[1])}))?)?",
        re.DOTALL,
    ),
    ends=_ENDS,
)


class Harmony:
    """A ``base.ToolFormat``."""

    name = "harmony"
    marks = ("<|channel|>",)
    arguments_key = "arguments"

    def parser(self, names: Collection[str], *, held: bool = False) -> ToolParser:
        # the marks are special tokens, which a grammar of text cannot write
        return Llama3Json().parser(names) if held else CallsAmidText(_SHAPE, names)

    def rule(self, *, parallel: bool) -> str:
        return Llama3Json().rule(parallel=parallel)
