"""Answers to batch lines, computed in this process as the server answers over HTTP: same fields,
same defaults, same errors.

This module does not know files, nor how answers are stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from paceline.errors import EngineDeadError, EngineDrainingError, InvalidRequestError
from paceline.http.errors import Reply, error_body, reply_to
from paceline.server.apis.openai.chat import chat_answer
from paceline.server.apis.openai.completions import completion_answer
from paceline.server.apis.pooling.routes import vector_kind
from paceline.server.apis.responses.protocol import parse_responses, previous_id
from paceline.server.apis.responses.serving import response_answer
from paceline.server.apis.token_ids import parse_token_generate, token_answer
from paceline.server.batches.lines import Answer, BatchLine
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import RequestRules, parse_chat, parse_completion

__all__ = ["URLS", "answer_line", "backoff"]

_R = TypeVar("_R")

_LONGEST_WAIT: Final = 30.0
_SHORTEST_WAIT: Final = 0.25

# (service, rules, body, owner, request id, arrival) -> the answer's JSON
_Endpoint: TypeAlias = Callable[
    [Service, RequestRules, dict[str, Any], str, str, float], Awaitable[bytes]
]


def _usual(
    parse: Callable[[dict[str, Any], RequestRules, str], _R],
    answer: Callable[[Service, _R, str, float], Awaitable[bytes]],
) -> _Endpoint:
    def endpoint(
        service: Service, rules: RequestRules, body: dict[str, Any], owner: str, id_: str, at: float
    ) -> Awaitable[bytes]:
        if body.get("kv_source") is not None:
            raise InvalidRequestError("kv_source is not served in batches", "kv_source")
        return answer(service, parse(body, rules, owner), id_, at)

    return endpoint


def _response(
    service: Service, rules: RequestRules, body: dict[str, Any], owner: str, id_: str, at: float
) -> Awaitable[bytes]:
    # not stored: the batch's output holds the answer, and thousands would push out other callers'
    body = {"store": False, **body}
    previous = previous_id(body)
    before = [] if previous is None else service.responses.conversation(previous, owner)
    parsed = parse_responses(body, rules, owner, before=before, owner=owner)
    return response_answer(service, parsed, id_, at)


def _vectors(name: str) -> _Endpoint:
    def endpoint(
        service: Service, rules: RequestRules, body: dict[str, Any], owner: str, id_: str, at: float
    ) -> Awaitable[bytes]:
        kind = vector_kind(name)
        parsed = kind.parse(body, rules, owner, service.client.info.pooling)
        return kind.answer(service, parsed, id_, at)

    return endpoint


_ENDPOINTS: Final[Mapping[str, _Endpoint]] = {
    "/v1/chat/completions": _usual(parse_chat, chat_answer),
    "/v1/completions": _usual(parse_completion, completion_answer),
    "/v1/responses": _response,
    "/inference/v1/generate": _usual(parse_token_generate, token_answer),
    "/v1/embeddings": _vectors("embeddings"),
    "/v1/rerank": _vectors("rerank"),
    "/v1/score": _vectors("score"),
}
# endpoints that a line may name
URLS: Final = tuple(_ENDPOINTS)


async def answer_line(
    service: Service,
    line: BatchLine,
    request_id: str,
    *,
    owner: str = "",
    rules: RequestRules | None = None,
    around: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Answer:
    """Return the answer to a line; a line that cannot be sent gets a 400. If the server refuses for
    now (429, or 503 while a lost engine is being replaced), ask again, with growing waits, until it
    is answered.

    Args:
        owner: the owner of the line, for fairness and stored responses.
        rules: replace the service's rules.
        around: entered for every attempt of the line, and left before waiting.

    Raises:
        EngineDeadError, EngineDrainingError: the line has no answer.
    """
    if line.error is not None:
        message = f"line {line.index + 1}: {line.error}"
        return Answer(400, error_body(Reply(400, message)), request_id)
    endpoint = _ENDPOINTS[line.url]
    attempt = 0
    while True:
        try:
            async with around(), service.serving(line.body.get("model")) as served:
                service.refuse_if_draining()
                arrival = time.monotonic()
                own = rules or service.rules
                if served is not service:
                    own = replace(served.rules, slo_classes=own.slo_classes)
                body = await endpoint(served, own, line.body, owner, request_id, arrival)
            return Answer(200, body, request_id)
        except (EngineDeadError, EngineDrainingError):
            raise
        except Exception as error:
            reply = reply_to(error, drain_timeout=service.config.drain_timeout)
        if reply.status not in (429, 503):
            return Answer(reply.status, error_body(reply), request_id)
        await asyncio.sleep(backoff(attempt, reply.retry_after or 0, line.index))
        attempt += 1


def backoff(attempt: int, advised: float, number: int) -> float:
    """Return the seconds to wait before the next attempt: at least the advised time, doubled each
    time, and spread by ``number`` so that lines do not all return at once."""
    wait = max(advised, _SHORTEST_WAIT * 2.0 ** min(attempt, 10))
    return min(wait, _LONGEST_WAIT) * (1.0 + number % 16 / 32.0)
