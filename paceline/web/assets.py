"""The files of the page: in memory, compressed, with headers that restrict the browser."""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.http.errors import HttpError

__all__ = ["BUILT_IN", "SECURITY_HEADERS", "Asset", "Assets", "load_assets"]

BUILT_IN: Final = Path(__file__).parent / "static"
_PAGE: Final = "index.html"
# placeholder of the version in index.html
_VERSION_MARK: Final = b"{{version}}"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
# limits, because a folder given by --ui-dir could hold anything
_MAX_FILES: Final = 500
_MAX_BYTES: Final = 8 * 2**20

SECURITY_HEADERS: Final[Mapping[str, str]] = {
    # only this server's own files run, and no string ever becomes HTML or a script
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}

_FOR_GOOD: Final = "public, max-age=31536000, immutable"
_log = logging.getLogger("paceline.server")


@dataclass(frozen=True, slots=True)
class Asset:
    """One file: its bytes plain and compressed, its type and its tag."""

    body: bytes
    packed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, body: bytes, suffix: str) -> Asset:
        # a fixed time, so that equal bytes compress alike
        packed = gzip.compress(body, 9, mtime=0)
        return cls(body, packed, _TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')


@dataclass(frozen=True, slots=True)
class Assets:
    """All files by path below the folder. ``version`` is a digest of them all, part of their URLs,
    so that browsers can cache each file for good."""

    files: Mapping[str, Asset]
    version: str
    page: Asset

    def response(self, request: Request, path: str) -> Response:
        """Return a file, v/VERSION/NAME, or the page for a tab's name. Raises HttpError."""
        first, _, rest = path.partition("/")
        version, _, name = rest.partition("/")
        asset = self.files.get(name) if first == "v" and name else None
        if asset is not None:
            return _answer(request, asset, _FOR_GOOD if version == self.version else "no-cache")
        if "/" in path or "." in path:
            raise HttpError(404, "the page has no such file")
        return _answer(request, self.page, "no-cache")


def load_assets(folder: Path, shell: str = _PAGE) -> Assets | None:
    """Return the files of ``folder``; None, with a line in the log, if it has no page ``shell``."""
    found: dict[str, bytes] = {}
    size = 0
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            body = path.read_bytes()
            size += len(body)
            found[path.relative_to(folder).as_posix()] = body
            if len(found) > _MAX_FILES or size > _MAX_BYTES:
                _log.warning("ui_unserved reason=too_large files=%d bytes=%d", len(found), size)
                return None
    if shell not in found:
        _log.warning("ui_unserved reason=no_page")
        return None
    digest = hashlib.sha256()
    for name, body in found.items():
        digest.update(f"{name}\0{len(body)}\0".encode() + body)
    version = digest.hexdigest()[:16]
    page = Asset.of(found[shell].replace(_VERSION_MARK, version.encode()), ".html")
    files = {
        name: Asset.of(body, suffix)
        for name, body in found.items()
        if (suffix := Path(name).suffix) != ".html"
    }
    return Assets(files, version, page)


def _answer(request: Request, asset: Asset, keep: str) -> Response:
    headers = {
        **SECURITY_HEADERS,
        "Cache-Control": keep,
        "ETag": asset.etag,
        "Vary": "Accept-Encoding",
    }
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    body = asset.body
    if "gzip" in request.headers.get("accept-encoding", "") and len(asset.packed) < len(body):
        body = asset.packed
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type=asset.media_type, headers=headers)
