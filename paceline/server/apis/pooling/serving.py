"""The endpoints' answers, from the parsed request to bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from paceline.core.pooling import CLASSIFY, PoolingInfo
from paceline.server.apis.openai.answers import AnswerHead
from paceline.server.apis.pooling import ollama
from paceline.server.apis.pooling.parsing import (
    parse_classify,
    parse_embeddings,
    parse_pooling,
    parse_rerank,
    parse_score,
)
from paceline.server.apis.pooling.protocol import RerankRequest, ScoreRequest, VectorRequest
from paceline.server.apis.pooling.responses import (
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
    VectorAnswer,
    VectorUsage,
    as_base64,
    as_floats,
)
from paceline.server.apis.pooling.running import (
    cosines,
    encode_list,
    encoded_inputs,
    length_check,
    run_vectors,
)
from paceline.server.generation.service import Service
from paceline.server.protocol.requests import TemplateOptions
from paceline.server.protocol.responses import encode
from paceline.server.protocol.rules import RequestRules

__all__ = ["KINDS", "Endpoint"]

_T = TypeVar("_T")
_P = TypeVar("_P")

# Qwen3-Reranker's prompt, from its model card
_QWEN3: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_INSTRUCTION: Final = (
    "Given a web search query, retrieve relevant passages that answer the query"
)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[_P]):
    """How one endpoint parses a body and answers it."""

    parse: Callable[[dict[str, Any], RequestRules, str, PoolingInfo | None], _P]
    # makes the body of an answer from a parsed request, its id, and its arrival time
    answer: Callable[[Service, _P, str, float], Awaitable[bytes]]


async def _embeddings(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/v1/embeddings``."""
    shown = _shown(request)
    return await _vector_answer(
        service, request, "embd", request_id, arrival, EmbeddingAnswer,
        lambda index, vector: Embedding(index=index, embedding=shown(vector)),
    )  # fmt: skip


async def _pooling(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/pooling``."""
    shown = _shown(request)
    return await _vector_answer(
        service, request, "pool", request_id, arrival, PoolingAnswer,
        lambda index, vector: PooledData(index=index, data=shown(vector)),
    )  # fmt: skip


async def _classify(
    service: Service, request: VectorRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/classify``."""
    labels = _info(service).labels

    def one(index: int, vector: bytes) -> ClassData:
        values = as_floats(vector)
        best = max(range(len(values)), key=values.__getitem__)
        return ClassData(index=index, label=labels[best], probs=values, num_classes=len(values))

    return await _vector_answer(service, request, "classify", request_id, arrival, ClassAnswer, one)


async def _score(service: Service, request: ScoreRequest, request_id: str, arrival: float) -> bytes:
    """Return the body of an answer of ``/score``."""
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


async def _rerank(
    service: Service, request: RerankRequest, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/rerank``; documents with equal scores keep their order."""
    head = AnswerHead.of("rerank", request_id, service)
    scores, num_tokens = await _scores(service, request.score, head, arrival)
    documents = request.documents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    shows = request.return_documents

    def ranked(rank: int) -> RankedDocument:
        index = order[rank]
        return RankedDocument(
            index=index,
            document={"text": documents[index]} if shows else None,
            relevance_score=scores[index],
        )

    answer = RerankAnswer(
        id=head.id, model=head.model, usage=VectorUsage.of(num_tokens), results=[]
    )
    sizes = [1 + shows * len(documents[index]) for index in order]
    return await encode_list(answer, "results", ranked, sizes)


def _info(service: Service) -> PoolingInfo:
    info = service.client.info.pooling
    assert info is not None, "the body was parsed for a model that is pooled"
    return info


def _shown(request: VectorRequest) -> Callable[[bytes], list[float] | str]:
    return as_base64 if request.base64 else as_floats


async def _vector_answer(
    service: Service,
    request: VectorRequest,
    prefix: str,
    request_id: str,
    arrival: float,
    kind: type[VectorAnswer[_T]],
    item: Callable[[int, bytes], _T],
) -> bytes:
    head = AnswerHead.of(prefix, request_id, service)
    vectors = await run_vectors(
        service,
        await encoded_inputs(service, request.inputs, request.options, "input[{}]".format),
        request.options,
        head,
        arrival,
    )
    values = vectors.values
    answer = kind(
        id=head.id,
        created=head.created,
        model=head.model,
        data=[],
        usage=VectorUsage.of(vectors.num_prompt_tokens),
    )
    return await encode_list(
        answer, "data", lambda index: item(index, values[index]), [len(v) // 4 for v in values]
    )


async def _scores(
    service: Service, request: ScoreRequest, head: AnswerHead, arrival: float
) -> tuple[list[float], int]:
    """Return the score of each pair, and the tokens of all prompts: from the model's head, or as
    cosine similarity of embeddings."""
    info = _info(service)
    if info.task == CLASSIFY:
        prompts = await _pair_prompts(service, request, info)
        vectors = await run_vectors(service, prompts, request.options, head, arrival)
        return [as_floats(vector)[0] for vector in vectors.values], vectors.num_prompt_tokens
    # each text is encoded once, however many pairs it is in, under the name that the caller knows
    index_of: dict[str, int] = {}
    names: list[str] = []
    pairs: list[tuple[int, int]] = []
    for number, pair in enumerate(_prompted(request, info)):
        for text, name in zip(pair, request.names, strict=True):
            if text not in index_of:
                index_of[text] = len(index_of)
                names.append(name.format(number))
        pairs.append((index_of[pair[0]], index_of[pair[1]]))
    prompts = await encoded_inputs(service, list(index_of), request.options, names.__getitem__)
    vectors = await run_vectors(service, prompts, request.options, head, arrival)
    return await cosines(vectors.values, pairs), vectors.num_prompt_tokens


def _prompted(request: ScoreRequest, info: PoolingInfo) -> list[tuple[str, str]]:
    """Return the pairs with the prompts that the model's files define for query and document."""
    prompts = dict(info.prompts)
    usual = prompts.get(info.default_prompt or "", "")
    query = prompts.get("query", usual)
    document = prompts.get("document", prompts.get("passage", usual))
    return [(query + first, document + second) for first, second in request.pairs]


async def _pair_prompts(
    service: Service, request: ScoreRequest, info: PoolingInfo
) -> list[tuple[list[int], int | None]]:
    options = request.options
    first, second = request.names

    def name(number: int) -> str:
        return second.format(number)

    def beside(number: int) -> str:
        return f" with {first.format(number)}"

    # the end of a score template holds the instruction, so only the document may be truncated
    cut_by = "truncate_prompt_tokens=-1" if info.score_template is None else "max_tokens_per_doc"
    check = length_check(service.rules.max_model_len, name, cut_by, beside)
    if info.score_template is None:
        texts = [(a.lower(), b.lower()) if info.lower_case else (a, b) for a, b in request.pairs]
        return await service.prompts.texts(
            texts,
            add_special_tokens=options.add_special_tokens,
            max_tokens=options.max_tokens,
            max_second=request.max_second,
            check=check,
        )
    documents = [document for _, document in request.pairs]
    if request.max_second is not None:
        documents = await service.prompts.cut(documents, request.max_second)
    queries = [query for query, _ in request.pairs]
    rendered = await _rendered(service, request, info, list(zip(queries, documents, strict=True)))
    return await service.prompts.texts(
        [(text, None) for text in rendered], add_special_tokens=False, check=check
    )


async def _rendered(
    service: Service, request: ScoreRequest, info: PoolingInfo, pairs: Sequence[tuple[str, str]]
) -> list[str]:
    if info.score_template == "qwen3":
        instruction = request.instruction or _QWEN3_INSTRUCTION
        return [
            _QWEN3.format(instruction=instruction, query=query, document=document)
            for query, document in pairs
        ]
    system = [] if request.instruction is None else [("system", request.instruction)]
    return await service.prompts.render_all(
        [
            TemplateOptions(
                messages=[
                    {"role": role, "content": text}
                    for role, text in (*system, ("query", query), ("document", document))
                ],
                add_generation_prompt=True,
                continue_final_message=False,
                chat_template=None,
                template_kwargs={},
                tools=None,
            )
            for query, document in pairs
        ]
    )


KINDS: Final[dict[str, Endpoint[Any]]] = {
    "embeddings": Endpoint(parse_embeddings, _embeddings),
    "pooling": Endpoint(parse_pooling, _pooling),
    "classify": Endpoint(parse_classify, _classify),
    "score": Endpoint(parse_score, _score),
    "rerank": Endpoint(parse_rerank, _rerank),
    "ollama_embed": Endpoint(ollama.parse_embed, ollama.embed_answer),
    "ollama_embeddings": Endpoint(ollama.parse_ollama_embeddings, ollama.embeddings_answer),
}
