"""A hub on this machine: the two requests that ``checkpoints.hub.client`` makes, and what goes
wrong.

Answers are shaped as the hub's are, so that huggingface_hub's own client can ask too.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["HubServer", "hub_server"]

COMMIT = "5" * 40
_LARGE = (".gguf", ".safetensors")


@dataclass
class HubServer:
    """What is there, how it fails, and what was asked for."""

    address: str = ""
    # "org/name" -> file -> content
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    # file -> bytes after which its connection is cut, an answer at a time
    cuts: dict[str, list[int]] = field(default_factory=dict)
    # files that arrive with another last byte
    spoilt: set[str] = field(default_factory=set)
    # status codes of the next answers
    failures: list[int] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    ranges: bool = True
    # another host that has the large files, under /cdn/
    cdn: str = ""
    # (method, path, range, authorization)
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)

    def of(self, name: str) -> list[tuple[str, str, str | None, str | None]]:
        return [request for request in self.requests if request[1].endswith(name)]


def _digests(content: bytes) -> tuple[str, str]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return hashlib.sha256(content).hexdigest(), git


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urllib.parse.unquote(self.path.partition("?")[0])
            given = self.headers.get("Authorization")
            hub.requests.append((self.command, path, self.headers.get("Range"), given))
            if hub.failures:
                self.answer(hub.failures.pop(0), b"busy")
            elif match := re.fullmatch(r"/cdn/(.+?/.+?)/(.+)", path):
                self.file(match[1], match[2])
            elif match := re.fullmatch(r"/api/models/(.+?/[^/]+)(/revision/[^/]+)?", path):
                if self.allowed(match[1], given):
                    self.listing(match[1])
            elif (match := re.fullmatch(r"/(.+?/.+?)/resolve/[^/]+/(.+)", path)) and self.allowed(
                match[1], given
            ):
                if hub.cdn and match[2].endswith(_LARGE):
                    where = (
                        f"{hub.cdn}/cdn/{match[1]}/{urllib.parse.quote(match[2])}?Signature=s3cret"
                    )
                    self.answer(302, b"", {"Location": where, **self.described(match[1], match[2])})
                else:
                    self.file(match[1], match[2])

        def allowed(self, repo: str, given: str | None) -> bool:
            entitled = hub.token is not None and given == f"Bearer {hub.token}"
            if repo not in hub.repos or (hub.token is not None and not entitled):
                code = {"X-Error-Code": "RepoNotFound"}
                self.answer(401, f"you sent {given}".encode(), code)
            elif repo in hub.gated:
                self.answer(403, f"you sent {given}".encode(), {"X-Error-Code": "GatedRepo"})
            else:
                return True
            return False

        def listing(self, repo: str) -> None:
            siblings = []
            for name, content in hub.repos[repo].items():
                sha256, git = _digests(content)
                entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
                if name.endswith(_LARGE):
                    entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
                siblings.append(entry)
            body = {"id": repo, "sha": COMMIT, "siblings": siblings, "private": False}
            self.answer(200, json.dumps(body).encode())

        def described(self, repo: str, name: str) -> dict[str, str]:
            content = hub.repos[repo][name]
            sha256, git = _digests(content)
            etag = sha256 if name.endswith(_LARGE) else git
            return {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{etag}"', "ETag": f'"{etag}"',
                    "X-Linked-Size": str(len(content))}  # fmt: skip

        def file(self, repo: str, name: str) -> None:
            content, start, status = hub.repos[repo][name], 0, 200
            headers = self.described(repo, name)
            if name in hub.spoilt:
                content = content[:-1] + bytes([content[-1] ^ 1])
            wanted = re.fullmatch(r"bytes=([0-9]+)-", self.headers.get("Range", ""))
            if wanted and hub.ranges:
                start, status = int(wanted[1]), 206
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            cut = hub.cuts.get(name)
            self.answer(status, content[start:], headers, cut.pop(0) if cut else None)

        def answer(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str] | None = None,
            cut: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    return Handler


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """One without repositories, on a free port of 127.0.0.1."""
    hub = HubServer()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
