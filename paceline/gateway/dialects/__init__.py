"""What an engine's API looks like where it is not OpenAI's: paths, keys, bodies, events, errors.

A request of a caller goes in as the caller's API has it, and what comes back is what that API
would have said; in between everything else of the gateway knows OpenAI's shapes alone.
"""

from paceline.gateway.dialects.anthropic import AnthropicDialect
from paceline.gateway.dialects.azure import AzureDialect
from paceline.gateway.dialects.base import Dialect, OpenAIDialect, Translator
from paceline.gateway.dialects.errors import anthropic_type, map_error, map_status, read_words

__all__ = [
    "AnthropicDialect",
    "AzureDialect",
    "Dialect",
    "OpenAIDialect",
    "Translator",
    "anthropic_type",
    "dialect_of",
    "map_error",
    "map_status",
    "read_words",
]

_OPENAI = OpenAIDialect()
_ANTHROPIC = AnthropicDialect()


def dialect_of(kind: str, api_version: str = "") -> Dialect:
    """Of an engine of that kind."""
    if kind == "azure":
        return AzureDialect(api_version)
    return _ANTHROPIC if kind == "anthropic" else _OPENAI
