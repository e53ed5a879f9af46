"""What a body that asks for vectors comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.pooling import PoolingParams
from paceline.core.slo import Slo

__all__ = ["Input", "PoolingOptions", "RerankRequest", "ScoreRequest", "VectorRequest"]

# a text, or token ids that are taken as they are
Input: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """What all of these endpoints have in common."""

    params: PoolingParams
    add_special_tokens: bool
    # keep this many tokens of each input; None: one that is too long is refused
    max_tokens: int | None
    priority: int
    cache_salt: str | None
    slo: Slo
    # who asks; "" when nothing said so
    tenant: str
    # fields that nothing has read, as they are shown
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest:
    """Inputs that get a vector each."""

    inputs: list[Input]
    options: PoolingOptions
    # numbers as base64 of little-endian float32
    base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Pairs that get a score each."""

    pairs: list[tuple[str, str]]
    # of the fields that they came in, for messages: "query", or "documents[{}]" for one of several
    names: tuple[str, str]
    options: PoolingOptions
    # of the second text
    max_second: int | None = None
    instruction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """Documents that are put in order by their score for a query."""

    score: ScoreRequest
    documents: list[str]
    # of the best
    top_n: int
    return_documents: bool

    @property
    def options(self) -> PoolingOptions:
        return self.score.options
