"""Parsed requests for vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.pooling import PoolingParams
from paceline.core.slo import Slo

__all__ = ["Input", "PoolingOptions", "RerankRequest", "ScoreRequest", "VectorRequest"]

# a text, or token ids that are used unchanged
Input: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """Options that all of these endpoints share."""

    params: PoolingParams
    add_special_tokens: bool
    # number of tokens of each input to keep; None: an input that is too long is refused
    max_tokens: int | None
    priority: int
    cache_salt: str | None
    slo: Slo
    # name of the tenant; "": not given
    tenant: str
    # names of fields that were not read, as they are shown
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest:
    """Inputs that get one vector each."""

    inputs: list[Input]
    options: PoolingOptions
    # encode numbers as base64 of little-endian float32
    base64: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Pairs that get one score each."""

    pairs: list[tuple[str, str]]
    # their fields' names, for messages: "query", or "documents[{}]" for one of several
    names: tuple[str, str]
    options: PoolingOptions
    # maximum tokens of the second text
    max_second: int | None = None
    instruction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankRequest:
    """Documents to be ordered by their score for a query."""

    score: ScoreRequest
    documents: list[str]
    # number of documents to return, the best first
    top_n: int
    return_documents: bool

    @property
    def options(self) -> PoolingOptions:
        return self.score.options
