"""Stored responses, looked up, continued and cancelled by id. In memory, bounded."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.errors import HttpError

__all__ = ["ResponseStore", "StoredResponse"]

_MAX_RESPONSES: Final = 2048
_MAX_BYTES: Final = 64 * 2**20


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response and the conversation that led to it."""

    # the response object as the API shows it
    body: dict[str, Any]
    # chat messages up to and including the answer; empty until there is an answer
    messages: list[dict[str, Any]]
    # the only key that may see it
    owner: str
    # chat messages before the answer, without instructions
    input_messages: list[dict[str, Any]]
    size: int = 0
    # the task that runs it in the background
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class ResponseStore:
    """The latest responses; the oldest are dropped when their number or size exceeds its limit."""

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = _MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: StoredResponse) -> None:
        """Keep a response; it replaces an earlier one of the same id."""
        response_id = response.body["id"]
        self._forget(response_id)
        # an estimate: most of the size is texts
        response.size = len(repr(response.body)) + sum(len(repr(m)) for m in response.messages)
        self._kept[response_id] = response
        self._bytes += response.size
        for oldest in list(self._kept):
            if len(self._kept) <= self._max_responses and self._bytes <= self._max_bytes:
                break
            if self._kept[oldest].task is None:
                self._forget(oldest)

    def update(self, response: StoredResponse) -> None:
        """Keep an earlier response's new state, unless it was deleted in the meantime."""
        if response.body["id"] in self._kept:
            self.put(response)

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response. Raises HttpError 404 unless it is stored and this owner's."""
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            raise HttpError(404, f"no response with id {response_id[:80]!r} is stored here")
        return found

    def conversation(self, response_id: str, owner: str) -> list[dict[str, Any]]:
        """Return the chat messages up to and including a response's answer.

        Raises HttpError like ``get``, and InvalidRequestError if the response has no answer: it is
        running, failed, or was cancelled.
        """
        found = self.get(response_id, owner)
        if not found.messages:
            raise InvalidRequestError(
                f"response {response_id[:80]!r} is {found.body['status']}: it has no answer from "
                "which to go on",
                "previous_response_id",
            )
        return found.messages

    def delete(self, response_id: str, owner: str) -> None:
        """Delete a response and cancel its task. Raises HttpError like ``get``."""
        found = self.get(response_id, owner)
        if found.task is not None:
            found.task.cancel()
        self._forget(response_id)

    async def close(self) -> None:
        """Cancel the background tasks."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, response_id: str) -> None:
        old = self._kept.pop(response_id, None)
        if old is not None:
            self._bytes -= old.size
