"""Parsed request bodies for vectors, checked against the served model.

This module does not know how a body is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.core.pooling import CLASSIFY, EMBED, PoolingInfo, PoolingParams
from paceline.errors import InvalidRequestError
from paceline.http.fields import show
from paceline.server.apis.pooling.protocol import (
    ACTIVATIONS,
    ClassifyBody,
    EmbeddingsBody,
    PairsBody,
    PoolingBody,
    PoolingOptions,
    RerankBody,
    RerankRequest,
    ScoreBody,
    ScoreRequest,
    SharedBody,
    VectorRequest,
    contradiction,
)
from paceline.server.protocol.field_types import check_model
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.targets import parse_slo

__all__ = [
    "parse_classify",
    "parse_embeddings",
    "parse_pooling",
    "parse_rerank",
    "parse_score",
]

# maximum characters of all pairs, which are written out one by one
_MAX_PAIR_CHARS: Final = 1 << 24


def parse_embeddings(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """Parse ``/v1/embeddings``. Raises InvalidRequestError or UnknownModelError."""
    info = _pooled(values, rules, info, EMBED, "embeddings")
    return _vectors(EmbeddingsBody.read(values, rules), rules, tenant, info)


def parse_pooling(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """Parse ``/pooling``, for the model's own pooling. Raises like ``parse_embeddings``."""
    info = _pooled(values, rules, info, None, "pooling")
    body = PoolingBody.read(values, rules)
    if body.task is not None and body.task != info.task:
        raise InvalidRequestError(
            f"task must be {info.task!r}, which is what this model does, got {show(body.task)}",
            "task",
        )
    return _vectors(body, rules, tenant, info)


def parse_classify(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """Parse ``/classify``. Raises like ``parse_embeddings``."""
    _pooled(values, rules, info, CLASSIFY, "classes")
    body = ClassifyBody.read(values, rules)
    params = PoolingParams(use_activation=body.activates())
    return VectorRequest(inputs=body.input, options=_options(body, rules, tenant, params))


def parse_score(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> ScoreRequest:
    """Parse ``/score``: one text with each of several, or two lists of equal length. Raises like
    ``parse_embeddings``."""
    info = _pooled(values, rules, info, None, "scores")
    _check_scores(info)
    body = ScoreBody.read(values, rules)
    first_name, first = _given(body, "text_1", "queries", "data_1")
    second_name, second = _given(body, "text_2", "documents", "data_2")
    names = (_place(first_name, first), _place(second_name, second))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one with several, or as "
            "many as there are",
            "text_1",
        )
    pairs = list(zip(first, second, strict=True))
    return _score(values, body, rules, tenant, info, pairs, names)


def parse_rerank(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> RerankRequest:
    """Parse ``/rerank``. Raises like ``parse_embeddings``."""
    info = _pooled(values, rules, info, None, "ranks")
    _check_scores(info)
    body = RerankBody.read(values, rules)
    pairs = [(body.query, text) for text in body.documents]
    return RerankRequest(
        score=_score(values, body, rules, tenant, info, pairs, ("query", "documents[{}]")),
        documents=body.documents,
        # absent and zero mean all
        top_n=min(body.top_n or len(body.documents), len(body.documents)),
        return_documents=body.return_documents,
    )


# ---------------------------------------------------------------------- parts


def _no_vectors(model: str) -> str:
    return (
        f"The model {model} does not support embeddings, scores or classes: it generates text, and "
        "its hidden states were not trained to be compared. Serve a model whose files say how it "
        "is pooled, or this one with --runner pooling (docs/use/embeddings.md)."
    )


def _pooled(
    values: dict[str, Any],
    rules: RequestRules,
    info: PoolingInfo | None,
    task: str | None,
    what: str,
) -> PoolingInfo:
    """Return the model's pooling if its task is ``task`` (None: any), before any other check of the
    body. Raises InvalidRequestError, or UnknownModelError for a model that is not served."""
    if values.get("model") is not None:
        check_model(values["model"], rules)
    name = rules.served_model_names[0]
    if info is None:
        raise InvalidRequestError(_no_vectors(name), "model")
    if task is not None and info.task != task:
        does = (
            "gives embeddings: ask /v1/embeddings, /score or /rerank"
            if info.task == EMBED
            else "classifies: ask /classify, /score or /rerank"
        )
        raise InvalidRequestError(f"The model {name} does not give {what}; it {does}.", "model")
    return info


def _check_scores(info: PoolingInfo) -> None:
    if info.task == CLASSIFY and info.size != 1:
        raise InvalidRequestError(
            f"this model has {info.size} labels, and a score is that of one: ask /classify", "model"
        )


def _place(name: str, texts: list[str]) -> str:
    """Return the name of one text in an error, as a format."""
    return f"{name}[{{}}]" if len(texts) > 1 else name


def _given(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    """Return the given name and its texts. Raises InvalidRequestError unless there is one."""
    given = [(name, found) for name in names if (found := getattr(body, name)) is not None]
    if not given:
        raise InvalidRequestError(f"{names[0]} is missing", names[0])
    texts: list[str] = given[0][1]
    for name, others in given[1:]:
        if others != texts:
            raise contradiction(given[0], (name, others))
    return given[0][0], texts


def _vectors(
    body: EmbeddingsBody, rules: RequestRules, tenant: str, info: PoolingInfo
) -> VectorRequest:
    prompt = _prompt(body.prompt_name, info)
    if body.dimensions is not None and body.dimensions != info.size:
        _check_dimensions(body.dimensions, info)
    params = PoolingParams(dimensions=body.dimensions, use_activation=body.activates())
    return VectorRequest(
        inputs=[prompt + item if isinstance(item, str) else item for item in body.input],
        options=_options(body, rules, tenant, params),
        base64=body.encoding_format == "base64",
    )


def _score(
    values: Mapping[str, Any],
    body: PairsBody,
    rules: RequestRules,
    tenant: str,
    info: PoolingInfo,
    pairs: list[tuple[str, str]],
    names: tuple[str, str],
) -> ScoreRequest:
    size = sum(len(first) + len(second) for first, second in pairs)
    if size > _MAX_PAIR_CHARS:
        raise InvalidRequestError(
            f"the pairs have {size} characters, a query counted with each of its texts; "
            f"{_MAX_PAIR_CHARS} may be asked at a time: send several requests",
            names[1].removesuffix("[{}]"),
        )
    if info.task == EMBED:
        for name in ("max_tokens_per_doc", *ACTIVATIONS):
            if values.get(name) is not None:
                raise InvalidRequestError(
                    f"{name} is not served where scores are the cosines of embeddings: "
                    "truncate_prompt_tokens cuts each text",
                    name,
                )
    if info.score_template is not None:
        for name in ("truncate_prompt_tokens", "add_special_tokens"):
            if values.get(name) is not None:
                raise InvalidRequestError(
                    f"{name} has no place where a template writes the pair: max_tokens_per_doc "
                    "cuts documents",
                    name,
                )
    if body.instruction is not None and info.score_template is None:
        raise InvalidRequestError(
            "this model's pairs have no place for an instruction: leave it out", "instruction"
        )
    return ScoreRequest(
        pairs=pairs,
        names=names,
        options=_options(body, rules, tenant, PoolingParams(use_activation=body.activates())),
        max_second=body.max_tokens_per_doc,
        instruction=body.instruction,
    )


def _check_dimensions(dimensions: int, info: PoolingInfo) -> None:
    if info.task != EMBED or not info.is_matryoshka:
        raise InvalidRequestError(
            f"dimensions={dimensions}: this model's vectors have {info.size} numbers, and its "
            "files do not say that they may be cut (matryoshka_dimensions in config.json, or "
            "the flag --matryoshka-dimensions)",
            "dimensions",
        )
    if dimensions > info.size or (info.dimensions and dimensions not in info.dimensions):
        sizes = ", ".join(map(str, info.dimensions)) or f"1 to {info.size}"
        raise InvalidRequestError(f"dimensions must be {sizes}, got {dimensions}", "dimensions")


def _prompt(name: str | None, info: PoolingInfo) -> str:
    """Return the prompt that precedes a text."""
    prompts = dict(info.prompts)
    if name is None:
        return "" if info.default_prompt is None else prompts[info.default_prompt]
    if name not in prompts:
        known = ", ".join(map(show, prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name {show(name)} is not among this model's prompts: {known}", "prompt_name"
        )
    return prompts[name]


def _options(
    body: SharedBody, rules: RequestRules, tenant: str, params: PoolingParams
) -> PoolingOptions:
    keep = body.truncate_prompt_tokens
    if keep == -1 or (keep is not None and keep > rules.max_model_len):
        keep = rules.max_model_len
    _, tier_class = body.service_tier or (None, None)
    return PoolingOptions(
        params=params,
        add_special_tokens=body.add_special_tokens,
        max_tokens=keep,
        priority=body.priority,
        cache_salt=body.cache_salt,
        slo=parse_slo(body.slo, rules.slo_classes, tier_class),
        tenant=tenant,
        ignored_fields=body.ignored_fields,
    )
