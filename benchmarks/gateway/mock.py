"""An engine that computes nothing: OpenAI's chat completions at once, or in chunks with gaps.

It does as little work per request as possible, so that the gateway before it is measured. Answers
look like a Paceline engine's, token ids included if requested.

    python -m benchmarks.gateway.mock GAP_SECONDS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httptools
import uvloop

_HEAD = {
    "id": "chatcmpl-mock",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "mock",
}
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_METRICS = (
    b"paceline:ready 1.0\nvllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
    b"vllm:kv_cache_usage_perc 0.0\n"
)


def _event(value: object) -> bytes:
    data = b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _chunk(delta: dict[str, Any], reason: str | None, ids: list[int] | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    if ids is not None:
        choice["token_ids"] = ids
    return _event({**_HEAD, "choices": [choice]})


_ROLE = _event({**_HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
_ROLE_IDS = _event(
    {
        **_HEAD,
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "prompt_token_ids": [1, 2, 3],
    }
)
_WORD = {ids: _chunk({"content": " word"}, None, [7] if ids else None) for ids in (False, True)}
_LAST = {ids: _chunk({"content": "."}, "stop", [8] if ids else None) for ids in (False, True)}
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_WHOLE = json.dumps(
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
).encode()
_MODELS = json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]}).encode()


class _Mock(asyncio.Protocol):
    gap = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._left = 0
        self._ids = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        if self._url == b"/v1/models":
            self._whole(_MODELS)
        elif self._url == b"/metrics":
            self._whole(_METRICS)
        elif self._url == b"/clock":
            self._whole(b"%d" % time.monotonic_ns())
        elif self._url.startswith(b"/health"):
            self._whole(b"{}")
        elif not body:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            asked = json.loads(body)
            if not asked.get("stream"):
                self._whole(_WHOLE)
                return
            self._ids = bool(asked.get("return_token_ids"))
            self._left = asked.get("max_tokens") or asked.get("max_completion_tokens") or 2
            self._transport.write(_STREAM + (_ROLE_IDS if self._ids else _ROLE))
            self._next()

    def _whole(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )

    def _next(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._transport.write(_WORD[self._ids])
            if self.gap:
                asyncio.get_running_loop().call_later(self.gap, self._next)
            else:
                self._next()
        elif not self._transport.is_closing():
            self._transport.write(_LAST[self._ids] + _DONE)


async def serve_mock(gap: float) -> tuple[asyncio.Server, int]:
    """Serve in the running event loop, ``gap`` seconds between chunks; return server and port."""
    _Mock.gap = gap
    server = await asyncio.get_running_loop().create_server(_Mock, "127.0.0.1", 0, backlog=2048)
    return server, server.sockets[0].getsockname()[1]


async def _serve(gap: float) -> None:
    server, port = await serve_mock(gap)
    print(f"mock ready: http://127.0.0.1:{port}/v1 ", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(float(sys.argv[1])))
