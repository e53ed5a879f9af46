"""Responses, files and batches stored by engines: requests go to the engine that has the object.

::

    POST /v1/responses, previous_response_id     only that engine can continue it
    GET, DELETE, POST .../ID...                  passed on to that engine
    POST /v1/files                               to an engine with the model of the first line
    POST /v1/batches                             to the engine that has the input file
    GET /v1/files, /v1/batches                   the lists of all engines, merged

The engine is known for objects made through this gateway (``Homes``); for other ids all engines are
asked. None of these requests is an attempt, so breakers do not count their failures.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, quote

import msgspec
from msgspec.structs import replace

from paceline.errors import InvalidRequestError
from paceline.gateway.proxy.admin import GatewayState, as_json
from paceline.gateway.proxy.context import Watch
from paceline.gateway.proxy.passthrough.passing import Passed, pass_on
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.config import key_limits
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.http.sse import unless_disconnected
from paceline.http.upstream import ConnectError, Headers

__all__ = ["RESPONSES", "Home", "Homes", "StoredObjects", "headers_for"]

_MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class Home:
    """Engine that stores an object."""

    engine: str
    # name of the key that made it; None: unknown, as the object was found by asking
    tenant: str | None


class Homes:
    """Bounded map from the latest ids to their engines. It is only a shortcut: all engines are
    asked about an unknown id, such as after a restart of the gateway or behind another one."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._homes: OrderedDict[str, Home] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, kept_id: str, engine: str, tenant: str | None) -> None:
        """Record where an object is stored."""
        self._homes[kept_id] = Home(engine, tenant)
        self._homes.move_to_end(kept_id)
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def find(self, kept_id: str) -> Home | None:
        """Return where an object is stored; None: unknown."""
        home = self._homes.get(kept_id)
        if home is not None:
            self._homes.move_to_end(kept_id)
        return home

    def forget(self, kept_id: str) -> None:
        """Forget an object that was deleted."""
        self._homes.pop(kept_id, None)


RESPONSES: Final = "/v1/responses"
_ID: Final = r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"
_IS_ID: Final = re.compile(_ID)
_ONE: Final = re.compile(rf"/v1/(responses|files|batches)/({_ID})(?:/([a-z_]+))?")
_METHODS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("responses", ""): ("GET", "DELETE"),
    ("responses", "cancel"): ("POST",),
    ("responses", "input_items"): ("GET",),
    ("files", ""): ("GET", "DELETE"),
    ("files", "content"): ("GET",),
    ("batches", ""): ("GET",),
    ("batches", "cancel"): ("POST",),
}
_LISTS: Final = frozenset({"/v1/files", "/v1/batches"})
# kinds that store nothing
_WITHOUT: Final = frozenset({"anthropic", "azure"})
# kinds that store files and batches
_WITH_FILES: Final = frozenset({"paceline", "openai", "auto"})
# statuses that mean: not stored here
_NOT_HERE: Final = frozenset({400, 404, 405, 422, 501})
# timeout of asking an engine for an object, s
_ASK_SECONDS: Final = 5.0
# bytes of an upload that are searched for the model of its first line
_FIRST_BYTES: Final = 64 * 1024
_MODEL: Final = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,500}")')
# the id of the response, in a stream's first event
_TOLD_ID: Final = re.compile(rb'"id"\s*:\s*"(' + _ID.encode() + rb')"')
_PAGE: Final[Mapping[str, tuple[int, int, int]]] = {
    # requested from engines at once; a caller's default limit; a caller's maximum
    "/v1/files": (10_000, 1000, 10_000),
    "/v1/batches": (100, 20, 100),
}
_MOST_PAGES: Final = 100


class StoredObjects:
    """Stored objects of one gateway."""

    def __init__(self, gateway: GatewayState) -> None:
        self._gateway = gateway
        self.homes = Homes()

    def takes(self, path: str) -> bool:
        """Whether a path names a stored object or a list of them."""
        found = _ONE.fullmatch(path)
        return path in _LISTS or (found is not None and (found[1], found[3] or "") in _METHODS)

    async def answer(self, incoming: IncomingRequest) -> None:
        """Answer a request for stored objects. Raises HttpError."""
        path, method = incoming.path, incoming.method
        found = _ONE.fullmatch(path)
        methods: tuple[str, ...] = ("GET", "POST")
        if found is not None:
            methods = _METHODS[found[1], found[3] or ""]
        if method not in methods:
            raise HttpError(405, f"{path} takes {' and '.join(methods)}, not {method}")
        if found is not None:
            await self._one(incoming, found[1], found[2])
        elif method == "GET":
            await self._list(incoming)
        elif self._gateway.draining:
            raise HttpError(503, "the gateway is shutting down", self._gateway.config.drain_timeout)
        else:
            await self._create(incoming)

    # ---------------------------------------------------------------- relayed requests

    async def bound(self, route: Route, body: Body, tenant: str) -> Route:
        """Restrict a route to the engine that stores the previous response, if there is one.

        Raises HttpError 404 if no engine has it.
        """
        value = body.fields.get("previous_response_id", b"null")
        if value[:1] != b'"':
            return route
        previous = msgspec.json.decode(value)
        endpoints = [endpoint for tier in route.tiers for endpoint in tier]
        upstreams = list(
            {endpoint.upstream.name: endpoint.upstream for endpoint in endpoints}.values()
        )
        if not _IS_ID.fullmatch(previous) or len(self._keepers(route.local_only)) < 2:
            # an engine reports what is wrong with it
            return route
        home = await self._home("responses", previous, tenant, route.local_only)
        if home not in upstreams:
            raise HttpError(
                400,
                f"response {previous[:80]!r} is stored by engine {home.name}, not one of "
                f"{route.shown}",
            )
        tiers = [
            [endpoint for endpoint in tier if endpoint.upstream is home] for tier in route.tiers
        ]
        return replace(route, tiers=[tier for tier in tiers if tier], longer=None)

    def watch(self, tenant: str) -> Watch:
        """Return what records where a response is made; of a stream by its first event, as the
        response may be requested while it runs."""

        def watch(upstream: Upstream, data: bytes, is_whole: bool) -> None:
            if is_whole:
                self._note(data, upstream, tenant)
            elif (found := _TOLD_ID.search(data[:4096])) is not None:
                self.homes.note(found[1].decode(), upstream.name, tenant)

        return watch

    def _note(self, answer: bytes, upstream: Upstream, tenant: str) -> None:
        try:
            made = msgspec.json.decode(answer, type=_Made)
        except msgspec.MsgspecError:
            return
        self.homes.note(made.id, upstream.name, tenant)

    # ---------------------------------------------------------------- one object

    async def _one(self, incoming: IncomingRequest, kind: str, kept_id: str) -> None:
        local = self._gateway.policy.is_local_head(incoming)
        upstream = await self._home(kind, kept_id, incoming.tenant, local)
        await self._pass_on(incoming, upstream, b"" if incoming.method == "POST" else None)
        if incoming.method == "DELETE":
            self.homes.forget(kept_id)

    async def _home(self, kind: str, kept_id: str, tenant: str, local_only: bool) -> Upstream:
        """Return the engine that has an object. Raises HttpError: 404, no engine has it, or it
        belongs to another key; 503, an engine that may have it does not answer.

        Args:
            local_only: no cloud is asked, and what a cloud has is not there.
        """
        upstreams = self._gateway.upstreams.by_name
        home = self.homes.find(kept_id)
        if home is not None and home.tenant not in (None, tenant):
            raise _not_there(kind, kept_id)
        if home is not None and home.engine in upstreams:
            if local_only and upstreams[home.engine].config.cloud:
                raise _not_there(kind, kept_id)
            return upstreams[home.engine]
        keepers = (self._keepers if kind == "responses" else self._with_files)(local_only)
        if len(keepers) == 1:
            # the engine itself says whether it has it
            return keepers[0]
        found = await self._ask_all(keepers, kind, kept_id, tenant)
        self.homes.note(kept_id, found.name, None)
        return found

    async def _ask_all(
        self, upstreams: list[Upstream], kind: str, kept_id: str, tenant: str
    ) -> Upstream:
        """Ask all engines which one has an object. Raises HttpError."""
        target = f"/v1/{kind}/{quote(kept_id)}"

        async def has(upstream: Upstream) -> tuple[Upstream, int]:
            try:
                headers = headers_for(upstream, tenant)
                async with await pass_on(
                    upstream, "GET", target, headers, None, _ASK_SECONDS
                ) as passed:
                    return upstream, passed.status
            except ConnectError:
                return upstream, 0

        silent: list[str] = []
        asked = [asyncio.ensure_future(has(upstream)) for upstream in upstreams]
        try:
            for each in asyncio.as_completed(asked):
                upstream, status = await each
                if status == 200:
                    return upstream
                if status not in _NOT_HERE:
                    silent.append(upstream.name)
        finally:
            for task in asked:
                task.cancel()
        if silent:
            names = ", ".join(sorted(silent))
            raise HttpError(
                503, f"{kept_id} may be stored by {names}, which cannot be reached now", 1.0
            )
        raise _not_there(kind, kept_id)

    def _keepers(self, local_only: bool) -> list[Upstream]:
        return [
            engine
            for engine in self._gateway.upstreams.by_name.values()
            if engine.kind not in _WITHOUT and not (local_only and engine.config.cloud)
        ]

    def _with_files(self, local_only: bool) -> list[Upstream]:
        return [engine for engine in self._keepers(local_only) if engine.kind in _WITH_FILES]

    async def _pass_on(
        self, incoming: IncomingRequest, upstream: Upstream, body: bytes | None
    ) -> None:
        """Pass a request on unchanged, and its answer back; record an object that it makes."""
        query = incoming.scope.get("query_string", b"").decode("latin-1")
        target = quote(incoming.path) + (f"?{query}" if query else "")
        headers = headers_for(upstream, incoming.tenant, incoming.request_id)
        if body is not None:
            kind = incoming.headers.get(b"content-type", b"application/json")
            headers.append((b"content-type", kind))
        seconds = self._gateway.config.first_byte_timeout

        async def relay() -> None:
            answer: Passed | None = None
            try:
                answer = await pass_on(upstream, incoming.method, target, headers, body, seconds)
                async with answer as passed:
                    makes = passed.status == 200 and incoming.path in _LISTS
                    if makes:
                        made = await passed.whole()
                        self._note(made, upstream, incoming.tenant)
                        await _send_json(incoming.send, made, upstream.name)
                    else:
                        await passed.tell(incoming.send)
            except ConnectError as error:
                if answer is not None and answer.is_told:
                    raise
                raise HttpError(503, f"engine {upstream.name}: {error}", 1.0) from None

        await unless_disconnected(incoming.receive, relay())

    # ---------------------------------------------------------------- creation and lists

    async def _create(self, incoming: IncomingRequest) -> None:
        most = self._gateway.config.max_body_size
        if incoming.path == "/v1/batches":
            self._check_counted(incoming.tenant)
            body = await incoming.read_json(most)
            try:
                asked = msgspec.json.decode(body, type=_Batch)
            except msgspec.MsgspecError as error:
                raise InvalidRequestError(
                    f"the request body does not describe a batch: {error}"
                ) from None
            if not _IS_ID.fullmatch(asked.input_file_id):
                raise InvalidRequestError(
                    f"input_file_id is not a file id, got {show(asked.input_file_id)}",
                    "input_file_id",
                )
            local = self._gateway.policy.is_local_upload(incoming, body)
            upstream = await self._home("files", asked.input_file_id, incoming.tenant, local)
        else:
            body = await incoming.read(most)
            upstream = self._place(body, self._gateway.policy.is_local_upload(incoming, body))
        await self._pass_on(incoming, upstream, body)

    def _place(self, upload: bytes, local_only: bool) -> Upstream:
        """Choose the least busy engine that has the model of an upload's first line by that name.
        Raises HttpError, and UnknownModelError."""
        upstreams = self._with_files(local_only)
        told = _MODEL.search(upload[:_FIRST_BYTES])
        if told is not None:
            name = msgspec.json.decode(told[1], type=str)
            # the engine reads the lines unchanged, so the name must match
            route = self._gateway.routes.find(name, 0.0, local_only=local_only)
            places = {s.upstream.name for tier in route.tiers for s in tier if s.model == name}
            upstreams = [e for e in upstreams if e.name in places]
        else:
            # a file whose model is unknown is not sent to a cloud
            upstreams = [e for e in upstreams if not e.config.cloud]
        if not upstreams:
            raise HttpError(404, "no engine here stores files for that model")
        alive = [e for e in upstreams if not e.draining and not e.trouble] or upstreams
        return min(alive, key=lambda upstream: (len(upstream.running), random.random()))

    def _check_counted(self, tenant: str) -> None:
        """Raise HttpError 403 if a key has limits: only the engine knows what a batch uses."""
        gateway = self._gateway
        limits = key_limits(gateway.config) or gateway.keys.limits().get(tenant)
        key = gateway.spending.key(tenant)
        # a key that only stays at home has no limit
        if limits or (key is not None and (key.budget or key.models)):
            raise HttpError(
                403,
                "this key has limits, which cannot be enforced on batches: send it to an engine",
            )

    async def _list(self, incoming: IncomingRequest) -> None:
        """Send the merged lists, newest first unless ``order`` says otherwise."""
        query = parse_qs(incoming.scope.get("query_string", b"").decode("latin-1"))
        at_once, usual, most = _PAGE[incoming.path]
        limit = query.get("limit", [str(usual)])[0]
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
            raise InvalidRequestError(f"limit must be between 1 and {most}, got {show(limit)}")
        more = "".join(f"&{n}={quote(query[n][0])}" for n in ("purpose", "order") if n in query)
        local = self._gateway.policy.is_local_head(incoming)
        lists = await asyncio.gather(
            *(
                self._listed(upstream, f"{incoming.path}?limit={at_once}{more}", incoming.tenant)
                for upstream in self._with_files(local)
            )
        )
        entries = [entry for entries in lists for entry in entries if self._is_of(entry, incoming)]
        backwards = query.get("order", ["desc"])[0] != "asc"
        entries.sort(key=lambda entry: entry.get("created_at") or 0, reverse=backwards)
        if (after := query.get("after", [""])[0]) != "":
            ids = [entry["id"] for entry in entries]
            if after not in ids:
                raise HttpError(404, f"after: there is no {after[:80]!r} here")
            entries = entries[ids.index(after) + 1 :]
        page = entries[: int(limit)]
        told = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(entries) > len(page),
        }
        await _send_json(incoming.send, as_json(200, told)[2])

    def _is_of(self, entry: Mapping[str, Any], incoming: IncomingRequest) -> bool:
        """Whether an object is the caller's key's: engines know only the gateway's key."""
        if not isinstance(entry.get("id"), str):
            return False
        home = self.homes.find(entry["id"])
        return not len(self._gateway.keys) or (home is not None and home.tenant == incoming.tenant)

    async def _listed(
        self, upstream: Upstream, target: str, tenant: str
    ) -> list[Mapping[str, Any]]:
        """Return all objects that an engine lists. Raises HttpError if it does not answer."""
        found: list[Mapping[str, Any]] = []
        after = ""
        for _ in range(_MOST_PAGES):
            try:
                headers = headers_for(upstream, tenant)
                async with await pass_on(
                    upstream, "GET", target + after, headers, None, _ASK_SECONDS
                ) as passed:
                    body = await passed.whole()
                if passed.status in _NOT_HERE:
                    return found
                page = msgspec.json.decode(body, type=_Page)
            except (ConnectError, msgspec.MsgspecError):
                raise HttpError(503, f"engine {upstream.name} cannot be reached now", 1.0) from None
            found += page.data
            if not page.has_more or not page.data:
                break
            after = f"&after={quote(str(page.data[-1].get('id')))}"
        return found


class _Made(msgspec.Struct):
    id: str


class _Batch(msgspec.Struct):
    input_file_id: str


class _Page(msgspec.Struct):
    data: list[dict[str, Any]]
    has_more: bool = False


def headers_for(upstream: Upstream, tenant: str, request_id: str = "") -> Headers:
    """Headers to add to those of every request, for a request that is not an attempt."""
    found: Headers = []
    if request_id:
        found.append((b"x-request-id", request_id.encode()))
    if tenant and upstream.kind == "paceline":
        found.append((b"x-llm-d-inference-fairness-id", tenant.encode()))
    return found


def _not_there(kind: str, kept_id: str) -> HttpError:
    one = {"responses": "response", "files": "file", "batches": "batch"}[kind]
    return HttpError(404, f"no {one} with id {kept_id[:80]!r} is stored here")


async def _send_json(send: Callable[[Any], Any], body: bytes, engine: str = "") -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if engine:
        headers.append((b"x-paceline-engine", engine.encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
