"""The ``openai`` package reading embeddings, which it asks for in base64."""

from __future__ import annotations

import openai
from conversation import KEY, MODEL, URL, raises, run, step
from vectors_plain import TEXTS, check

FIELDS = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}


@step("embeddings")
def texts() -> None:
    with openai.OpenAI(**FIELDS) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)
        check([item.embedding for item in answer.data])
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
        plain = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        check([item.embedding for item in plain.data])
        ids = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]])
        assert [item.index for item in ids.data] == [0, 1]


@step("async")
async def later() -> None:
    async with openai.AsyncOpenAI(**FIELDS) as client:
        answer = await client.embeddings.create(model=MODEL, input=TEXTS)
        check([item.embedding for item in answer.data])


@step("errors")
def errors() -> None:
    with openai.OpenAI(**FIELDS) as client:
        raises(
            openai.BadRequestError,
            lambda: client.embeddings.create(model=MODEL, input=TEXTS, dimensions=8),
            "matryoshka",
        )
        raises(
            openai.BadRequestError,
            lambda: client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}]
            ),
        )


run()
