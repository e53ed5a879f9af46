"""The page behind a proxy that has the server at a path below its host's root."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.server.live_process import LiveServer
from tests.ui.conftest import OpenPage, expect, say

BELOW = "/deep/llm"


@pytest.fixture(scope="module")
def proxy(server: LiveServer) -> Iterator[str]:
    """Its address. It sends on what is asked for below the path, and knows nothing else."""

    # one without certificates, which take longer to read than a file to be sent
    client = httpx.Client(base_url=server.url, verify=False, timeout=60)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{BELOW}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: value for name, value in self.headers.items() if name != "Host"}
            path = self.path.removeprefix(BELOW)
            with client.stream(self.command, path, content=body, headers=headers) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("transfer-encoding", "connection", "keep-alive"):
                        self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    # the timeline, which the browser leaves in its middle
                    for part in answer.iter_raw():
                        self.wfile.write(part)

        do_POST = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}{BELOW}"
    listener.shutdown()
    listener.server_close()
    thread.join()
    client.close()


def test_all_of_the_page_works_there(open_page: OpenPage, proxy: str) -> None:
    page = open_page(f"{proxy}/")
    assert page.url == f"{proxy}/ui/"
    page.locator(".state", has_text="ready").wait_for()
    say(page, "hello", Max_tokens="6")
    page.locator(".story").wait_for()
    for tab in ("timeline", "promises", "what-if", "server", "operations"):
        page.locator(f'nav a[href="{tab}"]').click()
        expect(page).to_have_url(f"{proxy}/ui/{tab}")
    # a reload finds the same tab
    page.reload()
    page.locator('nav a[aria-current="page"]', has_text="Operations").wait_for()
    page.locator(".state", has_text="ready").wait_for()
