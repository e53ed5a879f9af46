"""The page at ``/ui`` before vLLM: the playground, and promises by the arithmetic of ``paceline
top``. What only our own server can tell, such as the timeline, is answered with 404, which the page
shows.

Imported when a browser first asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from paceline.errors import ConfigError
from paceline.http.errors import HttpError
from paceline.server.observability.snapshot.scrape import Scrape, parse_metrics
from paceline.web.assets import BUILT_IN, load_assets
from paceline.web.promises import Promises, window_of

__all__ = ["Page"]


class Page:
    """The page's files, and what was read for its viewers."""

    def __init__(self) -> None:
        self._assets = load_assets(BUILT_IN)
        self._started = time.monotonic()
        self._newest = self.at_start()
        self._promises = Promises(self)

    # ------------------------------------------------------------------ ``Readable``

    def read(self) -> Scrape:
        return self._newest

    def at_start(self) -> Scrape:
        return Scrape(self._started, {})

    # ------------------------------------------------------------------ answers

    def file(self, scope: Mapping[str, Any], path: str) -> Response:
        """Return what is at a path that begins with /ui. Raises HttpError."""
        if path == "/ui":
            # relative: a proxy may serve this below the root of its host
            return RedirectResponse("ui/")
        if path.startswith("/ui/api/"):
            raise HttpError(404, "vLLM has no such part of the page: only paceline serve does")
        if self._assets is None:
            raise HttpError(404, "the page's files are missing from this installation")
        return self._assets.response(Request(dict(scope)), path.removeprefix("/ui/"))

    def promises(self, query: str, metrics: bytes) -> Response:
        """Return the promises, of metrics read just now. Raises HttpError."""
        window = window_of(QueryParams(query))
        try:
            self._newest = parse_metrics(metrics.decode(), time.monotonic())
        except ConfigError as error:
            # with --disable-log-stats vLLM has none
            raise HttpError(404, str(error)) from None
        return JSONResponse(self._promises.tell(window), headers={"Cache-Control": "no-store"})
