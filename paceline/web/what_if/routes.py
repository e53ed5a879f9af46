"""The endpoints of the page's what-if. Their code is imported at the first request.

A trace, a job and its runs belong to the request's key and to the session in its header: the page
makes up a session for each tab. Other sessions cannot see them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.server.generation.service import Service
from paceline.server.transport.middleware import principal_of, read_object
from paceline.web.feed import Feed
from paceline.web.what_if.storage import Owner, sweep

if TYPE_CHECKING:
    from paceline.web.what_if.service import WhatIf

__all__ = ["what_if_routes"]

Handler = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger("paceline.server")
_SESSION: Final = "x-paceline-session"


def what_if_routes(
    service: Service, feed: Feed | None, headers: dict[str, str]
) -> list[tuple[str, str, Handler]]:
    """Return (method, path, handler) of each; answers carry ``headers``. Removes folders that
    killed servers have left behind."""
    if service.config.what_if is not None:
        for left in sweep():
            _log.info("what_if_swept folder=%s", left)

    @lru_cache(maxsize=1)
    def made() -> WhatIf:
        config = service.config.what_if
        if config is None:
            raise HttpError(404, "this server has nothing to simulate with")
        from paceline.web.what_if.service import WhatIf

        return WhatIf(service, feed, config)

    def answer(told: dict[str, Any]) -> Response:
        return Response(json.dumps(told), media_type="application/json", headers=headers)

    async def tell(request: Request) -> Response:
        return answer(await made().tell(_owner(request)))

    async def start(request: Request) -> Response:
        what_if, owner = made(), _owner(request)
        return answer(await what_if.start(owner, await read_object(request, service.config)))

    async def cancel(request: Request) -> Response:
        return answer(await made().cancel(_owner(request)))

    async def upload(request: Request) -> Response:
        return answer(await made().upload(_owner(request), request))

    async def frames(request: Request) -> Response:
        run, job = _number(request, "run", ""), _number(request, "job", None)
        assert run is not None, "it is asked for"
        body = await made().frames(_owner(request), run, job)
        return Response(body, media_type="application/octet-stream", headers=headers)

    return [
        ("GET", "/ui/api/what-if", tell),
        ("POST", "/ui/api/what-if", start),
        ("DELETE", "/ui/api/what-if", cancel),
        ("PUT", "/ui/api/what-if/trace", upload),
        ("GET", "/ui/api/what-if/timeline", frames),
    ]


def _owner(request: Request) -> Owner:
    """Return the caller. Raises HttpError 400 for a session that is not a valid name."""
    session = request.headers.get(_SESSION, "")
    if not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", session):
        raise HttpError(
            400, f"{_SESSION} must be 64 letters, digits, - and _ at most, got {show(session)}"
        )
    return Owner(principal_of(request), session)


def _number(request: Request, name: str, default: str | None) -> int | None:
    """Return a number of the query; ``default`` if absent. Raises HttpError 400."""
    value = request.query_params.get(name, default)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,6}", value):
        raise HttpError(400, f"{name} must be the number of a {name}, got {show(value)}")
    return int(value)
