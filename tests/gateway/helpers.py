"""A gateway on a port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from paceline.gateway import EngineConfig, Gateway, GatewayConfig
from paceline.gateway.lifecycle import make_server
from paceline.gateway.streams.openai_stream import OpenAIStreamRelay, StreamRelay
from paceline.gateway.streams.passthrough_stream import PASSTHROUGH
from paceline.http.keys import ApiKey, KeyRing
from paceline.http.listening import bind
from paceline.web.gateway import answer as page
from tests.gateway.fault_server import Engine, Step, chat_chunks, scripted

__all__ = [
    "CHAT",
    "GOOD",
    "VLLM",
    "WHOLE",
    "WORDS",
    "chat",
    "configured",
    "gateway_over",
    "is_clean",
    "make_relay",
    "pieces",
    "prefer_others",
    "refused",
    "serving",
    "streamed",
    "text_of",
    "until",
]

CHAT = "/v1/chat/completions"
# a client without one reads the system's certificates, for each test anew
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
WORDS = ("Once", " upon", " a", " time", ".")
GOOD = Step(parts=chat_chunks(WORDS))
WHOLE = Step(
    parts=(b'{"id":"x","model":"m","choices":[{"index":0,"message":{"content":"hi"}}]}',),
    stream=False,
)
# of any API
ANY = Step(parts=(b'{"id":"x","choices":[],"output":[],"content":[],"data":[]}',), stream=False)
# metrics of such an engine
VLLM = (
    "vllm:num_requests_waiting 0.0\nvllm:num_requests_running 0.0\n"
    "vllm:kv_cache_usage_perc 0.9\nvllm:num_preemptions_total 0.0\n"
)


def make_relay(path: str, **openai: Any) -> StreamRelay:
    """The relay of a path; ``openai``: see ``OpenAIStreamRelay``."""
    return PASSTHROUGH[path]() if path in PASSTHROUGH else OpenAIStreamRelay(**openai)


def pieces(count: int, *, ids: bool = True, then: str = "cut") -> Step:
    """A stream that ends after ``count`` words."""
    return Step(parts=chat_chunks(WORDS, ids=ids)[: count + 1], then=then)


def refused(status: int, **headers: str) -> Step:
    body = json.dumps({"error": {"message": f"no: {status}"}}).encode()
    names = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Step(status=status, parts=(body,), headers=names, stream=False)


def configured(*engines: Engine, **fields: Any) -> GatewayConfig:
    """Engines named e1, e2, ... polled often; ``fields`` of the configuration."""
    kinds = fields.pop("kinds", {})
    extra = fields.pop("engine_fields", {})
    found = tuple(
        EngineConfig(
            name=f"e{number}",
            url=engine.url,
            kind=kinds.get(f"e{number}", "auto"),
            **extra.get(f"e{number}", {}),
        )
        for number, engine in enumerate(engines, 1)
    )
    defaults: dict[str, Any] = {"poll_interval": 0.05, "poll_timeout": 0.3, "liveness_timeout": 0.6}
    return GatewayConfig(engines=found, **(defaults | fields))


@asynccontextmanager
async def gateway_over(
    config: GatewayConfig, keys: tuple[ApiKey, ...] = ()
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    gateway = Gateway(config, KeyRing(keys), page=page)
    server = make_server(gateway)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    await gateway.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=NO_TLS) as client:
            yield gateway, client
    finally:
        server.stop()
        await serving
        await gateway.close()


@asynccontextmanager
async def serving(
    *scripts: Step | tuple[Step, ...],
    callers: tuple[ApiKey, ...] = (),
    metrics: str = "",
    **fields: Any,
) -> AsyncIterator[Any]:
    """Engines e1, e2, ... that play these scripts, a gateway over them, and a client of it.

    ``callers`` are those with keys, if any; ``metrics`` are those of each engine, ``fields`` those
    of the configuration.
    """
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for script in scripts:
            steps = (script,) if isinstance(script, Step) else script
            engines.append(await stack.enter_async_context(scripted(*steps, metrics=metrics)))
        over = gateway_over(configured(*engines, **fields), callers)
        yield *engines, *await stack.enter_async_context(over)


def prefer_others(gateway: Any, name: str) -> None:
    """Engine ``name`` looks busy."""
    gateway.upstreams.by_name[name].load.prefill_tokens += 1e6


def is_clean(gateway: Any) -> bool:
    """Nothing is counted as under way."""
    engines = gateway.upstreams.by_name.values()
    return gateway.in_flight == 0 and all(
        not e.running and not e.load.running and abs(e.load.prefill_tokens) < 1e-6 for e in engines
    )


async def until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def streamed(response: httpx.Response) -> list[Any]:
    """What events hold; "[DONE]" as it is, comments left out."""
    found: list[Any] = []
    for event in response.text.split("\n\n"):
        if event.startswith("data: "):
            data = event[6:]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(chunks: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        if chunk != "[DONE]"
        for choice in chunk.get("choices", ())
    )
