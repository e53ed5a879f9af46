"""Bounds of JSON bodies, on every route that reads one, and of the settings themselves."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.local import LocalEngineClient
from paceline.errors import ConfigError, InvalidRequestError
from paceline.http.bounds import Bounds, check_json_depth, check_json_items
from paceline.http.keys import ApiKey
from paceline.http.rate_limits.rates import Rate
from paceline.server import ServerConfig, create_app
from paceline.server.batches.lines import read_lines
from paceline.server.transport.errors import OLLAMA_PREFIX
from tests.server.helpers import chat_body, connect

JSON = {"Content-Type": "application/json"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a,[{"\\', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('a,"', max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def entries(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return len(value) + sum(map(entries, value)) if isinstance(value, list) else 0


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(json_values, st.integers(0, 20))
def test_nothing_with_more_entries_passes(value: Any, limit: int) -> None:
    body = json.dumps({"a": value}).encode()
    try:
        check_json_items(body, limit)
    except InvalidRequestError:
        # a container of no entries costs as much as an entry
        assert entries({"a": value}) + body.count(b"[]") + body.count(b"{}") > limit
    else:
        assert entries({"a": value}) <= limit


@given(json_values, st.integers(1, 8))
def test_depth(value: Any, limit: int) -> None:
    wrapped = {"a": value}
    if depth(wrapped) <= limit:
        check_json_depth(wrapped, limit)
    else:
        with pytest.raises(InvalidRequestError, match=f"deeper than {limit}"):
            check_json_depth(wrapped, limit)


def test_commas_of_a_text_are_not_entries() -> None:
    body = json.dumps({"prompt": 'a, b, [c], {d}, "e", \\' * 10_000}).encode()
    check_json_items(body, 16)


def test_a_bomb_is_refused_before_it_is_parsed() -> None:
    body = b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}"
    tracemalloc.start()
    try:
        with pytest.raises(
            InvalidRequestError, match="about 4000003 entries in lists and objects, at most 500000"
        ):
            check_json_items(body, Bounds().max_json_items)
        # the lists alone would take 110 MB
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body", [b'"' * 1_000_000, b'{"a": "' + b"\\" * 1_000_001, b'["' * 300_000]
)
def test_broken_strings_take_linear_time(body: bytes) -> None:
    try:
        check_json_items(body + b"," * 100, 16)
    except InvalidRequestError as error:
        assert len(str(error)) < 200


def test_a_line_of_a_batch_is_bounded_like_a_body() -> None:
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": []}}
    bomb = json.dumps(body).replace("[]", "[" + "[]," * 300_000 + "[]]").encode()
    lines = [json.dumps(body).encode(), bomb]
    good, bad = read_lines(lines, ["/v1/completions"], bounds=Bounds())
    assert good.error is None
    assert bad.error is not None and "at most 500000" in bad.error


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_head_bytes": 1023}, "1024 to"),
        ({"max_headers": 7}, "got 7"),
        ({"max_connections": 0}, "got 0"),
        ({"max_json_depth": 65}, "1 to 64, got 65"),
        ({"max_json_items": 15}, "got 15"),
        ({"receive_timeout": -1.0}, "got -1.0"),
        ({"receive_timeout": float("nan")}, "got nan"),
    ],
)
def test_bad_bounds(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Bounds(**fields)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cors_origins": ("example.org",)}, "'example.org'"),
        ({"cors_origins": ("https://example.org/path",)}, "path"),
        ({"allowed_hosts": ("host:80",)}, "'host:80'"),
        ({"rate_limit_storage": "memory://"}, "'memory'"),
    ],
)
def test_bad_settings(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**fields)


def test_a_storage_may_be_for_the_limits_of_one_key_alone() -> None:
    storage = "redis://h:1/0"
    limited = ApiKey("a", "user", bytes(32), {"tokens": Rate(5, 10)})
    assert ServerConfig(api_keys=(limited,), rate_limit_storage=storage).rate_limit_storage
    free = ApiKey("a", "user", bytes(32), {"tokens": None})
    with pytest.raises(ConfigError, match="no rate of either"):
        ServerConfig(api_keys=(free,), rate_limit_storage=storage)


@pytest.fixture(scope="module")
async def tight(engine: LocalEngineClient) -> AsyncIterator[httpx.AsyncClient]:
    bounds = Bounds(max_json_depth=6, max_json_items=40)
    async with connect(create_app(engine, ServerConfig(bounds=bounds))) as http:
        yield http


async def test_every_route_that_reads_json_is_bounded(tight: httpx.AsyncClient) -> None:
    paths = (await tight.get("/openapi.json")).json()["paths"]
    reading = [
        path
        for path, methods in paths.items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    ]
    assert len(reading) >= 8
    for path in reading:
        for body, says in (
            (b'{"x": ' + b"[" * 6 + b"]" * 6 + b"}", "deeper than 6"),
            (json.dumps({"x": list(range(40))}).encode(), "at most 40"),
        ):
            answer = await tight.post(path, content=body, headers=JSON)
            # adapters are not loaded by requests here
            refused = path.endswith("_lora_adapter")
            assert answer.status_code == (403 if refused else 400), path
            if refused or path == "/lora-adapters":
                # the latter is a list of two numbers each, which bounds itself
                continue
            error = answer.json()["error"]
            assert says in (error if path.startswith(OLLAMA_PREFIX) else error["message"]), path
    fits = await tight.post("/v1/chat/completions", json=chat_body(max_tokens=1))
    assert fits.status_code == 200
