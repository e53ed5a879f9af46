"""The page's files over HTTP: what is sent, with which headers, to whom."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.engine.local import LocalEngineClient
from paceline.errors import ConfigError
from paceline.http.keys import ApiKey, is_page
from paceline.server import ServerConfig, create_app
from paceline.web.assets import BUILT_IN, load_assets
from paceline.web.gateway import answer as gateway_page
from paceline.web.routes import ui_router

KEY = ApiKey.of("someone", "user", "a-key-of-some-length")


def at(engine: LocalEngineClient, address: str = "http://127.0.0.1", **config: Any) -> Any:
    app = create_app(engine, ServerConfig(**config), page=ui_router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=address)


@pytest.fixture
async def page(engine: LocalEngineClient) -> AsyncIterator[httpx.AsyncClient]:
    async with at(engine) as http:
        yield http


async def files_of(page: httpx.AsyncClient) -> set[str]:
    """Paths of all files that the page at /ui/ leads to, below whatever path a proxy has it at."""
    answer = await page.get("/ui/")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-cache"
    shown = httpx.URL("/below/ui/")
    named = [str(shown.join(name)) for name in re.findall(r'(?:href|src)="([^"]+)"', answer.text)]
    assert len(named) >= 4 and all(path.startswith("/below/ui/v/") for path in named)
    seen: set[str] = set()
    while named:
        path = named.pop()
        if path in seen:
            continue
        seen.add(path)
        got = await page.get(path.removeprefix("/below"))
        assert got.status_code == 200, path
        assert got.headers["cache-control"].endswith("immutable")
        for name in re.findall(r'(?:from |import\()"(\.[^"]+)"', got.text):
            named.append(str(httpx.URL(path).join(name)))
    return seen


async def test_every_file_that_a_page_names_is_there_for_good(page: httpx.AsyncClient) -> None:
    app = httpx.ASGITransport(app=gateway_page)
    async with httpx.AsyncClient(transport=app, base_url="http://127.0.0.1") as gateway:
        seen = await files_of(page) | await files_of(gateway)
    modules = {path for path in seen if path.endswith(".js")}
    assert len(modules) == len(list(BUILT_IN.rglob("*.js"))), "a module that nothing imports"


async def test_headers_forbid_everything_from_elsewhere(page: httpx.AsyncClient) -> None:
    for path in (
        "/ui/",
        "/ui/server",
        "/ui/" + re.findall(r'"(v/\S+main.js)"', (await page.get("/ui/")).text)[0],
    ):
        headers = (await page.get(path)).headers
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


async def test_it_is_packed_and_not_sent_twice(page: httpx.AsyncClient) -> None:
    packed = await page.get("/ui/", headers={"Accept-Encoding": "gzip"})
    plain = await page.get("/ui/", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and packed.text == plain.text
    assert "content-encoding" not in plain.headers
    tag = plain.headers["etag"]
    again = await page.get("/ui/", headers={"If-None-Match": tag})
    assert again.status_code == 304 and not again.content
    assert (await page.get("/ui/", headers={"If-None-Match": '"old"'})).status_code == 200


async def test_the_address_leads_browsers_there_and_nobody_else(page: httpx.AsyncClient) -> None:
    for_browser = await page.get("/", headers={"Accept": "text/html,*/*"})
    assert for_browser.status_code == 307
    assert httpx.URL("http://x/below/").join(for_browser.headers["location"]).path == "/below/ui/"
    for_program = await page.get("/", headers={"Accept": "*/*"})
    assert for_program.status_code == 404 and "/ui/" in for_program.json()["error"]["message"]
    bare = (await page.get("/ui")).headers["location"]
    assert httpx.URL("http://x/below/ui").join(bare).path == "/below/ui/"


async def test_no_file_beside_its_own(page: httpx.AsyncClient) -> None:
    for path in (
        "/ui/v/x/../assets.py", "/ui/v/x/..%2fassets.py", "/ui/v/x//etc/passwd",
        "/ui/v/x/index.html", "/ui/assets.py", "/ui/a/b", "/ui/v/x/", "/ui/v/x/%00",
    ):  # fmt: skip
        assert (await page.get(path)).status_code == 404, path
    # an older page may still ask for a file by its old version, but not keep it
    old = await page.get("/ui/v/0123/main.js")
    assert old.status_code == 200 and old.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("config", "address", "host", "status"),
    [
        ({}, "http://127.0.0.1", "evil.example", 421),
        ({}, "http://127.0.0.1", "127.0.0.1.evil.example:8000", 421),
        ({}, "http://127.0.0.1", "localhost:8000", 200),
        ({}, "http://[::1]", "[::1]:8000", 200),
        ({}, "http://[::1]", "evil.example", 421),
        ({}, "http://192.0.2.7", "evil.example", 200),
        ({"allowed_hosts": ("mine.example",)}, "http://127.0.0.1", "mine.example", 200),
        ({"api_keys": (KEY,)}, "http://127.0.0.1", "evil.example", 200),
    ],
)
async def test_a_name_made_to_point_here_is_refused(
    engine: LocalEngineClient, config: Any, address: str, host: str, status: int
) -> None:
    async with at(engine, address, **config) as http:
        for path in ("/ui/", "/ui/server", "/ui/v/x/main.js"):
            assert (await http.get(path, headers={"Host": host})).status_code == status


async def test_the_page_can_be_left_out(engine: LocalEngineClient) -> None:
    async with at(engine, ui=False) as http:
        for path in ("/ui/", "/ui", "/", "/ui/v/x/main.js"):
            answer = await http.get(path, headers={"Accept": "text/html"})
            assert answer.status_code == 404, path


async def test_another_folder_is_read_anew(engine: LocalEngineClient, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("one")
    (tmp_path / "secret.pem").write_text("not of a type that pages have")
    async with at(engine, ui_dir=tmp_path) as http:
        assert (await http.get("/ui/")).text == "one"
        (tmp_path / "index.html").write_text("two")
        assert (await http.get("/ui/")).text == "two"
        assert (await http.get("/ui/v/x/secret.pem")).status_code == 404
        (tmp_path / "index.html").unlink()
        gone = await http.get("/ui/")
        assert gone.status_code == 404 and "missing" in gone.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200
    with pytest.raises(ConfigError, match=r"index\.html"):
        ServerConfig(ui_dir=tmp_path)


async def test_there_is_no_websocket_beside_the_doors(engine: LocalEngineClient) -> None:
    """Keys, origins and limits are asked of HTTP alone."""
    app = create_app(engine, ServerConfig(), page=ui_router)
    said: list[str] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        said.append(message["type"])

    for path in ("/ui/api/timeline", "/ui/", "/v1/realtime", "/"):
        scope = {
            "type": "websocket", "path": path, "raw_path": path.encode(), "scheme": "ws",
            "headers": [(b"host", b"127.0.0.1")], "query_string": b"", "root_path": "",
            "subprotocols": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "http_version": "1.1", "extensions": {}, "state": {},
        }  # fmt: skip
        await app(scope, receive, send)
    assert set(said) == {"websocket.close"}


def test_what_is_open_is_the_page_alone() -> None:
    for path in ("/", "/ui", "/ui/", "/ui/server", "/ui/v/x/main.js"):
        assert is_page(path), path
    for path in ("", "/uix", "/ui/api", "/ui/api/", "/ui/api/timeline", "/v1/models", "/UI/"):
        assert not is_page(path), path


def test_the_bundle_is_what_its_manifest_says() -> None:
    vendor = BUILT_IN / "vendor"
    manifest = json.loads((vendor / "MANIFEST.json").read_text())
    for name, told in manifest["files"].items():
        body = (vendor / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == told["sha256"] and len(body) == told["bytes"]
    assert {path.name for path in vendor.glob("*.js")} == set(manifest["files"])
    licences = (vendor / "LICENSES.txt").read_text()
    lock = json.loads((BUILT_IN.parents[2] / "ui" / "package-lock.json").read_text())["packages"]
    for name, part in manifest["parts"].items():
        assert f"{name} {part['version']}" in licences
        assert lock[f"node_modules/{name}"]["version"] == part["version"]


def test_the_page_stays_small() -> None:
    files = [path for path in BUILT_IN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 350 * 1024
    sent = [path.read_bytes() for path in files if path.suffix in (".html", ".css", ".js", ".svg")]
    assert sum(len(gzip.compress(body, 9)) for body in sent) <= 150_000


def test_no_file_names_another_origin() -> None:
    for path in BUILT_IN.rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".svg"):
            found = set(re.findall(r"https?://[\w.-]+", path.read_text()))
            # of namespaces, which nothing fetches
            assert found <= {"http://www.w3.org"}, path


def test_a_folder_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("x")
    assert load_assets(tmp_path) is not None
    (tmp_path / "large.js").write_bytes(b"x" * (8 * 2**20))
    assert load_assets(tmp_path) is None
