"""The endpoints of the page's what-if. What does the work is imported when one is first asked."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import HttpError
from paceline.http.fields import show
from paceline.server.exchange import read_object
from paceline.server.service import Service
from paceline.server.ui.feed import Feed

if TYPE_CHECKING:
    from paceline.server.ui.what_if import WhatIf

__all__ = ["what_if_routes"]

Handler = Callable[[Request], Awaitable[Response]]


def what_if_routes(
    service: Service, feed: Feed | None, headers: dict[str, str]
) -> list[tuple[str, str, Handler]]:
    """(method, path, handler) of each; answers carry ``headers``."""

    @lru_cache(maxsize=1)
    def made() -> WhatIf:
        config = service.config.what_if
        if config is None:
            raise HttpError(404, "this server has nothing to simulate with")
        from paceline.server.ui.what_if import WhatIf

        return WhatIf(service, feed, config)

    def answer(told: dict[str, Any]) -> Response:
        return Response(json.dumps(told), media_type="application/json", headers=headers)

    async def tell(_request: Request) -> Response:
        return answer(await made().tell())

    async def start(request: Request) -> Response:
        what_if = made()
        return answer(await what_if.start(await read_object(request, service.config)))

    async def cancel(_request: Request) -> Response:
        return answer(await made().cancel())

    async def upload(request: Request) -> Response:
        return answer(await made().upload(request))

    async def frames(request: Request) -> Response:
        run = request.query_params.get("run", "")
        if not re.fullmatch(r"\d{1,4}", run):
            raise HttpError(400, f"run must be the number of a run, got {show(run)}")
        body = await made().frames(int(run))
        return Response(body, media_type="application/octet-stream", headers=headers)

    return [
        ("GET", "/ui/api/what-if", tell),
        ("POST", "/ui/api/what-if", start),
        ("DELETE", "/ui/api/what-if", cancel),
        ("PUT", "/ui/api/what-if/trace", upload),
        ("GET", "/ui/api/what-if/timeline", frames),
    ]
