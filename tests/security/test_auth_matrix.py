"""Who may ask what: every route of the app, found in the app, times every kind of caller."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from paceline.http import keys as keys_module
from paceline.http.errors import HttpError
from paceline.http.keys import ADMIN_PATHS, ADMIN_PREFIX, OPEN_PATHS, KeyRing
from tests.server.helpers import connect

from .keys import ADMIN, KEYS, OTHER, USER, bearer

# a route that is in neither set asks for a key of any scope; one that is added to them is seen here
OPEN = {"/health", "/health/live", "/health/ready", "/ping"}
# the page's files, which are public code
PAGE = {"/", "/ui", "/ui/", "/ui/x", "/ui/v/x/x"}
# what the page asks about everybody's requests, and has simulated
PAGE_API = {
    ("GET", "/ui/api/timeline"),
    ("GET", "/ui/api/operations"),
    ("GET", "/ui/api/promises"),
    ("GET", "/ui/api/what-if"),
    ("POST", "/ui/api/what-if"),
    ("DELETE", "/ui/api/what-if"),
    ("PUT", "/ui/api/what-if/trace"),
    ("GET", "/ui/api/what-if/timeline"),
}
# /status is the gateway's
FOR_ADMINS = {"/metrics", "/slots", "/status", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
# refused to every caller of a server that has no adapters
SWITCHED_OFF = {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}
NOBODY: list[dict[str, Any]] = [
    {},
    bearer(""),
    bearer("wrong-key-01234567"),
    bearer(USER[:-1]),
    bearer(USER + "x"),
    bearer(USER.upper()),
    bearer("' OR '1'='1"),
    bearer("*"),
    bearer(KEYS[0].digest.hex()),
    {"Authorization": USER},
    {"Authorization": f"Basic {USER}"},
    {"x-api-key": "wrong-key-01234567"},
    {"Cookie": f"Authorization=Bearer {USER}"},
    {"X-Forwarded-User": "root", "X-Forwarded-For": "127.0.0.1", "X-Original-URL": "/health"},
]


def walk(routes: Any) -> list[Any]:
    """Routes of routers inside routers too."""
    found = []
    for route in routes:
        # FastAPI keeps what it includes as it was
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        found += walk(inner) if inner else [route]
    return found


def every_route(app: FastAPI) -> list[tuple[str, str]]:
    found = set()
    for route in walk(app.routes):
        path = getattr(route, "path", None)
        if not isinstance(path, str) or not getattr(route, "methods", None):
            pytest.fail(f"a route of a kind that this test does not know: {route!r}")
        filled = re.sub(r"\{[^}]*\}", "x", path)
        found |= {(method, filled) for method in route.methods}
    from_schema = {
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    return sorted(found | from_schema)


async def statuses(http: httpx.AsyncClient, method: str, path: str, headers: Any) -> int:
    return (await http.request(method, path, headers=headers)).status_code


async def test_every_route_times_every_caller(guarded: FastAPI) -> None:
    routes = every_route(guarded)
    assert len(routes) >= 20 and ("GET", "/openapi.json") in routes
    assert set(routes) >= PAGE_API
    async with connect(guarded) as http:
        for method, path in routes:
            for headers in NOBODY:
                status = await statuses(http, method, path, headers)
                assert (status != 401) == (path in OPEN | PAGE), (method, path, headers, status)
            for key, scope in ((USER, "user"), (OTHER, "user"), (ADMIN, "admin")):
                for headers in (bearer(key), {"x-api-key": key}):
                    status = await statuses(http, method, path, headers)
                    assert status != 401, (method, path, scope)
                    for_admins = path in FOR_ADMINS or path.startswith(("/admin/", "/ui/api/"))
                    for_admins |= (method, path) == ("POST", "/lora-adapters")
                    refused = (for_admins and scope == "user") or (method, path) in SWITCHED_OFF
                    assert (status == 403) == refused, (method, path, scope, status)


async def test_no_way_round_by_spelling(guarded: FastAPI) -> None:
    """A path that is spelt differently is another path, or none: never the same one, open."""
    async with connect(guarded) as http:
        for spelling in (
            "/metrics/", "//metrics", "/health/../metrics", "/METRICS", "/metrics%2f", "/%6detrics",
            "/metrics?x=/health", "/health/../v1/models", "/v1/../health/..%2fmetrics",
            "/ping/metrics", "/health%00/metrics", "/v1//models", "/health;/metrics", "/.",
            "/ui/../metrics", "/ui/api", "/ui/api/", "/ui/api/timeline",
            "/ui/api/promises/", "/ui/../ui/api/what-if", "/ui/api/what-if/", "/ui/api/WHAT-IF",
        ):  # fmt: skip
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "TRACE", "BREW"):
                answer = await http.request(method, spelling, follow_redirects=False)
                assert answer.status_code in (401, 404, 405), (method, spelling)
                as_user = await http.request(method, spelling, headers=bearer(USER))
                assert "vllm:" not in as_user.text, (method, spelling)


def test_the_sets_are_what_this_test_thinks() -> None:
    assert OPEN_PATHS == OPEN and ADMIN_PATHS == FOR_ADMINS and ADMIN_PREFIX == "/admin/"


@pytest.mark.parametrize("path", ["/admin/", "/admin/anything", "/admin/a/b"])
def test_what_changes_the_server_never_opens(path: str) -> None:
    """Without keys, when somebody forgot them, it is shut to everybody."""
    with pytest.raises(HttpError) as refused:
        KeyRing(()).check(path, {})
    assert refused.value.status == 403
    ring = KeyRing(KEYS)
    for key, status in ((None, 401), (USER, 403)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with pytest.raises(HttpError) as refused:
            ring.check(path, headers)
        assert refused.value.status == status
    found = ring.check(path, {"authorization": f"Bearer {ADMIN}"})
    assert found is not None and found.name == "root"


async def test_without_keys_no_route_changes_the_server(open_http: httpx.AsyncClient) -> None:
    answer = await open_http.post("/admin/anything", json={})
    assert answer.status_code == 403
    assert answer.json()["error"]["type"] == "PermissionDeniedError"


def test_keys_are_compared_whole_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always as many comparisons of as many bytes, whoever asks, and never by ``==``."""
    compared: list[tuple[int, int]] = []
    original = keys_module.hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", spy)
    ring = KeyRing(KEYS)
    for presented in (USER, OTHER, ADMIN, "", "x", USER[:-1], USER + "y", "z" * 100_000):
        compared.clear()
        try:
            ring.check("/v1/models", {"authorization": f"Bearer {presented}"})
        except HttpError:
            assert presented not in (USER, OTHER, ADMIN)
        assert compared == [(32, 32)] * len(KEYS), presented


async def test_keys_that_begin_alike_are_distinct() -> None:
    first, second = "k" * 40 + "1", "k" * 40 + "2"
    ring = KeyRing(
        (keys_module.ApiKey.of("one", "user", first), keys_module.ApiKey.of("two", "user", second))
    )
    for key, name in ((first, "one"), (second, "two")):
        found = ring.check("/v1/models", {"authorization": f"Bearer {key}"})
        assert found is not None and found.name == name


async def test_keys_are_in_no_answer_and_no_log(
    guarded: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(guarded) as http:
        with caplog.at_level("DEBUG"):
            for method, path in every_route(guarded):
                for key in (USER, ADMIN, "wrong-key-01234567"):
                    answer = await http.request(method, path, headers=bearer(key))
                    said = answer.text + str(answer.headers)
                    assert key not in said and KEYS[0].digest.hex() not in said, (method, path)
    assert USER not in caplog.text and ADMIN not in caplog.text
    assert "wrong-key-01234567" not in caplog.text
