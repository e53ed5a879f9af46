"""The endpoints, from the parsed request to the bytes of the answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import mul
from typing import Any, Final, TypeAlias, TypeVar

from paceline.core.pooling import CLASSIFY, PoolingInfo
from paceline.server.bodies.protocol import RequestRules, TemplateOptions
from paceline.server.bodies.wire import encode
from paceline.server.openai.answers import AnswerHead
from paceline.server.pooling.answers import (
    ClassAnswer,
    ClassData,
    Embedding,
    EmbeddingAnswer,
    PooledData,
    PoolingAnswer,
    RankedDocument,
    RerankAnswer,
    ScoreAnswer,
    ScoreData,
    VectorUsage,
    as_base64,
    as_floats,
)
from paceline.server.pooling.bodies import (
    RerankRequest,
    ScoreRequest,
    VectorRequest,
    parse_classify,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from paceline.server.pooling.running import Vectors, encoded_inputs, run_vectors
from paceline.server.service import Service

__all__ = ["ENDPOINTS"]

_P = TypeVar("_P")
# values, rules, tenant, how the model is pooled
Parse: TypeAlias = Callable[[dict[str, Any], RequestRules, str, PoolingInfo | None], _P]
# service, request, request id, arrival -> JSON
Answer: TypeAlias = Callable[[Service, _P, str, float], Awaitable[bytes]]

# Qwen3-Reranker's prompt, as its model card has it
_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION: Final = (
    "Given a web search query, retrieve relevant passages that answer the query"
)


async def embeddings_answer(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer of ``/v1/embeddings``."""
    head, vectors = await _vectors(service, request, "embd", request_id, arrival)
    return encode(
        EmbeddingAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            data=[
                Embedding(index=i, embedding=as_base64(v) if request.base64 else as_floats(v))
                for i, v in enumerate(vectors.values)
            ],
            usage=VectorUsage.of(vectors.num_prompt_tokens),
        )
    )


async def pooling_answer(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer of ``/pooling``."""
    head, vectors = await _vectors(service, request, "pool", request_id, arrival)
    return encode(
        PoolingAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            data=[
                PooledData(index=i, data=as_base64(v) if request.base64 else as_floats(v))
                for i, v in enumerate(vectors.values)
            ],
            usage=VectorUsage.of(vectors.num_prompt_tokens),
        )
    )


async def classify_answer(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer of ``/classify``."""
    head, vectors = await _vectors(service, request, "classify", request_id, arrival)
    labels = _info(service).labels

    def one(index: int, vector: bytes) -> ClassData:
        values = as_floats(vector)
        best = max(range(len(values)), key=values.__getitem__)
        return ClassData(index=index, label=labels[best], probs=values, num_classes=len(values))

    return encode(
        ClassAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            data=[one(index, vector) for index, vector in enumerate(vectors.values)],
            usage=VectorUsage.of(vectors.num_prompt_tokens),
        )
    )


async def score_answer(
    service: Service, request: ScoreRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer of ``/score``."""
    head = AnswerHead.of("score", request_id, service)
    scores, num_tokens = await _scores(service, request, head, arrival)
    return encode(
        ScoreAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            data=[ScoreData(index=index, score=score) for index, score in enumerate(scores)],
            usage=VectorUsage.of(num_tokens),
        )
    )


async def rerank_answer(
    service: Service, request: RerankRequest, request_id: str, arrival: float
) -> bytes:
    """The body of an answer of ``/rerank``; documents of one score keep their order."""
    head = AnswerHead.of("rerank", request_id, service)
    scores, num_tokens = await _scores(service, request.score, head, arrival)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return encode(
        RerankAnswer(
            id=head.id,
            model=head.model,
            usage=VectorUsage.of(num_tokens),
            results=[
                RankedDocument(
                    index=index,
                    document={"text": request.documents[index]}
                    if request.return_documents
                    else None,
                    relevance_score=scores[index],
                )
                for index in order[: request.top_n]
            ],
        )
    )


# how a body of each is parsed, and how it is answered
ENDPOINTS: Final[Mapping[str, tuple[Parse[Any], Answer[Any]]]] = {
    "classify": (parse_classify, classify_answer),
    "embeddings": (parse_embeddings, embeddings_answer),
    "pooling": (parse_pooling, pooling_answer),
    "rerank": (parse_rerank, rerank_answer),
    "score": (parse_score, score_answer),
}


def _info(service: Service) -> PoolingInfo:
    info = service.client.info.pooling
    assert info is not None, "the body was parsed for a model that is pooled"
    return info


async def _vectors(
    service: Service, request: VectorRequest, prefix: str, request_id: str, arrival: float
) -> tuple[AnswerHead, Vectors]:
    head = AnswerHead.of(prefix, request_id, service)
    prompts = await encoded_inputs(service, request.inputs, request.options)
    return head, await run_vectors(service, prompts, request.options, head, arrival)


async def _scores(
    service: Service, request: ScoreRequest, head: AnswerHead, arrival: float
) -> tuple[list[float], int]:
    """The score of each pair, and the tokens of all prompts: by the model's head, or of embeddings
    the cosine of the angle between them."""
    info = _info(service)
    if info.task == CLASSIFY:
        prompts = await _pair_prompts(service, request, info)
        vectors = await run_vectors(
            service,
            prompts,
            request.options,
            head,
            arrival,
            # what a template ends with decides, so of its prompts documents alone may be cut
            cut_by="max_tokens_per_doc" if info.score_template else "truncate_prompt_tokens=-1",
        )
        return [as_floats(vector)[0] for vector in vectors.values], vectors.num_prompt_tokens
    # each text once, however many pairs it is in
    texts = _prompted(request, info)
    places = {text: place for place, text in enumerate(dict.fromkeys(t for p in texts for t in p))}
    prompts = await encoded_inputs(service, list(places), request.options)
    vectors = await run_vectors(service, prompts, request.options, head, arrival)
    found = [as_floats(vector) for vector in vectors.values]
    scores = [_cosine(found[places[first]], found[places[second]]) for first, second in texts]
    return scores, vectors.num_prompt_tokens


def _prompted(request: ScoreRequest, info: PoolingInfo) -> list[tuple[str, str]]:
    """The pairs with what the model's files put before a query and a document, if they do."""
    prompts = dict(info.prompts)
    usual = prompts.get(info.default_prompt or "", "")
    query = prompts.get("query", usual)
    document = prompts.get("document", prompts.get("passage", usual))
    return [(query + first, document + second) for first, second in request.pairs]


async def _pair_prompts(
    service: Service, request: ScoreRequest, info: PoolingInfo
) -> list[tuple[list[int], int | None]]:
    options = request.options
    if info.score_template is None:
        texts = [(a.lower(), b.lower()) if info.lower_case else (a, b) for a, b in request.pairs]
        return await service.prompts.texts(
            texts,
            add_special_tokens=options.add_special_tokens,
            max_tokens=options.max_tokens,
            max_second=request.max_second,
        )
    rendered = [
        await _rendered(service, request, info, query, document)
        for query, document in request.pairs
    ]
    return await service.prompts.texts(
        [(text, None) for text in rendered],
        add_special_tokens=False,
        max_tokens=None,
        max_second=None,
    )


async def _rendered(
    service: Service, request: ScoreRequest, info: PoolingInfo, query: str, document: str
) -> str:
    if request.max_second is not None:
        ids = await service.prompts.encode(document, add_special_tokens=False)
        if len(ids) > request.max_second:
            document = await service.prompts.decode(ids[: request.max_second])
    if info.score_template == "qwen3":
        instruction = request.instruction or _QWEN3_INSTRUCTION
        return _QWEN3.format(instruction=instruction, query=query, document=document)
    said = [("query", query), ("document", document)]
    if request.instruction is not None:
        said.insert(0, ("system", request.instruction))
    return await service.prompts.render(
        TemplateOptions(
            messages=[{"role": role, "content": text} for role, text in said],
            add_generation_prompt=True,
            continue_final_message=False,
            chat_template=None,
            template_kwargs={},
            tools=None,
        )
    )


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / lengths if lengths else 0.0
