"""What ``make test-upstreams`` asks of other servers, before servers that do otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.fault_server import Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, WORDS, pieces, refused
from tests.upstreams.checks import MESSAGES, CheckFailedError, Pair, dies, streamed

pytestmark = pytest.mark.anyio

ALL = Step(parts=chat_chunks(WORDS, ids=False, reason="length"))
REST = Step(parts=chat_chunks(WORDS[2:], ids=False, reason="length"))
CUT = pieces(2, ids=False)
SAID = Step(
    parts=(
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","delta":{"text":"a"}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    )
)


class _Stays:
    """In place of a server's process, which nothing happens to: its script ends the stream."""

    pid = 0

    def freeze(self) -> None:
        return

    thaw = freeze


@asynccontextmanager
async def pair(first: tuple[Step, ...], second: tuple[Step, ...]) -> AsyncIterator[Pair]:
    fields: dict[str, Any] = {
        "metrics": "llamacpp:requests_deferred 0\n",
        "pages": {"/props": {"default_generation_settings": {"n_ctx": 4096}}},
    }
    stays: Any = _Stays()
    async with scripted(*first, **fields) as one, scripted(*second, **fields) as two:
        yield Pair("llama.cpp", stays, stays, (one.port, two.port), "m")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_server_that_answers_with_another_status_is_told(path: str) -> None:
    for status in (404, 500):
        async with pair((refused(status),), (refused(status),)) as servers:
            with pytest.raises(CheckFailedError, match=f"status {status}"):
                await streamed(path)(servers)
            with pytest.raises(CheckFailedError, match=f"status {status}"):
                await dies(path, by_text=True)(servers)


async def test_a_stream_that_goes_on_must() -> None:
    async with pair((CUT,), (ALL, REST)) as servers:
        assert await dies(CHAT, by_text=True)(servers) == "goes on behind text (the same text)"
    async with pair((CUT,), (ALL, refused(400))) as servers:
        with pytest.raises(CheckFailedError, match="an error where it goes on"):
            await dies(CHAT, by_text=True)(servers)


async def test_an_error_must_say_so() -> None:
    async with pair((CUT,), (ALL,)) as servers:
        assert await dies(CHAT, by_text=False)(servers) == "an error that says so"
    cut = Step(parts=SAID.parts[:1], then="cut")
    async with pair((cut,), (SAID,)) as servers:
        assert await dies(MESSAGES, by_text=True)(servers) == "an error that says so"
    # where the server itself had ended it there is nothing to see
    async with pair((SAID,), (SAID,)) as servers:
        with pytest.raises(CheckFailedError, match="it ends as if done"):
            await dies(MESSAGES, by_text=True)(servers)
