"""The page at ``/ui`` of a gateway: its engines, models and cascades, as ``/status`` tells them.

Imported when a browser first asks for it. Its files need no key; ``/status`` wants one of scope
admin where there are keys, which the reader types in.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from paceline.http.errors import HttpError
from paceline.web.assets import BUILT_IN, Assets, load_assets

__all__ = ["answer"]


@lru_cache(maxsize=1)
def _assets() -> Assets | None:
    return load_assets(BUILT_IN, "gateway.html")


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a GET of a path for which ``is_page`` holds. Raises HttpError."""
    request, path = Request(scope), scope["path"]
    if path == "/" and "text/html" not in request.headers.get("accept", ""):
        raise HttpError(404, "there is no GET / here; the page for browsers is /ui/")
    if path in ("/", "/ui"):
        # relative: a proxy may serve this below the root of its host
        await RedirectResponse("ui/", headers={"Vary": "Accept"})(scope, receive, send)
        return
    # compressing all files takes tens of milliseconds, which no stream is to wait for
    assets = await asyncio.to_thread(_assets)
    if assets is None:
        raise HttpError(404, "the page's files are missing from this installation")
    await assets.response(request, path.removeprefix("/ui/"))(scope, receive, send)
