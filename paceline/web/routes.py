"""``/ui``: the page, its files, and access to them.

::

    GET /                      a browser is sent to /ui/; other programs get 404, as before
    GET /ui/  /ui/TAB          index.html, revalidated each time
    GET /ui/v/VERSION/PATH     a file, cached by the browser for good
    GET /ui/api/timeline       an engine's timeline, for a key of scope admin; ?model= of several
    GET /ui/api/promises       targets met, waits, steps and their cost, likewise
    * /ui/api/what-if...       see ``what_if.routes``, likewise
    GET /ui/api/operations     keys, limits, models, settings and state, likewise

The files need no key: they are this package's public code, in memory after the first request, with
headers that restrict the browser. The page's data comes from the API, with the key that its reader
types in.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.http.sse import STREAM_HEADERS
from paceline.http.web import refuse_strange_names
from paceline.server.generation.service import Service
from paceline.server.protocol.field_types import check_model
from paceline.server.transport.responses import answering
from paceline.web.assets import BUILT_IN, Assets, load_assets
from paceline.web.feed import Feed, TooManyViewersError
from paceline.web.what_if.routes import Handler, what_if_routes

if TYPE_CHECKING:
    from paceline.web.promises import Promises

__all__ = ["ui_router"]

_FRAMES: Final = "application/octet-stream"
_API_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# maximum characters of a key's name
_MOST_FIND: Final = 64


def ui_router(service: Service) -> APIRouter:
    router = APIRouter()
    config = service.config
    folder = BUILT_IN if config.ui_dir is None else config.ui_dir

    @lru_cache(maxsize=1)
    def kept() -> Assets | None:
        return load_assets(folder)

    def assets() -> Assets:
        # read again, so that a developer of the page sees changes at the next reload
        found = kept() if config.ui_dir is None else load_assets(folder)
        if found is None:
            raise HttpError(404, "the page's files are missing from this installation")
        return found

    async def root(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            raise HttpError(404, f"there is no {request.method} /; the page for browsers is /ui/")
        return _to_page()

    async def bare(request: Request) -> Response:
        return _to_page()

    async def page(request: Request) -> Response:
        _refuse_strange_names(request, service)
        return assets().response(request, request.path_params.get("tab", ""))

    async def file(request: Request) -> Response:
        _refuse_strange_names(request, service)
        return assets().response(request, "v/{version}/{path}".format(**request.path_params))

    feed, models = None, service.models
    # by name of the model, of those other than the first
    feeds: dict[str, Feed] = {}
    if config.timeline_history:
        feed = Feed(service.client, config.timeline_history)
    if feed is not None and models is not None:

        def watch(name: str, made: Service) -> None:
            if name != models.first:
                feeds[name] = Feed(made.client, config.timeline_history)

        models.on_made = watch

    def feed_of(name: str | None) -> Feed:
        if feed is None:
            raise HttpError(404, "this server keeps no timeline: it was started with --no-timeline")
        if not name:
            return feed
        if models is None:
            check_model(name, service.rules)
            return feed
        known = models.known(name)
        if known != models.first and known not in feeds:
            raise HttpError(409, f"the model {show(known)} was not in memory yet: it has no steps")
        return feeds.get(known, feed)

    async def timeline(request: Request) -> Response:
        _refuse_strange_names(request, service)
        found = feed_of(request.query_params.get("model"))
        since, seconds = _range(request)
        if not _flag(request, "follow"):
            body = found.history(since=since, seconds=seconds)
            return Response(body, media_type=_FRAMES, headers=_API_HEADERS)
        try:
            frames = found.follow(
                since=since,
                seconds=seconds,
                ends=lambda: service.is_ending and not service.in_flight,
                drains=lambda: service.is_ending,
            )
        except TooManyViewersError as error:
            raise HttpError(503, str(error)) from None
        return StreamingResponse(
            frames, media_type=_FRAMES, headers={**STREAM_HEADERS, **_API_HEADERS}
        )

    @lru_cache(maxsize=1)
    def watched() -> Promises:
        # imported on first use, so that it does not slow start-up
        from paceline.web.promises import Promises

        return Promises(service.metrics)

    async def promises(request: Request) -> Response:
        # imported on first use, so that it does not slow start-up
        from paceline.web.promises import window_of

        _refuse_strange_names(request, service)
        told = watched().tell(window_of(request.query_params))
        return Response(json.dumps(told), media_type="application/json", headers=_API_HEADERS)

    for method, path, handler in what_if_routes(service, feed, _API_HEADERS):
        router.add_api_route(
            path,
            answering(service, partial(_by_own_name, service, handler)),
            methods=[method],
            include_in_schema=False,
        )

    async def operated(request: Request) -> Response:
        _refuse_strange_names(request, service)
        # imported on first use, so that it does not slow start-up
        from paceline.web.operations import operations

        found = await operations(service, request.query_params.get("find", "")[:_MOST_FIND])
        return Response(
            msgspec.json.encode(found), media_type="application/json", headers=_API_HEADERS
        )

    for path, handler in (
        ("/", root),
        ("/ui", bare),
        ("/ui/", page),
        ("/ui/v/{version}/{path:path}", file),
        ("/ui/api/timeline", timeline),
        ("/ui/api/promises", promises),
        ("/ui/api/operations", operated),
        ("/ui/{tab:path}", page),
    ):
        # left out of the API's document, which is for programs
        router.add_api_route(
            path, answering(service, handler), methods=["GET"], include_in_schema=False
        )
    return router


def _range(request: Request) -> tuple[tuple[int, int] | None, float]:
    """Return (since, seconds) of a query: ``since=ENGINE.STEP`` or ``seconds=60``."""
    query = request.query_params
    since, seconds = query.get("since"), query.get("seconds", "60")
    if since is not None:
        found = re.fullmatch(r"(\d{1,9})\.(\d{1,10})", since)
        if found is None:
            raise HttpError(400, f"since must be ENGINE.STEP, two numbers, got {show(since)}")
        return (int(found[1]), int(found[2])), 0.0
    if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", seconds):
        raise HttpError(400, f"seconds must be a number from 0 to 999999, got {show(seconds)}")
    return None, float(seconds)


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "0")
    if value not in ("0", "1"):
        raise HttpError(400, f"{name} must be 0 or 1, got {show(value)}")
    return value == "1"


def _to_page() -> Response:
    # relative: a proxy may serve this below the root of its host
    return Response(status_code=307, headers={"Location": "ui/", "Vary": "Accept"})


async def _by_own_name(service: Service, handler: Handler, request: Request) -> Response:
    _refuse_strange_names(request, service)
    return await handler(request)


def _refuse_strange_names(request: Request, service: Service) -> None:
    if not len(service.keys) and not service.config.allowed_hosts:
        refuse_strange_names(request.scope, "; --allowed-host lets another name")
