"""Token counts of prompts that are not run. Nothing is generated, so nothing is charged, and an
engine that cannot count has not failed."""

from __future__ import annotations

import random
from typing import Final

from paceline.gateway.proxy.admin import GatewayState
from paceline.gateway.proxy.passthrough.kept import StoredObjects, headers_for
from paceline.gateway.proxy.passthrough.passing import pass_on
from paceline.gateway.requests.body import Body, read_body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.http.errors import HttpError
from paceline.http.sse import unless_disconnected
from paceline.http.upstream import ConnectError
from paceline.statuses import meaning_of

__all__ = ["COUNTING", "Counting"]

_MESSAGES: Final = "/v1/messages/count_tokens"
_RESPONSES: Final = "/v1/responses/input_tokens"
COUNTING: Final = frozenset({_MESSAGES, _RESPONSES})
# kinds with other APIs, and the counting path that they have
_OTHERS: Final = {"anthropic": _MESSAGES, "azure": ""}
# callers' headers that are passed on to engines
_VERSIONS: Final = (b"anthropic-version", b"anthropic-beta")
# timeout of a count, s
_SECONDS: Final = 30.0


class Counting:
    """Counting paths of one gateway."""

    def __init__(self, gateway: GatewayState, stored: StoredObjects) -> None:
        self._gateway, self._stored = gateway, stored

    async def answer(self, incoming: IncomingRequest) -> None:
        """Answer a counting request. Raises HttpError and RequestError."""
        gateway, path = self._gateway, incoming.path
        if incoming.method != "POST":
            raise HttpError(405, f"{path} takes POST, not {incoming.method}")
        body = read_body(await incoming.read_json(gateway.config.max_body_size))
        local = gateway.policy.is_local(incoming, body)
        route = gateway.routes.find(body.model, 0.0, local_only=local)
        alias = route.model if route.asked else ""
        gateway.spending.check(incoming.tenant, body.model or route.model, alias)
        route = await self._stored.bound(route, body, incoming.tenant)
        await unless_disconnected(incoming.receive, self._ask(incoming, body, route))

    async def _ask(self, incoming: IncomingRequest, body: Body, route: Route) -> None:
        """Ask the engines of a route, one after the other, until one answers."""
        troubled = False
        for endpoint in _in_order(route, incoming.path):
            headers = headers_for(endpoint.upstream, incoming.tenant, incoming.request_id)
            headers.append((b"content-type", b"application/json"))
            headers += [h for h in incoming.scope["headers"] if h[0] in _VERSIONS]
            changes = {"model": endpoint.model}
            # the counting path takes the fields of its parent path
            data = endpoint.upstream.dialect.body(incoming.path.rpartition("/")[0], body, changes)
            passed = None
            try:
                async with await pass_on(
                    endpoint.upstream, "POST", incoming.path, headers, data, _SECONDS
                ) as passed:
                    meaning = meaning_of(passed.status)
                    if passed.status == 200 or meaning == "caller":
                        await passed.tell(incoming.send)
                        return
                    troubled |= meaning != "model"
            except ConnectError:
                if passed is not None and passed.is_told:
                    raise
                troubled = True
        if troubled:
            raise HttpError(503, f"no engine of {route.shown} can count tokens now", 1.0)
        raise HttpError(404, f"no engine of {route.shown} has {incoming.path}")


def _in_order(route: Route, path: str) -> list[Endpoint]:
    """Return endpoints that may count, by tier; first those whose engines answered their last
    poll."""
    return [
        endpoint
        for tier in route.tiers
        for endpoint in sorted(
            tier, key=lambda endpoint: (bool(endpoint.upstream.trouble), random.random())
        )
        if not endpoint.lacks_model and _OTHERS.get(endpoint.upstream.kind, path) == path
    ]
