"""``prediction`` in chat, as in OpenAI's API: most of the answer, as the caller expects it."""

from __future__ import annotations

from typing import Any

from paceline.errors import InvalidRequestError
from paceline.http.fields import check_object, show
from paceline.server.protocol.rules import RequestRules

__all__ = ["parse_prediction"]

_NAME = "prediction"


def parse_prediction(given: Any, name: str, _: RequestRules) -> str:
    """Return the text of ``{"type": "content", "content": ...}``: a string or text parts.

    Raises InvalidRequestError for anything else.
    """
    value = check_object(given, name)
    if value.get("type") != "content":
        raise _error(f'prediction.type must be "content", got {show(value.get("type"))}')
    content = value.get("content")
    if type(content) is str:
        return content
    if type(content) is not list:
        raise _error(f"prediction.content must be a string or text parts, got {show(content)}")
    return "".join(_text(part, f"prediction.content[{i}]") for i, part in enumerate(content))


def _text(part: Any, where: str) -> str:
    if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
        raise _error(f'{where} must be {{"type": "text", "text": ...}}, got {show(part)}')
    text: str = part["text"]
    return text


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, _NAME)
