"""``OpenAIEmbeddings`` of ``langchain-openai``."""

from __future__ import annotations

import openai
from conversation import KEY, MODEL, UNKNOWN, URL, raises, run, step
from langchain_openai import OpenAIEmbeddings
from vectors_plain import TEXTS, check


def model(name: str = MODEL) -> OpenAIEmbeddings:
    # otherwise it sends ids of OpenAI's own tokenizer
    return OpenAIEmbeddings(
        model=name, base_url=f"{URL}/v1", api_key=KEY, max_retries=0,
        check_embedding_ctx_length=False,
    )  # fmt: skip


@step("embeddings")
def texts() -> None:
    check(model().embed_documents(TEXTS))
    one = model().embed_query(TEXTS[0])
    check([one, *model().embed_documents(TEXTS[1:])])


@step("async")
async def later() -> None:
    check(await model().aembed_documents(TEXTS))


@step("errors")
def errors() -> None:
    raises(openai.NotFoundError, lambda: model(UNKNOWN).embed_query("x"), UNKNOWN)


run()
