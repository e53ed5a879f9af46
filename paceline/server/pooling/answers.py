"""The bodies of answers with vectors, as msgspec structs; names and order follow vLLM, and OpenAI's
where they have the endpoint."""

from __future__ import annotations

import base64
from array import array
from typing import Any, Generic, TypeVar

import msgspec

__all__ = [
    "ClassAnswer", "ClassData", "Embedding", "EmbeddingAnswer", "PooledData", "PoolingAnswer",
    "RankedDocument", "RerankAnswer", "ScoreAnswer", "ScoreData", "VectorAnswer", "VectorUsage",
    "as_base64", "as_floats",
]  # fmt: skip

_T = TypeVar("_T")


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


class VectorAnswer(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """Something for each input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[_T]
    usage: VectorUsage


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "embedding"
    # base64 where that was asked for
    embedding: list[float] | str


class EmbeddingAnswer(VectorAnswer[Embedding], frozen=True, kw_only=True):
    """Of ``/v1/embeddings``."""


class PooledData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingAnswer(VectorAnswer[PooledData], frozen=True, kw_only=True):
    """Of ``/pooling``."""


class ClassData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    # of the largest
    label: str
    probs: list[float]
    num_classes: int


class ClassAnswer(VectorAnswer[ClassData], frozen=True, kw_only=True):
    """Of ``/classify``."""


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreAnswer(VectorAnswer[ScoreData], frozen=True, kw_only=True):
    """Of ``/score``."""


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
