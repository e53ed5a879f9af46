"""The answers of vLLM's server that the live part of its benchmark reads, without a model.

python -m tests.benchmarks.vllm_server PORT [FLAG ...]
"""

from __future__ import annotations

import asyncio
import json
import sys

_METRICS = b"""paceline:steps_total{engine="0"} 8
paceline:vllm_amended_steps_total{engine="0"} 2
paceline:step_seconds_total{engine="0",kind="predicted"} 4
paceline:step_seconds_total{engine="0",kind="actual"} 5
"""


def _events(tokens: int) -> bytes:
    events = [{"choices": [{"text": "a"}]}] * tokens
    last = {"choices": [], "usage": {"completion_tokens": tokens}}
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in (*events, last))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    path = head.split()[1]
    body = b'{"data": [{"id": "m"}]}' if path == "/v1/models" else _METRICS
    if path == "/v1/completions":
        length = int(head.partition("content-length: ")[2].split()[0])
        asked = json.loads(await reader.readexactly(length))
        await asyncio.sleep(0.01)
        # an answer that depends on the prompt alone
        whole = {"choices": [{"token_ids": asked["prompt"][:2]}]}
        body = _events(asked["max_tokens"]) if "stream" in asked else json.dumps(whole).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


async def _main() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    if "1024" in sys.argv:
        sys.exit("it has no room for 1,024 tokens a step")
    asyncio.run(_main())
