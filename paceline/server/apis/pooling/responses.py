"""The bodies of answers with vectors, as msgspec structs; names and order follow OpenAI for its
endpoints, else vLLM."""

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
    """Return the numbers of a vector in little-endian float32."""
    values = array("f", vector)
    if _SWAPS:
        values.byteswap()
    return values.tolist()


# arrays use the machine's byte order
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
    """An answer with one item for each input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[_T]
    usage: VectorUsage


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "embedding"
    # base64 if that was requested
    embedding: list[float] | str


class EmbeddingAnswer(VectorAnswer[Embedding], frozen=True, kw_only=True):
    """Answer of ``/v1/embeddings``."""


class PooledData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingAnswer(VectorAnswer[PooledData], frozen=True, kw_only=True):
    """Answer of ``/pooling``."""


class ClassData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    # label of the largest probability
    label: str
    probs: list[float]
    num_classes: int


class ClassAnswer(VectorAnswer[ClassData], frozen=True, kw_only=True):
    """Answer of ``/classify``."""


class ScoreData(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreAnswer(VectorAnswer[ScoreData], frozen=True, kw_only=True):
    """Answer of ``/score``."""


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # index among the request's documents
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
