"""An engine that does what a script says: answers, and the ways in which one goes wrong.

A script is a list of steps, one for each request in turn; the last one stays. Requests that came
are kept, body and headers.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Engine", "Step", "chat_chunks", "scripted"]


@dataclass(frozen=True)
class Step:
    """What becomes of one request."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    # the body, sent in these parts
    parts: tuple[bytes, ...] = ()
    stream: bool = True
    # seconds before the head, and between parts
    delay: float = 0.0
    gap: float = 0.0
    # after the parts: "end" as HTTP says, "cut" the connection, "stall" for ever
    then: str = "end"
    # raw bytes instead of an answer
    raw: bytes | None = None
    # and behind a stream, in the same write as its end
    behind: bytes = b""


@dataclass
class Engine:
    port: int = 0
    script: list[Step] = field(default_factory=list)
    # of requests for generation
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    # requests whose caller hung up
    hung_up: int = 0
    metrics: str = ""
    models: tuple[str, ...] = ("m",)
    max_model_len: int | None = None
    # what other paths say, for a body as they say; those that an engine is asked what it can do by
    # are 404 without
    pages: Mapping[str, Any] = field(default_factory=dict)
    # of those, which were
    asked: list[str] = field(default_factory=list)
    # answers nothing at all, polls neither
    frozen: bool = False
    # closes each connection after an answer that does not say so
    closes: bool = False
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


PACELINE_METRICS = (
    "paceline:ready 1.0\nvllm:num_requests_waiting 0.0\nvllm:num_requests_running 0.0\n"
    "vllm:kv_cache_usage_perc 0.1\npaceline:memory_pressure_level 0.0\n"
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
)


def chat_chunks(
    words: Sequence[str],
    *,
    ids: bool = True,
    reason: str | None = "stop",
    first_id: int = 0,
    usage: bool = True,
    done: bool = True,
    created: int = 1,
) -> tuple[bytes, ...]:
    """A chat's events: a role, a word a token, an end, counts."""
    head = {"id": f"chat-{created}", "created": created, "model": "m"}

    def event(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\n\n"

    prompt = {"prompt_token_ids": [1, 2, 3]} if ids else {}
    found = [event([{"index": 0, "delta": {"role": "assistant", "content": ""}}], **prompt)]
    for number, word in enumerate(words):
        last = number == len(words) - 1
        choice = {
            "index": 0,
            "delta": {"content": word},
            "finish_reason": reason if last else None,
            **({"token_ids": [first_id + number]} if ids else {}),
        }
        found.append(event([choice]))
    if usage and reason is not None:
        total = first_id + len(words)
        counts = {"prompt_tokens": 3, "completion_tokens": total, "total_tokens": 3 + total}
        found.append(event([], usage=counts))
    if done and reason is not None:
        found.append(b"data: [DONE]\n\n")
    return tuple(found)


# beside those that are GET
_PROBED = frozenset({"/tokenize", "/apply-template", "/api/show"})


@asynccontextmanager
async def scripted(*script: Step, **fields: Any) -> AsyncIterator[Engine]:
    engine = Engine(script=list(script), **fields)
    open_writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        try:
            while await _one(engine, reader, writer) and not engine.closes:
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            engine.hung_up += 1
        finally:
            open_writers.discard(writer)
            writer.close()

    server = await asyncio.start_server(serve, engine.host, engine.port)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for writer in list(open_writers):
            writer.transport.abort()


async def _one(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer a request; whether the connection goes on."""
    line = await reader.readline()
    if not line:
        return False
    path = line.split()[1].decode()
    headers: dict[str, str] = {}
    while (entry := (await reader.readline()).strip()) != b"":
        name, _, value = entry.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    while engine.frozen:
        await asyncio.sleep(0.02)
    if path == "/metrics" and path not in engine.pages:
        status = 200 if engine.metrics else 404
        await _send(writer, status, (), (engine.metrics.encode(),), stream=False)
        return True
    if path in engine.pages:
        page = engine.pages[path]
        engine.asked.append(path)
        told = page(json.loads(body or b"{}")) if callable(page) else page
        told = await told if inspect.isawaitable(told) else told
        status, told = told if isinstance(told, tuple) else (200, told)
        await _send(writer, status, (), (json.dumps(told).encode(),), stream=False)
        return True
    if path == "/v1/models":
        entries = [{"id": name, "max_model_len": engine.max_model_len} for name in engine.models]
        await _send(writer, 200, (), (json.dumps({"data": entries}).encode(),), stream=False)
        return True
    if line.startswith(b"GET") or path in _PROBED:
        engine.asked.append(path)
        await _send(writer, 404, (), (b'{"detail": "Not Found"}',), stream=False)
        return True
    engine.bodies.append(json.loads(body))
    engine.headers.append(headers)
    engine.paths.append(path)
    step = engine.script.pop(0) if len(engine.script) > 1 else engine.script[0]
    await asyncio.sleep(step.delay)
    if step.raw is not None:
        writer.write(step.raw)
        await writer.drain()
        return False
    await _send(
        writer, step.status, step.headers, step.parts, stream=step.stream, gap=step.gap,
        ends=step.then == "end", behind=step.behind,
    )  # fmt: skip
    if step.then == "stall":
        # until the gateway hangs up
        if not await reader.read(1):
            engine.hung_up += 1
        return False
    return step.then == "end"


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    headers: Sequence[tuple[str, str]],
    parts: Sequence[bytes],
    *,
    stream: bool,
    gap: float = 0.0,
    ends: bool = True,
    behind: bytes = b"",
) -> None:
    kind = "text/event-stream" if stream and status == 200 else "application/json"
    head = [f"HTTP/1.1 {status} X", f"content-type: {kind}"]
    head += [f"{name}: {value}" for name, value in headers]
    if stream:
        head.append("transfer-encoding: chunked")
    else:
        head.append(f"content-length: {sum(map(len, parts)) + (0 if ends else 10)}")
    writer.write("\r\n".join([*head, "", ""]).encode())
    for part in parts:
        if part:
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if stream else part)
            await writer.drain()
        if gap:
            await asyncio.sleep(gap)
    if stream and ends:
        writer.write(b"0\r\n\r\n" + behind)
    await writer.drain()
