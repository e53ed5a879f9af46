"""What ``make test-upstreams`` asks of other servers, before servers that do otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.fault_server import Step, chat_chunks, scripted
from tests.gateway.helpers import CHAT, WHOLE, WORDS, pieces, refused
from tests.upstreams.checks import MESSAGES, CheckFailedError, Pair, dies, hang_up, streamed

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


LONG = chat_chunks(WORDS * 3, ids=False, reason="length")


@asynccontextmanager
async def counting(*steps: int) -> AsyncIterator[Pair]:
    """Servers of which the first has computed so many steps before a stream was asked for, behind
    the first stream, and behind the one whose caller hangs up."""
    counts = "llamacpp:requests_deferred 0\nllamacpp:requests_processing 0\n"
    left = Step(parts=LONG[:-3], then="stall")
    script = (WHOLE, Step(parts=LONG), WHOLE, left, WHOLE)
    stays: Any = _Stays()

    async def count() -> None:
        while True:
            asked = sum(bool(body.get("stream")) for body in one.bodies)
            one.metrics = f"{counts}llamacpp:n_decode_total {steps[asked]}\n"
            await asyncio.sleep(0.001)

    async with scripted(*script, metrics=counts) as one, scripted(WHOLE, metrics=counts) as two:
        counts_on = asyncio.ensure_future(count())
        try:
            yield Pair("llama.cpp", stays, stays, (one.port, two.port), "m")
        finally:
            counts_on.cancel()


async def test_a_server_that_works_on_without_a_caller_is_told() -> None:
    async with counting(3, 103, 121) as servers:
        assert await hang_up(servers, 0.0) == "the server stops"
    async with counting(3, 103, 203) as servers:
        with pytest.raises(CheckFailedError, match="100 steps without a caller, 100 with one"):
            await hang_up(servers, 0.0)
    async with counting(3, 33, 41) as servers:
        with pytest.raises(CheckFailedError, match=r"30 steps in .* is too short to tell"):
            await hang_up(servers, 0.0)


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
