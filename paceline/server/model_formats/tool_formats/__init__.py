"""The ways in which models write tool calls: a file per format, found by name or chat template."""

from __future__ import annotations

from typing import Final

from paceline.server.model_formats.tool_formats.base import (
    CallDelta,
    Piece,
    ToolFormat,
    ToolParser,
    call_schema,
)
from paceline.server.model_formats.tool_formats.forced import ForcedCalls
from paceline.server.model_formats.tool_formats.harmony import Harmony
from paceline.server.model_formats.tool_formats.hermes import Hermes
from paceline.server.model_formats.tool_formats.llama3_json import Llama3Json
from paceline.server.model_formats.tool_formats.mistral import Mistral

__all__ = [
    "TOOL_FORMATS",
    "CallDelta",
    "ForcedCalls",
    "Piece",
    "ToolFormat",
    "ToolParser",
    "call_schema",
    "detect_format",
]

_ALL: Final[tuple[ToolFormat, ...]] = (Hermes(), Llama3Json(), Mistral(), Harmony())
TOOL_FORMATS: Final[dict[str, ToolFormat]] = {each.name: each for each in _ALL}


def detect_format(template: str | None) -> ToolFormat:
    """Return the format of a chat template; Hermes if it shows none."""
    for each in _ALL:
        if template is not None and any(mark in template for mark in each.marks):
            return each
    return _ALL[0]
