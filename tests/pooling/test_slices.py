"""Large requests are worked on in slices, off the event loop, and refused before they are."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from paceline.engine.testing import ByteTokenizer
from paceline.errors import NeverFitsError
from paceline.server.apis.pooling.responses import (
    Embedding,
    EmbeddingAnswer,
    VectorUsage,
    as_base64,
    as_floats,
)
from paceline.server.apis.pooling.running import cosines, encode_list, length_check
from paceline.server.generation.prompts import PromptMaker, slices
from paceline.server.protocol.requests import TemplateOptions


def test_slices_hold_as_much_as_they_may() -> None:
    assert list(slices([3, 3, 3, 9, 1], 6)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(slices([9], 6)) == [(0, 1)] and not list(slices([], 6))


@pytest.mark.parametrize("shown", [as_floats, as_base64])
async def test_vectors_are_written_in_slices_on_a_thread(shown: object) -> None:
    vectors = [row.tobytes() for row in np.random.default_rng(0).random((96, 512), np.float32)]
    answer = EmbeddingAnswer(
        id='a "data":[] b', created=1, model="m", data=[], usage=VectorUsage.of(3)
    )
    seen: list[int] = []
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def item(index: int) -> Embedding:
        seen.append(threading.get_ident())
        assert callable(shown)
        return Embedding(index=index, embedding=shown(vectors[index]))

    beside = asyncio.create_task(others())
    body = await encode_list(answer, "data", item, [512] * len(vectors))
    beside.cancel()
    whole = msgspec.structs.replace(answer, data=[item(i) for i in range(len(vectors))])
    assert json.loads(body) == json.loads(msgspec.json.encode(whole))
    assert threading.get_ident() not in seen[: len(vectors)]
    # 32 vectors a slice: the loop has its turns between them
    assert turns > 3


async def test_what_is_small_is_written_on_the_spot() -> None:
    seen: list[int] = []
    answer = EmbeddingAnswer(id="a", created=1, model="m", data=[], usage=VectorUsage.of(1))

    def item(index: int) -> Embedding:
        seen.append(threading.get_ident())
        return Embedding(index=index, embedding=[0.5])

    body = await encode_list(answer, "data", item, [1])
    assert json.loads(body)["data"] == [{"index": 0, "object": "embedding", "embedding": [0.5]}]
    assert seen == [threading.get_ident()]


async def test_cosines_of_many_pairs() -> None:
    rows = np.random.default_rng(1).standard_normal((301, 600)).astype(np.float32)
    rows[7] = 0
    pairs = [(0, place) for place in range(1, 301)]
    found = await cosines([row.tobytes() for row in rows], pairs)
    x = rows.astype(np.float64)
    norms = np.linalg.norm(x, axis=1)
    norms[7] = np.inf
    assert np.allclose(found, x[1:] @ x[0] / norms[1:] / norms[0], rtol=1e-12, atol=1e-15)
    assert found[6] == 0.0


class Counting(ByteTokenizer):
    """Remembers what it was asked, and on which threads."""

    def __init__(self) -> None:
        self.num_texts = 0
        self.threads: set[int] = set()
        self.largest = 0

    def encode_texts(
        self,
        texts: Sequence[tuple[str, str | None]],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        max_second: int | None = None,
    ) -> list[tuple[list[int], int | None]]:
        self.num_texts += len(texts)
        self.threads.add(threading.get_ident())
        self.largest = max(self.largest, sum(len(first) for first, _ in texts))
        return super().encode_texts(
            texts,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            max_second=max_second,
        )


async def test_texts_are_encoded_in_slices_off_the_loop() -> None:
    tokenizer = Counting()
    prompts = PromptMaker(tokenizer)
    texts: list[tuple[str, str | None]] = [(f"{i} " + "x" * 1000, None) for i in range(300)]
    found = await prompts.texts(texts, add_special_tokens=True)
    assert found == ByteTokenizer().encode_texts(texts)
    assert tokenizer.num_texts == 300 and tokenizer.largest <= 1 << 16
    assert threading.get_ident() not in tokenizer.threads
    prompts.close()


async def test_what_comes_behind_a_text_that_is_too_long_is_not_encoded() -> None:
    tokenizer = Counting()
    prompts = PromptMaker(tokenizer)
    texts: list[tuple[str, str | None]] = [("x" * 1000, None)] * 1000
    texts[1] = ("x" * 3000, None)
    with pytest.raises(NeverFitsError, match=r"2000 tokens, and input\[1\] has 3001") as raised:
        await prompts.texts(
            texts, add_special_tokens=True, check=length_check(2000, "input[{}]".format)
        )
    assert raised.value.param == "input[1]"
    assert tokenizer.num_texts < 100
    prompts.close()


async def test_many_conversations_leave_the_loop_its_turns() -> None:
    prompts = PromptMaker(ByteTokenizer())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    one = TemplateOptions(
        messages=[{"role": "user", "content": "x" * 1000}],
        add_generation_prompt=True,
        continue_final_message=False,
        chat_template=None,
        template_kwargs={},
        tools=None,
    )
    found = await prompts.render_all([one] * 100)
    beside.cancel()
    assert found == [await prompts.render(one)] * 100
    assert turns > 10
    prompts.close()


def test_a_server_that_generates_starts_without_them() -> None:
    code = (
        "import sys\n"
        "import paceline.cli.serve.command\n"
        "from paceline.backends.reference.null import NullBackend\n"
        "from paceline.engine.testing import null_client\n"
        "from paceline.server import ServerConfig, create_app\n"
        "create_app(null_client(NullBackend()), ServerConfig())\n"
        "print([m for m in sys.modules if m.startswith(('paceline.server.apis.pooling.',"
        "'paceline.server.openapi')) and not m.endswith('.routes')])\n"
        "import os; sys.stdout.flush(); os._exit(0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
