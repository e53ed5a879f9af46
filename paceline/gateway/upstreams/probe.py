"""Small requests to an engine in addition to those that it serves: polls and probes."""

from __future__ import annotations

from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.small import fetch

__all__ = ["fetch_small"]


async def fetch_small(
    upstream: Upstream, path: str, timeout: float, body: bytes | None = None
) -> tuple[int, bytes]:
    """Return status and body of a GET, or of a POST of ``body`` (JSON). Raises ConnectError."""
    method = "GET" if body is None else "POST"
    return await fetch(upstream.pool, method, path, upstream.headers(), timeout, body)
