"""``/v1/responses/{id}/input_items``: the conversation before a stored response, as items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.generation.response_store import StoredResponse
from paceline.server.protocol.responses import encode

__all__ = ["input_items"]

_LIMIT: Final = 20
_MOST: Final = 100
_QUERY: Final = ("limit", "order", "after")


def input_items(stored: StoredResponse, query: Mapping[str, str]) -> bytes:
    """Return a page of items, the latest first unless ``order`` is ``asc``.

    Raises:
        InvalidRequestError: a parameter is not served, out of range, or names no item.
    """
    for name in query:
        if name not in _QUERY:
            raise InvalidRequestError(f"{show(name)} is not served here: {', '.join(_QUERY)} are")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {show(order)}", "order")
    items = _items(stored)
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        matches = [i for i, item in enumerate(items) if item["id"] == after]
        if not matches:
            raise InvalidRequestError(f"after names no item here: {show(after)}", "after")
        items = items[matches[0] + 1 :]
    page = items[: _limit(query)]
    return encode(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


def _limit(query: Mapping[str, str]) -> int:
    value = query.get("limit", str(_LIMIT))
    # isdecimal() accepts digits of all scripts, and so does int()
    if not value.isdecimal() or len(value) > 9 or not 1 <= int(value) <= _MOST:
        raise InvalidRequestError(f"limit must be 1 to {_MOST}, got {show(value)}", "limit")
    return int(value)


def _items(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return the items behind the chat messages; an item's id is its index in this response."""
    found: list[dict[str, Any]] = []
    for message in stored.input_messages:
        role, text = message["role"], message.get("content") or ""
        if role == "tool":
            call = {"call_id": message.get("tool_call_id") or "", "output": text}
            found.append({"type": "function_call_output", **call})
            continue
        if text or not message.get("tool_calls"):
            said = _output_text(text) if role == "assistant" else _input_text(text)
            found.append({"type": "message", "role": role, "content": said})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            named = {"name": function["name"], "arguments": function["arguments"]}
            found.append({"type": "function_call", "call_id": call["id"], **named})
    name = stored.body["id"].removeprefix("resp_")
    return [
        {**item, "id": f"item_{name}_{index}", "status": "completed"}
        for index, item in enumerate(found)
    ]


def _input_text(content: Any) -> list[dict[str, Any]]:
    parts = content if type(content) is list else [{"text": content}]
    return [{"type": "input_text", "text": part["text"]} for part in parts]


def _output_text(content: Any) -> list[dict[str, Any]]:
    parts = content if type(content) is list else [{"text": content}]
    return [
        {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
        for part in parts
    ]
