"""Malformed requests, which a server must refuse."""

from __future__ import annotations

import asyncio
import json
import random

__all__ = ["malformed", "send"]

_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize")
_BAD_FIELDS: tuple[dict[str, object], ...] = (
    {"max_tokens": -1},
    {"max_tokens": 10**30},
    {"max_tokens": "many"},
    {"temperature": -0.5},
    {"temperature": "hot"},
    {"top_p": 7},
    {"n": 0},
    {"n": 10**9},
    {"stop": [""]},
    {"logit_bias": {"x": 1}},
    {"prompt": [[10**12]]},
    {"prompt": {"a": 1}},
    {"prompt": None},
    {"messages": "hello"},
    {"messages": [{"role": "nobody", "content": 1}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
    {"structured_outputs": {"regex": "(("}},
    {"model": "no-such-model"},
    {"seed": 2**70},
    {"best_of": 4},
)


def malformed(count: int, rng: random.Random) -> list[bytes]:
    """Return ``count`` requests as bytes, of a dozen kinds in equal shares."""
    kinds = (
        _bad_json, _bad_utf8, _not_an_object, _bad_field, _bad_field, _deep, _wrong_method,
        _unknown_path, _wrong_type, _bad_length, _garbage, _bad_chunk, _long_header,
    )  # fmt: skip
    return [kinds[index % len(kinds)](rng) for index in range(count)]


async def send(port: int, request: bytes) -> str:
    """Send a request; return its status, or the way the connection ended without one. An incomplete
    request keeps the connection for a second at most."""
    writer = None
    try:
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            if writer.can_write_eof():
                writer.write_eof()
            line = await reader.readline()
        return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
    except TimeoutError:
        return "no answer within 5 s"
    except (OSError, IndexError, ValueError):
        return "closed"
    finally:
        if writer is not None:
            writer.close()


def _post(path: str, body: bytes, headers: str = "Content-Type: application/json\r\n") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _bad_json(rng: random.Random) -> bytes:
    whole = json.dumps({"prompt": "x" * rng.randrange(50), "max_tokens": 3}).encode()
    return _post(rng.choice(_PATHS), whole[: rng.randrange(len(whole))])


def _bad_utf8(rng: random.Random) -> bytes:
    return _post(rng.choice(_PATHS), b'{"prompt": "\xff\xfe' + rng.randbytes(8) + b'"}')


def _not_an_object(rng: random.Random) -> bytes:
    return _post(rng.choice(_PATHS), rng.choice((b"[]", b"7", b"null", b'"x"', b"NaN", b"")))


def _bad_field(rng: random.Random) -> bytes:
    field = rng.choice(_BAD_FIELDS)
    body: dict[str, object] = {"prompt": "x", "max_tokens": 1}
    path = "/v1/completions"
    if "messages" in field:
        body, path = {"max_tokens": 1}, "/v1/chat/completions"
    return _post(path, json.dumps({**body, **field}).encode())


def _deep(rng: random.Random) -> bytes:
    depth = rng.randrange(500, 20_000)
    return _post(rng.choice(_PATHS), b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")


def _wrong_method(rng: random.Random) -> bytes:
    method = rng.choice(("PUT", "DELETE", "PATCH", "GET"))
    return (
        f"{method} {rng.choice(_PATHS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    )


def _unknown_path(rng: random.Random) -> bytes:
    path = "/" + "".join(rng.choice("abc/%2e.") for _ in range(rng.randrange(1, 60)))
    return _post(path, b"{}")


def _wrong_type(rng: random.Random) -> bytes:
    kind = rng.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
    return _post(rng.choice(_PATHS), b'{"prompt": "x"}', f"Content-Type: {kind}\r\n")


def _bad_length(rng: random.Random) -> bytes:
    length = rng.choice(("-1", "1e3", "0x10", "99999999999999999999", "10, 10", " "))
    head = f"POST {rng.choice(_PATHS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{{}}".encode()


def _garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n"


def _bad_chunk(rng: random.Random) -> bytes:
    head = f"POST {rng.choice(_PATHS)} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    size = rng.choice(("zz", "-5", "fffffffffffffffff", "5;", "4\r\nabcdef"))
    return f"{head}Transfer-Encoding: chunked\r\n\r\n{size}\r\nhello\r\n0\r\n\r\n".encode()


def _long_header(rng: random.Random) -> bytes:
    value = "x" * rng.randrange(300_000, 400_000)
    return f"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: {value}\r\n\r\n".encode()
