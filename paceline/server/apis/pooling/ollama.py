"""Ollama's ``/api/embed`` and ``/api/embeddings``: bodies translated into those of
``/v1/embeddings``, and answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.core.pooling import PoolingInfo
from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.apis.ollama.protocol import OllamaBody, served_name
from paceline.server.apis.openai.answers import AnswerHead
from paceline.server.apis.pooling.parsing import parse_embeddings
from paceline.server.apis.pooling.protocol import (
    EmbeddingsBody,
    PoolingOptions,
    VectorRequest,
    max_inputs,
)
from paceline.server.apis.pooling.responses import as_floats
from paceline.server.apis.pooling.running import Vectors, encode_list, encoded_inputs, run_vectors
from paceline.server.generation.service import Service
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import boolean, described, ignored, string
from paceline.server.protocol.generation import GenerationBody
from paceline.server.protocol.responses import encode
from paceline.server.protocol.rules import RequestRules

__all__ = [
    "EmbedAnswer", "EmbeddingAnswer", "OllamaEmbedBody", "OllamaEmbeddingsBody", "OllamaVectors",
    "embed_answer", "embeddings_answer", "parse_embed", "parse_ollama_embeddings",
]  # fmt: skip

_PASSED: Final = ("slo", "priority", "cache_salt")


class _Shared(Body, passes=(GenerationBody, _PASSED)):
    model = OllamaBody.model
    options = ignored(note="ways of sampling, and of starting a runner")
    keep_alive = OllamaBody.keep_alive
    truncate = boolean(True, note="`false`: an input that is too long is a 400, and not cut")


def _texts(value: Any, name: str, _: RequestRules) -> str | list[Any]:
    """Check the type; items of a list are checked where they are read."""
    if type(value) not in (str, list):
        raise InvalidRequestError(
            f"{name} must be a text or a list of texts, got {show(value)}", name
        )
    if type(value) is list and not all(type(item) is str for item in value):
        raise InvalidRequestError(f"{name} must hold texts alone, got {show(value)}", name)
    return value  # type: ignore[no-any-return]


class OllamaEmbedBody(_Shared, refuses_unknown="{names}: not served in /api/embed"):
    """``/api/embed``."""

    input = described(
        _texts,
        lambda rules: {
            "anyOf": [schemas.STRING, schemas.array(schemas.string(low=1), 0, max_inputs(rules))]
        },
        note="a text or a list of texts; nothing: no vectors",
    )
    dimensions = EmbeddingsBody.dimensions


class OllamaEmbeddingsBody(_Shared, refuses_unknown="{names}: not served in /api/embeddings"):
    """``/api/embeddings``, which is older."""

    prompt = string(note="one text; nothing: no vector")
    truncate = ignored(note="what is too long is cut, as at Ollama")


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    # unit vectors
    embeddings: list[list[float]]
    # nanoseconds
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    # with the length that pooling gives it
    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaVectors:
    """The parsed request."""

    # the name as the caller sent it
    model: str
    # None: the caller wants the model loaded, which it is already
    asked: VectorRequest | None
    # the caller's name of a text, for messages
    name: str
    options: PoolingOptions


def parse_embed(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> OllamaVectors:
    """Parse a body. Raises InvalidRequestError or UnknownModelError."""
    body = OllamaEmbedBody.read(values, rules)
    made: dict[str, Any] = {"normalize": True, "dimensions": body.dimensions}
    return _asked(body, made, body.input, body.truncate, "input[{}]", rules, tenant, info)


def parse_ollama_embeddings(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> OllamaVectors:
    """Parse a body. Raises InvalidRequestError or UnknownModelError."""
    body = OllamaEmbeddingsBody.read(values, rules)
    return _asked(body, {"normalize": False}, body.prompt, True, "prompt", rules, tenant, info)


def _asked(
    body: _Shared,
    made: dict[str, Any],
    texts: Any,
    cuts: bool,
    name: str,
    rules: RequestRules,
    tenant: str,
    info: PoolingInfo | None,
) -> OllamaVectors:
    model = body.model or rules.served_model_names[0]
    # a request without texts is checked all the same
    made |= {"model": served_name(model, rules), "input": texts or "-", **body.passed()}
    if cuts:
        made["truncate_prompt_tokens"] = -1
    parsed = parse_embeddings(made, rules, tenant, info)
    return OllamaVectors(
        model=model, asked=parsed if texts else None, name=name, options=parsed.options
    )


async def embed_answer(
    service: Service, request: OllamaVectors, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/api/embed``."""
    vectors = await _vectors(service, request, request_id, arrival)
    values = vectors.values
    answer = EmbedAnswer(
        model=request.model,
        embeddings=[],
        total_duration=int(1e9 * (time.monotonic() - arrival)),
        prompt_eval_count=vectors.num_prompt_tokens,
    )
    sizes = [len(value) // 4 for value in values]
    return await encode_list(answer, "embeddings", lambda index: as_floats(values[index]), sizes)


async def embeddings_answer(
    service: Service, request: OllamaVectors, request_id: str, arrival: float
) -> bytes:
    """Return the body of an answer of ``/api/embeddings``."""
    vectors = await _vectors(service, request, request_id, arrival)
    return encode(EmbeddingAnswer(embedding=as_floats(vectors.values[0]) if vectors.values else []))


async def _vectors(
    service: Service, request: OllamaVectors, request_id: str, arrival: float
) -> Vectors:
    asked = request.asked
    if asked is None:
        return Vectors([], 0)
    head = AnswerHead.of("embd", request_id, service)
    prompts = await encoded_inputs(service, asked.inputs, asked.options, request.name.format)
    return await run_vectors(service, prompts, asked.options, head, arrival)
