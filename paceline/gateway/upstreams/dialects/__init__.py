"""Dialects: how engines' APIs differ from OpenAI's in paths, keys, bodies, events and errors.

A request enters in the caller's API, and its answer leaves in the same API; in between, the rest of
the gateway only knows OpenAI's formats.
"""

from paceline.gateway.upstreams.dialects.anthropic import AnthropicDialect
from paceline.gateway.upstreams.dialects.azure import AzureDialect
from paceline.gateway.upstreams.dialects.base import Dialect, Translator
from paceline.gateway.upstreams.dialects.errors import (
    anthropic_type,
    map_error,
    map_status,
    read_words,
)

__all__ = [
    "AnthropicDialect",
    "AzureDialect",
    "Dialect",
    "Translator",
    "anthropic_type",
    "dialect_of",
    "map_error",
    "map_status",
    "read_words",
]

_OPENAI = Dialect()
_ANTHROPIC = AnthropicDialect()


def dialect_of(kind: str, api_version: str = "") -> Dialect:
    """Return the dialect of a kind of engine."""
    if kind == "azure":
        return AzureDialect(api_version)
    return _ANTHROPIC if kind == "anthropic" else _OPENAI
