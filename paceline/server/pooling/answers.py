"""The bodies of answers with vectors, as msgspec structs; names and order follow vLLM, and OpenAI's
where they have the endpoint."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import msgspec

__all__ = [
    "ClassAnswer", "ClassData", "Embedding", "EmbeddingAnswer", "PooledData", "PoolingAnswer",
    "RankedDocument", "RerankAnswer", "ScoreAnswer", "ScoreData", "VectorUsage", "as_base64",
    "as_floats",
]  # fmt: skip


def as_floats(vector: bytes) -> list[float]:
    """Numbers of a vector in little-endian float32."""
    values = array("f", vector)
    if _SWAPS:
        values.byteswap()
    return values.tolist()


# arrays are in the machine's own order
_SWAPS = array("H", b"\x01\x00")[0] != 1


def as_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


class VectorUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> VectorUsage:
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "embedding"
    # base64 where that was asked for
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class PooledData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: VectorUsage


class ClassData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    # of the largest
    label: str
    probs: list[float]
    num_classes: int


class ClassAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassData]
    usage: VectorUsage


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: VectorUsage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # place among the request's documents
    index: int
    # {"text": ...}
    document: dict[str, Any] | None = None
    relevance_score: float


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    usage: VectorUsage
    # the best first
    results: list[RankedDocument]
