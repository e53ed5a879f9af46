"""The ``cohere`` package reading ranks, by both versions of its API."""

from __future__ import annotations

import cohere
from conversation import KEY, MODEL, UNKNOWN, URL, raises, run, step
from vectors_plain import TEXTS, ask

QUERY, DOCUMENTS = TEXTS[1], [TEXTS[0], TEXTS[2], "berlin is the capital"]


@step("rerank")
def ranks() -> None:
    expected = ask("/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
    for client in (cohere.ClientV2(KEY, base_url=URL), cohere.Client(KEY, base_url=URL)):
        answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
        assert [item.index for item in answer.results] == [item["index"] for item in expected]
        for item, other in zip(answer.results, expected, strict=True):
            assert abs(item.relevance_score - other["relevance_score"]) < 1e-6


@step("errors")
def errors() -> None:
    client = cohere.ClientV2(KEY, base_url=URL)
    raises(
        cohere.NotFoundError,
        lambda: client.rerank(model=UNKNOWN, query=QUERY, documents=DOCUMENTS),
        UNKNOWN,
    )


run()
