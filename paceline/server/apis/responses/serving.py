"""``/v1/responses``: OpenAI's response objects and typed events on top of chat, and the
conversation before a stored response, as items.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from secrets import token_hex
from typing import Any, Final

from paceline.errors import InvalidRequestError
from paceline.http.errors import Reply, reply_to
from paceline.http.fields import show
from paceline.server.apis.openai.answers import AnswerHead
from paceline.server.apis.openai.chat_deltas import ChatPiece, Quiet, chat_pieces
from paceline.server.apis.openai.logprobs import TokenWriter, chat_logprobs
from paceline.server.apis.responses.protocol import ResponsesRequest
from paceline.server.generation.prompts import truncated
from paceline.server.generation.response_store import StoredResponse
from paceline.server.generation.service import Service
from paceline.server.model_formats.tool_formats import CallDelta
from paceline.server.protocol.responses import Usage, encode

__all__ = ["cancel_response", "failed_event", "input_items", "response_answer", "response_events"]

# by open item, an event that adds nothing
_EMPTY_DELTAS: Final[dict[str | int | None, dict[str, Any]]] = {
    "text": {"kind": "response.output_text.delta", "delta": "", "logprobs": []},
    "thoughts": {"kind": "response.reasoning_text.delta", "delta": ""},
}


class ResponseBuilder:
    """Builds a response object, and the events that describe it."""

    def __init__(self, service: Service, request: ResponsesRequest, request_id: str) -> None:
        self.head = AnswerHead.of("resp", request_id, service, request.chat.options)
        # random, because responses are stored by it
        self.id = f"resp_{self.head.nonce}{token_hex(16)}"
        self._request = request
        self._writer = TokenWriter(service.client.tokenizer, as_ids=False)
        self._number = 0
        self._tokenizer = service.client.tokenizer
        # the whole answer's, if they are reported
        self._token_ids: list[int] = []
        self._prompt: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[Any] = []
        # entries of tokens whose text is not sent yet, such as a part of a character
        self._unsent: list[Any] = []
        self._output: list[dict[str, Any]] = []
        self._quiet = Quiet()
        # the open output item: None, "thoughts", "text" or the number of a call
        self._open: str | int | None = None
        self.body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.head.created,
            "status": "queued" if request.background else "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.head.model,
            "output": [],
            "usage": None,
            **request.shown,
        }

    async def prepare(self, service: Service) -> None:
        """Tokenise the prompt, if it is reported."""
        if self._request.tells_messages:
            chat = self._request.chat
            prompt = await service.prompts.chat(
                chat.template, add_special_tokens=chat.options.add_special_tokens
            )
            self._prompt = truncated(prompt, chat.options, service.rules.max_model_len)

    def begin(self) -> bytes:
        self.body["status"] = "in_progress"
        return self._event("response.created", response=self.body) + self._event(
            "response.in_progress", response=self.body
        )

    def take(self, piece: ChatPiece) -> bytes:
        """Return the events of one piece."""
        data = b""
        if piece.reasoning:
            if self._open != "thoughts":
                data += self._close(piece) + self._open_thoughts()
            self._text.append(piece.reasoning)
            data += self._text_event("response.reasoning_text.delta", delta=piece.reasoning)
        self._token_ids += piece.token_ids
        if self._request.chat.options.sampling.logprobs is not None:
            self._unsent += chat_logprobs(piece.logprobs, self._writer).content
        for part in piece.parts:
            if isinstance(part, str):
                data += self._take_text(piece, part)
            else:
                data += self._take_call(piece, part)
        if piece.finish_reason is not None:
            if not self._output:
                data += self._open_text()
            cut = piece.finish_reason == "length"
            data += self._close(piece, cut=cut) + self._end(piece)
        if data:
            self._quiet.begin()
        elif self._open in _EMPTY_DELTAS and self._quiet.has_lasted:
            self._quiet.begin()
            data = self._text_event(**_EMPTY_DELTAS[self._open])
        return data

    def _take_text(self, piece: ChatPiece, text: str) -> bytes:
        data = b""
        if self._open != "text":
            data = self._close(piece) + self._open_text()
        self._text.append(text)
        return data + self._text_event(
            "response.output_text.delta", delta=text, logprobs=self._tell()
        )

    def _take_call(self, piece: ChatPiece, part: CallDelta) -> bytes:
        # the tokens of a call belong to no text
        self._unsent = []
        data = b""
        if self._open != part.index:
            data = self._close(piece) + self._open_call(piece, part.index)
        if part.arguments:
            data += self._item_event("response.function_call_arguments.delta", delta=part.arguments)
        plan = self._request.chat.template.tools
        # a call without a grammar arrives whole
        return data if plan is not None and plan.forced else data + self._close(piece)

    def failed(self, reply: Reply) -> bytes:
        """Return the event that ends the stream instead of the response."""
        return self._event("error", **_failure(reply))

    def messages(self) -> list[dict[str, Any]]:
        """Return the answer as chat messages."""
        said: dict[str, list[str]] = {"message": [], "reasoning": []}
        for item in self._output:
            if item["type"] in said:
                said[item["type"]] += [part["text"] for part in item["content"]]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(said["message"])}
        if said["reasoning"]:
            message["reasoning"] = "".join(said["reasoning"])
        calls = [
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in self._output
            if item["type"] == "function_call"
        ]
        if calls:
            message["tool_calls"] = calls
        return [message]

    def _tell(self) -> list[Any]:
        sent, self._unsent = self._unsent, []
        self._logprobs += sent
        return sent

    def _open_text(self) -> bytes:
        self._open = "text"
        item = {"id": f"msg_{token_hex(16)}", "type": "message", "role": "assistant"}
        added = self._add(item | {"status": "in_progress", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return added + self._text_event("response.content_part.added", part=part)

    def _open_thoughts(self) -> bytes:
        self._open = "thoughts"
        item = {"id": f"rs_{token_hex(16)}", "type": "reasoning", "status": "in_progress"}
        added = self._add(item | {"summary": [], "content": []})
        part = {"type": "reasoning_text", "text": ""}
        return added + self._text_event("response.content_part.added", part=part)

    def _open_call(self, piece: ChatPiece, index: int) -> bytes:
        self._open = index
        call = piece.calls[index]
        item = {"id": f"fc_{token_hex(16)}", "type": "function_call", "call_id": call.id}
        return self._add(item | {"name": call.name, "arguments": "", "status": "in_progress"})

    def _add(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=item
        )

    def _close(self, piece: ChatPiece, *, cut: bool = False) -> bytes:
        """Close the open item; ``cut``: before its end."""
        if self._open is None:
            return b""
        item = self._output[-1]
        item["status"] = "incomplete" if cut else "completed"
        if self._open == "text":
            self._tell()
            text = "".join(self._text)
            part = {
                "type": "output_text",
                "text": text,
                "annotations": [],
                "logprobs": list(self._logprobs),
            }
            item["content"] = [part]
            self._text, self._logprobs = [], []
            data = self._text_event(
                "response.output_text.done", text=text, logprobs=part["logprobs"]
            ) + self._text_event("response.content_part.done", part=part)
        elif self._open == "thoughts":
            # the tokens of reasoning belong to no text
            self._unsent = []
            text, self._text = "".join(self._text), []
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            data = self._text_event("response.reasoning_text.done", text=text) + self._text_event(
                "response.content_part.done", part=part
            )
        else:
            assert isinstance(self._open, int)
            item["arguments"] = piece.calls[self._open].arguments
            data = self._item_event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        self._open = None
        return data + self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _end(self, piece: ChatPiece) -> bytes:
        cut = piece.finish_reason == "length"
        self.body |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage(piece.usage),
        }
        if self._request.tells_messages:
            self.body |= {
                "input_messages": [self._raw_message(self._prompt)],
                "output_messages": [self._raw_message(self._token_ids)],
            }
        return self._event(f"response.{self.body['status']}", response=self.body)

    def _raw_message(self, token_ids: list[int]) -> dict[str, Any]:
        """Return tokens in the format of vLLM's ``enable_response_messages``."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        index = len(self._output) - 1
        return self._event(kind, item_id=self._output[-1]["id"], output_index=index, **fields)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(payload))


def _usage(usage: Usage) -> dict[str, Any]:
    fields = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.prompt_tokens_details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
    return fields | usage.explanation()


# codes of a response that failed in the background, by its would-be status
_CODES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def _failure(reply: Reply) -> dict[str, Any]:
    return {
        "code": "server_error" if reply.status >= 500 else "invalid_request_error",
        "message": reply.message,
        "param": reply.param,
    }


def failed_event(reply: Reply) -> bytes:
    """Return the event of a stream that breaks before its first one."""
    payload = {"type": "error", "sequence_number": 0, **_failure(reply)}
    return b"event: error\ndata: %b\n\n" % encode(payload)


async def response_events(
    service: Service, request: ResponsesRequest, request_id: str, arrival: float
) -> AsyncGenerator[bytes, None]:
    """Yield typed events from ``response.created`` to ``response.completed`` or ``.incomplete``."""
    builder = ResponseBuilder(service, request, request_id)
    begun = False
    await builder.prepare(service)
    try:
        async with aclosing(chat_pieces(service, request.chat, builder.head, arrival)) as pieces:
            async for piece in pieces:
                data = b""
                if not begun:
                    begun = True
                    data = builder.begin()
                data += builder.take(piece)
                if piece.finish_reason is not None:
                    _store(service, request, builder)
                if data:
                    yield data
    except Exception as error:
        if not begun:
            raise
        # sent here, because only the builder knows the number of earlier events
        yield builder.failed(reply_to(error, drain_timeout=service.config.drain_timeout))


async def response_answer(
    service: Service, request: ResponsesRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of a whole answer, or with ``background`` that of a started one."""
    builder = ResponseBuilder(service, request, request_id)
    await builder.prepare(service)
    if not request.background:
        async with aclosing(chat_pieces(service, request.chat, builder.head, arrival)) as pieces:
            async for piece in pieces:
                builder.take(piece)
        _store(service, request, builder)
        return encode(builder.body)
    stored = StoredResponse(builder.body, [], request.owner, request.messages)
    stored.task = asyncio.ensure_future(_in_background(service, request, builder, stored))
    service.responses.put(stored)
    return encode(builder.body)


def _store(service: Service, request: ResponsesRequest, builder: ResponseBuilder) -> None:
    if request.store:
        messages = [*request.messages, *builder.messages()]
        stored = StoredResponse(builder.body, messages, request.owner, request.messages)
        service.responses.put(stored)


async def _in_background(
    service: Service, request: ResponsesRequest, builder: ResponseBuilder, stored: StoredResponse
) -> None:
    # drains wait for it, as for any request in flight
    service.enter()
    try:
        builder.begin()
        pieces = chat_pieces(service, request.chat, builder.head, time.monotonic())
        async with aclosing(pieces):
            async for piece in pieces:
                builder.take(piece)
        stored.messages = [*request.messages, *builder.messages()]
    except asyncio.CancelledError:
        builder.body["status"] = "cancelled"
    except Exception as error:
        reply = reply_to(error, drain_timeout=service.config.drain_timeout)
        builder.body |= {
            "status": "failed",
            "error": {"code": _CODES.get(reply.status, "server_error"), "message": reply.message},
        }
    finally:
        service.leave()
        stored.task = None
        service.responses.update(stored)


async def cancel_response(stored: StoredResponse) -> dict[str, Any]:
    """Stop a running background response; others are unchanged."""
    task = stored.task
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # a task cancelled before its start does not set its status
        if stored.body["status"] in ("queued", "in_progress"):
            stored.body["status"] = "cancelled"
        stored.task = None
    return stored.body


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
            raise InvalidRequestError(
                f"after must be the id of an item here, got {show(after)}", "after"
            )
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
