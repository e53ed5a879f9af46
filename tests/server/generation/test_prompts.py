"""Texts become prompts: short ones on the spot, others together and off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.server.app import create_app
from paceline.server.settings.config import ServerConfig
from tests.server.helpers import VOCAB, chat_body, connect

LONG = "x" * 5000
MOST = 50


class Noting(ByteTokenizer):
    """Notes what is asked of it, and on which thread; of each text it knows the first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.alone = 0
        self.threads: set[str] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.alone += 1
        self.threads.add(threading.current_thread().name)
        return self._first(text, add_special_tokens)

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        self.batches.append(len(texts))
        self.threads.add(threading.current_thread().name)
        return [self._first(text, add_special_tokens) for text in texts]

    def _first(self, text: str, add_special_tokens: bool) -> list[int]:
        return super().encode(text, add_special_tokens=add_special_tokens)[:MOST]


@pytest.fixture
def tokenizer() -> Noting:
    return Noting()


@pytest.fixture
async def http(anyio_backend: str, tokenizer: Noting) -> AsyncIterator[httpx.AsyncClient]:
    client = null_client(NullBackend(vocab_size=VOCAB), tokenizer=tokenizer)
    async with connect(create_app(client, ServerConfig())) as http:
        # what a server asks of its tokenizer to begin with
        tokenizer.alone = 0
        tokenizer.threads.clear()
        yield http
    await client.close()


async def complete(http: httpx.AsyncClient, prompt: str | list[str] | list[int]) -> int:
    answer = await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


async def test_a_short_prompt_is_encoded_on_the_spot(
    http: httpx.AsyncClient, tokenizer: Noting
) -> None:
    assert await complete(http, "hello") == 6
    await http.post("/v1/chat/completions", json=chat_body("hi", max_tokens=1))
    assert tokenizer.alone == 2 and not tokenizer.batches
    assert tokenizer.threads == {threading.current_thread().name}


async def test_prompts_of_one_body_are_encoded_together_elsewhere(
    http: httpx.AsyncClient, tokenizer: Noting
) -> None:
    assert await complete(http, [LONG, "a", "bc"]) == MOST + 2 + 3
    assert tokenizer.batches == [3] and not tokenizer.alone
    # each of these is short; all of them are not
    assert await complete(http, ["a"] * 100) == 200
    assert tokenizer.batches == [3, 100] and not tokenizer.alone
    assert threading.current_thread().name not in tokenizer.threads


async def test_requests_that_come_together_are_encoded_together(
    http: httpx.AsyncClient, tokenizer: Noting
) -> None:
    asked = [complete(http, LONG) for _ in range(20)]
    assert await asyncio.gather(*asked) == [MOST] * 20
    assert sum(tokenizer.batches) == 20 and len(tokenizer.batches) < 20


async def test_a_long_conversation_is_encoded_elsewhere(
    http: httpx.AsyncClient, tokenizer: Noting
) -> None:
    answer = await http.post("/v1/chat/completions", json=chat_body(LONG, max_tokens=1))
    assert answer.status_code == 200 and tokenizer.batches == [1] and not tokenizer.alone
    assert threading.current_thread().name not in tokenizer.threads


async def test_ids_are_taken_as_they_are_beside_texts(
    http: httpx.AsyncClient, tokenizer: Noting
) -> None:
    assert await complete(http, [1, 2, 3]) == 3
    assert not tokenizer.alone and not tokenizer.batches
