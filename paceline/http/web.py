"""Rules for browsers. By default, no answer allows pages of another origin to read it.

A page can still *send* without permission (a form, ``no-cors``), so requests that may change
something are refused if the browser says that a page of another origin sends them
(``Sec-Fetch-Site``, ``Origin``); other programs send neither. The browser takes a page whose own
name points at this server (DNS rebinding) for the same origin; the allowed hosts are for that.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase, translate
from typing import Final, TypeAlias
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.http.errors import HttpError
from paceline.http.keys import OPEN_PATHS

__all__ = ["add_web_middleware", "host_name", "refuse_other_origins", "refuse_strange_names"]

_log = logging.getLogger("paceline.server")

_EXPOSED = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{n}-{k}"
        for n in ("limit", "remaining", "reset")
        for k in ("requests", "tokens")
    ),
)

# makes the answer to a refused request from the error, the path and the request's id
Refusal: TypeAlias = Callable[[HttpError, str, str], Response]

_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def refuse_other_origins(scope: Scope, allowed: tuple[str, ...]) -> None:
    """Raise HttpError 403 for a request that may change something, sent by a web page whose origin
    is neither this server's nor among ``allowed``."""
    if scope["method"] in _SAFE_METHODS or scope["path"] in OPEN_PATHS or "*" in allowed:
        return
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if origin is not None and any(fnmatchcase(origin, _plain(each)) for each in allowed):
        return
    if site is not None:
        # "same-site" is another port or subdomain; "none" is the user of the browser
        own = site in ("same-origin", "none")
    elif origin is not None:
        # "null" has no name
        own = _netloc(origin) == headers.get("host", "").lower() != ""
    else:
        own = True
    if not own:
        raise HttpError(
            403,
            f"a web page of {'another origin' if origin is None else ascii(origin[:80])} may not "
            "send requests here; --cors-origin allows an origin",
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def host_name(host: str) -> str:
    """Return a Host header without its port, in lower case; an IPv6 address keeps its brackets."""
    name, colon, port = host.lower().rpartition(":")
    # the colons of an IPv6 address do not precede a port
    return name if colon and port.isdigit() else host.lower()


def refuse_strange_names(scope: Scope, otherwise: str = "") -> None:
    """Raise HttpError 421 if a page of another name may have been made to point here.

    That is the case if the connection came to a loopback address, and Host is not a name of this
    machine. For servers that require no keys and have no list of hosts; ``otherwise``: what lets
    another name.
    """
    try:
        if not ipaddress.ip_address((scope.get("server") or ("",))[0]).is_loopback:
            return
    except ValueError:
        # a Unix socket, which no browser reaches
        return
    if host_name(Headers(scope=scope).get("host", "")) not in _LOCAL_NAMES:
        raise HttpError(
            421,
            "without keys, the page answers on this address to localhost, 127.0.0.1 and [::1] "
            f"alone{otherwise}",
        )


def add_web_middleware(
    app: Starlette,
    *,
    cors_origins: Sequence[str],
    allowed_hosts: tuple[str, ...],
    refusal: Refusal,
) -> None:
    """Wrap everything that the app has so far, as a preflight carries no key."""
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[each for each in cors_origins if each == "*" or "*" not in each],
            allow_origin_regex=_patterns(cors_origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            # keys come in headers, which pages set themselves: never cookies
            allow_credentials=False,
            expose_headers=_EXPOSED,
        )
    if allowed_hosts:
        app.add_middleware(_AllowedHosts, hosts=allowed_hosts, refusal=refusal)


def _plain(origin: str) -> str:
    """Return a pattern in which only ``*`` is special: an IPv6 address has brackets."""
    return origin.replace("[", "[[]").replace("?", "[?]")


def _patterns(origins: Sequence[str]) -> str | None:
    """Return an expression for the origins with a ``*`` among other characters; None: there are
    none."""
    parts = [translate(_plain(each)) for each in origins if "*" in each and each != "*"]
    return "|".join(parts) or None


class _AllowedHosts:
    """Answers 421 to a Host that is not in ``hosts``; ``*.name`` matches any name below it."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], refusal: Refusal) -> None:
        self._app = app
        self._refusal = refusal
        self._names = frozenset(host.lower() for host in hosts if not host.startswith("*."))
        self._ends = tuple(host[1:].lower() for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            # probes use the address
            await self._app(scope, receive, send)
            return
        name = host_name(Headers(scope=scope).get("host", ""))
        if name in self._names or (self._ends and name.endswith(self._ends)):
            await self._app(scope, receive, send)
            return
        request_id = uuid4().hex
        client = (scope.get("client") or ("",))[0]
        _log.info("refused id=%s status=421 client=%s", request_id, client)
        error = HttpError(421, "this server does not accept the Host header of this request")
        answer = self._refusal(error, scope["path"], request_id)
        answer.headers["x-request-id"] = request_id
        await answer(scope, receive, send)
