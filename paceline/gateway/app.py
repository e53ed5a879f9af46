"""ASGI application of the gateway.

No framework handles a request: its path is looked up, its body is read, and ``ProxiedRequest`` does
the rest. Bounds on connections, heads and slow readers are those of the server (``paceline.http``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.gateway.billing.admission import Admission, Admitted, tokens_of
from paceline.gateway.billing.reserving import Lengths, Plan, endpoints_of
from paceline.gateway.billing.spending import Spending
from paceline.gateway.cascade.asked import NO_CASCADES, Asked, NoCascades
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.observability.tracing import NO_TRACE, NO_TRACING, Traces, Tracing
from paceline.gateway.proxy.admin import AdminRoutes, as_json, pool_in
from paceline.gateway.proxy.context import NO_NOTE, Allowed, RequestContext, salt_of
from paceline.gateway.proxy.passthrough.counting import COUNTING, Counting
from paceline.gateway.proxy.passthrough.kept import RESPONSES, StoredObjects
from paceline.gateway.proxy.proxied_request import RELAYED, ProxiedRequest
from paceline.gateway.proxy.wake import Wake
from paceline.gateway.requests.body import Body, read_body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.requests.prompt_size import BytesPerToken, PromptSize, least_tokens, measure
from paceline.gateway.routing.data_policy import data_policy
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.picker import Picker
from paceline.gateway.routing.routes import Endpoint, Route, Routes
from paceline.gateway.settings.config import GatewayConfig, key_limits
from paceline.gateway.settings.engine_types import is_vectors
from paceline.gateway.settings.prices import Used
from paceline.gateway.upstreams.dialects import anthropic_type
from paceline.gateway.upstreams.discovery import Discovery, resolve
from paceline.gateway.upstreams.registry import UpstreamRegistry
from paceline.http.body_writer import BODY_WRITER
from paceline.http.errors import ClientDisconnectedError, HttpError, Reply, error_body, reply_to
from paceline.http.keys import KeyRing, is_page
from paceline.http.rate_limits.limiter import Hold, RateLimiter
from paceline.http.rate_limits.store import RateStore
from paceline.http.slow_readers import SlowReaders
from paceline.http.upstream import Headers
from paceline.http.web import refuse_other_origins, refuse_strange_names
from paceline.routing import Demand, HedgeBudget, RetryBudget, prefix_chain
from paceline.routing.prefixes import PREFIX_BLOCK_BYTES

__all__ = ["Gateway"]

_log = logging.getLogger("paceline.gateway")

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_DRAIN: Final = re.compile(r"/admin/engines/([A-Za-z0-9_.-]{1,64})/(drain|undrain)")
# paths whose requests count against rate limits
_LIMITED: Final = RELAYED | COUNTING
# settings of objects that are built once, at start
_FIXED: Final = frozenset(
    {
        "host", "port", "rate_limit_requests", "rate_limit_tokens", "max_concurrent_per_key",
        "rate_limit_storage", "retry_share", "retries_per_second", "salt_env", "spend_storage",
        "prices", "keys", "currency", "slow_start", "hedge_share", "otlp_endpoint",
    }
)  # fmt: skip
# tokens of a prompt that fits every context
_SHORT: Final = 256
# expected share of ``max_tokens`` that an answer uses, before any has ended
_EXPECTED_SHARE: Final = 0.5


class Gateway:
    """ASGI application over the engines of one configuration.

    Args:
        page: answers what browsers ask for at ``/ui``; None: nothing does.
    """

    def __init__(
        self,
        config: GatewayConfig,
        keys: KeyRing,
        now: Callable[[], float] = time.monotonic,
        page: ASGIApp | None = None,
    ) -> None:
        self.config, self._page = config, page
        self.now = now
        self.keys = keys
        self._admin = AdminRoutes(self)
        self.upstreams = UpstreamRegistry(config, now, self._tick)
        self._discovery = Discovery(self.upstreams.pools, self._admin.tell_pool, now, resolve)
        self.routes = Routes(config, self.upstreams.by_name, self.upstreams.pools)
        self.slow_readers = SlowReaders()
        self.metrics = GatewayMetrics()
        self.draining = False
        self.idle = asyncio.Event()
        self.in_flight = 0
        self._picker = Picker(random.Random(), config.slow_factor)
        self.flow_control = FlowControl(
            config, self._picker, now, lambda: self.upstreams.has_bounds
        )
        self.budget = RetryBudget(share=config.retry_share, per_second=config.retries_per_second)
        self.hedges = HedgeBudget(config.hedge_share)
        self._lengths = Lengths()
        self._bytes_per_token = BytesPerToken()
        self._limiter = _limiter(config, keys)
        if self._limiter is not None:
            self.metrics.registry.register(self._limiter)
        self.spending = Spending(config)
        self._admission = Admission(self.spending, self._limiter)
        self._salt = os.environ.get(config.salt_env, "") if config.salt_env else ""
        self.tracing: Traces = Tracing(config.otlp_endpoint) if config.otlp_endpoint else NO_TRACING
        self.policy = data_policy(config)
        self.cascades = _cascades(self, config, NO_CASCADES)
        self.stored = StoredObjects(self)
        self._counting = Counting(self, self.stored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        # taken out, as the scope and the writer would point at each other
        extensions = scope.get("extensions", {})
        given = headers.get(b"x-request-id", b"")
        # the id tells requests apart in logs; it is not a secret
        if given and _REQUEST_ID.fullmatch(given):
            request_id = given.decode()
        else:
            request_id = f"{random.getrandbits(128):032x}"

        incoming = IncomingRequest(
            scope, scope["path"], headers, receive, send, request_id, self._common_headers,
            extensions.pop(BODY_WRITER, None),
        )  # fmt: skip
        try:
            if b"origin" in headers or b"sec-fetch-site" in headers:
                refuse_other_origins(scope, ())
            incoming.authenticate(self.keys)
            if self._limiter is not None and incoming.path in _LIMITED:
                await incoming.enter(self._limiter)
            if incoming.path not in RELAYED:
                await self._answer(incoming)
            elif incoming.method == "POST":
                await self._proxy(incoming)
            else:
                raise HttpError(405, f"{incoming.path} takes POST, not {incoming.method}")
        except ClientDisconnectedError:
            pass
        except Exception as error:
            if incoming.started:
                # cut the connection: the status is sent already, and a made-up end would mislead
                raise
            reply = reply_to(error, drain_timeout=self.config.drain_timeout)
            _log.info(
                "refused id=%s status=%d path=%s", request_id, reply.status, incoming.path[:64]
            )
            await _send(incoming.send, *_error(incoming.path, reply), retry_after=reply.retry_after)

    def _tick(self) -> None:
        self.routes.refresh()
        self.flow_control.pump()

    def _common_headers(self) -> Headers:
        return [(b"connection", b"close")] if self.draining else []

    async def _answer(self, incoming: IncomingRequest) -> None:
        """Answer a request that is not relayed."""
        path, method, send = incoming.path, incoming.method, incoming.send
        handler = self._admin.find(path)
        if name := pool_in(path):
            if name not in self.upstreams.pools:
                known = ", ".join(self.upstreams.pools) or "none"
                raise HttpError(404, f"there is no pool {name[:80]!r}; there are: {known}")
            if method == "PUT":
                await _send(send, *await self._admin.set_pool(name, incoming))
                return
        if handler is not None:
            if method not in ("GET", "HEAD"):
                takes = "GET and PUT" if pool_in(path) else "GET"
                raise HttpError(405, f"{path} takes {takes}, not {method}")
            await _send(send, *handler(incoming.tenant))
            return
        if self._page is not None and self.config.ui and is_page(path):
            if method not in ("GET", "HEAD"):
                raise HttpError(405, f"{path} takes GET, not {method}")
            if self.keys.is_empty:
                refuse_strange_names(incoming.scope)
            await self._page(incoming.scope, incoming.receive, send)
            return
        if path in COUNTING:
            await self._counting.answer(incoming)
            return
        if self.stored.takes(path):
            await self.stored.answer(incoming)
            return
        match = _DRAIN.fullmatch(path)
        if match is None:
            raise HttpError(404, f"there is no {path[:100]} here")
        if method != "POST":
            raise HttpError(405, f"{path} takes POST, not {method}")
        await _send(send, *self._admin.drain(match[1], match[2] == "drain"))

    # ---------------------------------------------------------------- requests

    async def _proxy(self, incoming: IncomingRequest) -> None:
        """Read a request, and have it answered."""
        if self.draining:
            raise HttpError(503, "the gateway is shutting down", self.config.drain_timeout)
        path, tenant = incoming.path, incoming.tenant
        body = read_body(await incoming.read_json(self.config.max_body_size))
        size = measure(body.fields)
        tokens = self._bytes_per_token.tokens(body.model, size)
        local = self.policy.is_local(incoming, body)
        route = self.routes.find(body.model, tokens, path=path, local_only=local)
        route = route.serving(path, body)
        alias = route.model if route.asked else ""
        self.spending.check(tenant, body.model or route.model, alias)
        if path == RESPONSES:
            route = await self.stored.bound(route, body, tenant)
        allowed = Allowed.parse(incoming.headers.get(b"x-paceline-allow"))
        asked = Asked(incoming, body, size, tokens, route, allowed)
        answer = self.cascades.find(path, body, route) or self.relay
        # once for a cascade's two models, so that the gateway does not end between them
        self.in_flight += 1
        try:
            await answer(asked)
        finally:
            self._note_end()

    async def relay(
        self, asked: Asked, note: Mapping[str, Any] = NO_NOTE
    ) -> Sequence[tuple[Endpoint, Used]]:
        """Reserve what a request may use, relay it, and settle; returns its usage by engine.

        Args:
            note: what was decided before, for the answer's headers and last chunk.
        """
        incoming, body, size, tokens, route, allowed = msgspec.structs.astuple(asked)
        path, tenant = incoming.path, incoming.tenant
        if not route.tiers and route.local_only:
            raise HttpError(
                503,
                f"this request may not go to a cloud, and all engines of {route.shown} are clouds",
                60.0,
            )

        def other(model: str) -> Route:
            found = self.routes.find(model, tokens, local_only=route.local_only)
            return found.serving(path, body)

        def plan(where: Route) -> Plan:
            return Plan.of(
                path, body, endpoints_of(where), size, tokens, self._lengths, where.model,
                self.config.default_max_tokens,
            )  # fmt: skip

        admitted = await self._admission.admit(
            incoming, route, body, plan, other if allowed.fallback else None
        )
        proxied: ProxiedRequest | None = None
        usage: Sequence[tuple[Endpoint, Used]] = ()
        try:
            demand = self._demand(path, admitted.body, admitted.charge.route, size, tokens, tenant)
            context = self._context(incoming, admitted, asked, demand, note)
            proxied = ProxiedRequest(context)
            if admitted.hold is not None:
                incoming.settle_with(partial(_headers_settled, admitted.hold, proxied))
            await proxied.run()
            self._learn(proxied)
        finally:
            incoming.settle_with(None)
            try:
                if proxied is not None:
                    try:
                        usage = proxied.usage_by_endpoint()
                        if (trace := proxied.context.trace) is not NO_TRACE:
                            trace.close(proxied.used, self.now())
                    finally:
                        proxied.close()
            finally:
                await self._admission.settle(admitted, usage)
        return usage

    def demand_of(self, asked: Asked) -> Demand:
        """Return what a request demands of the model that it asked for."""
        return self._demand(
            asked.incoming.path, asked.body, asked.route, asked.size, asked.tokens,
            asked.incoming.tenant,
        )  # fmt: skip

    def _note_end(self) -> None:
        self.in_flight -= 1
        if self.draining and not self.in_flight:
            self.idle.set()

    def _learn(self, proxied: ProxiedRequest) -> None:
        """Learn lengths and bytes per token from a request that has ended."""
        context = proxied.context
        route, body = context.route, context.body
        if made := proxied.used.output:
            self._lengths.learn(route.model, -(-made // body.num_made))
        if (counted := proxied.counted) is not None:
            names = (route.model,) if route.asked else (route.model, body.model)
            self._bytes_per_token.learn(names, context.size, counted.prompt)

    def _context(
        self,
        incoming: IncomingRequest,
        admitted: Admitted,
        asked: Asked,
        demand: Demand,
        note: Mapping[str, Any],
    ) -> RequestContext:
        """Gather what is given of a request."""
        now, path, headers = self.now(), incoming.path, incoming.scope["headers"]
        trace = self.tracing.begin(path, asked.route.model, incoming.request_id, headers, now)
        return RequestContext(
            config=self.config,
            picker=self._picker,
            flow_control=self.flow_control,
            retry_budget=self.budget,
            hedge_budget=self.hedges,
            metrics=self.metrics,
            now=self.now,
            incoming=incoming,
            allowed=asked.allowed,
            salt=salt_of(self._salt, incoming.tenant) if self._salt else "",
            tries_again=incoming.headers.get(b"x-stainless-retry-count", b"0") != b"0",
            trace=trace,
            path=path,
            body=admitted.body,
            size=asked.size,
            route=admitted.charge.route,
            model=asked.route.shown,
            demand=demand,
            arrived=now,
            wake=Wake(),
            watch=self.stored.watch(incoming.tenant) if path == RESPONSES else None,
            note=note,
        )

    async def reload(self, config: GatewayConfig, keys: KeyRing) -> list[str]:
        """Switch to another configuration and return the changes in words. Running requests end
        under the old one."""
        before, policy = self.config, data_policy(config)
        cascades = _cascades(self, config, self.cascades)
        told = await self.upstreams.change(config)
        if config.models != before.models:
            names = ", ".join(model.name for model in config.models) or "those of the engines"
            told.append(f"models: {names}")
        fixed = []
        for name in sorted(config.__struct_fields__):
            old, new = getattr(before, name), getattr(config, name)
            if old == new or name in ("engines", "models"):
                continue
            if name in _FIXED:
                fixed.append(f"{name} needs a restart")
            else:
                told.append(f"{name} {old} -> {new}")
        self.config, self.keys = config, keys
        self.routes = Routes(config, self.upstreams.by_name, self.upstreams.pools)
        # no request may meet half of a configuration: all changes before the next await
        self.policy, before_cascades, self.cascades = policy, self.cascades, cascades
        self.flow_control.change(config)
        self._picker.change(config.slow_factor)
        self.flow_control.pump()
        if cascades is NO_CASCADES:
            await before_cascades.close()
        return told + fixed

    async def start(self) -> None:
        """Ask every engine once, then keep polling them. Raises ConfigError if a calibration was
        made with other models."""
        self.spending.start()
        await self._discovery.start()
        await self.upstreams.start()
        self.cascades.check()

    async def begin_draining(self) -> None:
        """Take no new requests, and end what runs for no caller."""
        self.draining = True
        await self.cascades.close()

    async def close(self) -> None:
        await self.cascades.close()
        await self._discovery.close()
        await self.upstreams.close()
        await self.spending.close()
        if self._limiter is not None:
            await self._limiter.close()
        await asyncio.to_thread(self.tracing.close)

    def _demand(
        self, path: str, body: Body, route: Route, size: PromptSize, tokens: float, tenant: str
    ) -> Demand:
        most = body.max_tokens
        mean = self._lengths.mean(route.model)
        has_blocks = body.num_bytes >= PREFIX_BLOCK_BYTES
        longest = 0.0 if is_vectors(path) else tokens * size.longest / body.num_prompts
        # compute the certain lower bound only where the estimate exceeds a context
        is_long = longest > _SHORT and any(
            longest > (endpoint.max_model_len or math.inf) for endpoint in endpoints_of(route)
        )
        return Demand(
            prompt_tokens=tokens,
            max_tokens=most,
            output_tokens=max(1.0, min(most, _EXPECTED_SHARE * most if mean is None else mean)),
            prefix=prefix_chain(body.prompt, tenant.encode()) if has_blocks else (),
            ttft=body.slo.ttft,
            tpot=body.slo.tpot,
            longest_prompt=longest,
            least_prompt=least_tokens(path, body.fields) if is_long else 0.0,
        )


def _cascades(gateway: Gateway, config: GatewayConfig, before: NoCascades) -> NoCascades:
    """Return the cascades of a configuration. Raises ConfigError."""
    if all(model.cascade is None for model in config.models):
        return NO_CASCADES
    # NumPy comes with it
    from paceline.gateway.cascade.runner import Cascades

    return Cascades(gateway, config, before)


def _limiter(config: GatewayConfig, keys: KeyRing) -> RateLimiter | None:
    """Return the rate limiter; None if no key has a limit."""
    own, limits = keys.limits(), key_limits(config)
    if not own and not limits:
        return None
    return RateLimiter(limits, own, RateStore(config.rate_limit_storage or None))


def _headers_settled(hold: Hold, proxied: ProxiedRequest) -> Headers:
    """Rate-limit headers; a stream that is not over counts as what was reserved for it."""
    return hold.headers(tokens_of(proxied.usage_by_endpoint()) if proxied.is_over else hold.tokens)


def _error(path: str, reply: Reply) -> tuple[int, str, bytes]:
    if not path.startswith("/v1/messages"):
        return reply.status, "application/json", error_body(reply)
    error = {
        "type": "error",
        "error": {"type": anthropic_type(reply.status), "message": reply.message},
    }
    return as_json(reply.status, error)


async def _send(
    send: Send, status: int, kind: str, body: bytes, *, retry_after: int | None = None
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
