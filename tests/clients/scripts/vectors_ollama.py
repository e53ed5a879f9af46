"""The ``ollama`` package reading embeddings."""

from __future__ import annotations

import ollama
from conversation import KEY, MODEL, URL, raises, run, step
from vectors_plain import TEXTS, check

HEADERS = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=HEADERS)


@step("embeddings")
def texts() -> None:
    answer = client.embed(model=MODEL, input=TEXTS)
    check([list(vector) for vector in answer.embeddings])
    assert answer.prompt_eval_count > len(TEXTS) and answer.total_duration > 0
    (one,) = client.embed(model=f"{MODEL}:latest", input=TEXTS[0]).embeddings
    assert list(one) == list(answer.embeddings[0])
    # the older call gives a vector of another length
    older = client.embeddings(model=MODEL, prompt=TEXTS[0]).embedding
    size = sum(value * value for value in older) ** 0.5
    assert max(abs(a / size - b) for a, b in zip(older, one, strict=True)) < 1e-6


@step("async")
async def later() -> None:
    answer = await ollama.AsyncClient(host=URL, headers=HEADERS).embed(model=MODEL, input=TEXTS)
    check([list(vector) for vector in answer.embeddings])


@step("errors")
def errors() -> None:
    raises(
        ollama.ResponseError,
        lambda: client.embed(model=MODEL, input=TEXTS, dimensions=8),
        "matryoshka",
    )
    raises(ollama.ResponseError, lambda: client.embed(model="other", input=TEXTS))


run()
