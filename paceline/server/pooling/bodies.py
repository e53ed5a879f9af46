"""Bodies that ask for vectors, parsed and checked. Names and meanings are OpenAI's and vLLM's; of
``/rerank`` also Cohere's and Jina's.

This module does not know how a body is answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import CLASSIFY, EMBED, PoolingInfo, PoolingParams
from paceline.core.slo import Slo
from paceline.http.fields import Fields, check_string, check_token_ids, show
from paceline.server.bodies.protocol import check_model
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.sampling_fields import INT32, INT64
from paceline.server.bodies.targets import CALLER_FIELDS, parse_service_tier, parse_slo
from paceline.server.bodies.unserved import note_unknown

__all__ = [
    "Input",
    "PoolingOptions",
    "RerankRequest",
    "ScoreRequest",
    "VectorRequest",
    "max_inputs",
    "parse_classify",
    "parse_embeddings",
    "parse_pooling",
    "parse_rerank",
    "parse_score",
]

# a text, or token ids that are taken as they are
Input: TypeAlias = str | list[int]

# as at OpenAI
_MAX_INPUTS: Final = 2048
_FORMATS: Final = ("float", "base64")
# accepted for compatibility; they describe the caller, not the answer
_NO_EFFECT: Final = ("request_id",)


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


def parse_embeddings(
    body: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """``/v1/embeddings``. Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(body)
    info = _pooled(fields, rules, info, EMBED, "embeddings")
    base64 = _base64(fields)
    inputs = _inputs(fields, rules, _prompt(fields, info))
    return VectorRequest(
        inputs=inputs, options=_options(fields, rules, tenant, _params(fields, info)), base64=base64
    )


def parse_pooling(
    body: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """``/pooling``: as the model is pooled. Raises like ``parse_embeddings``."""
    fields = Fields(body)
    info = _pooled(fields, rules, info, None, "pooling")
    task = fields.string("task")
    if task is not None and task != info.task:
        raise InvalidRequestError(
            f"task must be {info.task!r}, which is what this model does, got {show(task)}", "task"
        )
    base64 = _base64(fields)
    inputs = _inputs(fields, rules, _prompt(fields, info))
    return VectorRequest(
        inputs=inputs, options=_options(fields, rules, tenant, _params(fields, info)), base64=base64
    )


def parse_classify(
    body: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """``/classify``. Raises like ``parse_embeddings``."""
    fields = Fields(body)
    _pooled(fields, rules, info, CLASSIFY, "classes")
    inputs = _inputs(fields, rules, "")
    params = PoolingParams(use_activation=_use_activation(fields))
    return VectorRequest(inputs=inputs, options=_options(fields, rules, tenant, params))


def parse_score(
    body: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> ScoreRequest:
    """``/score``: one text with each of several, or as many with as many. Raises like
    ``parse_embeddings``."""
    fields = Fields(body)
    info = _pooled(fields, rules, info, None, "scores")
    _check_scores(info)
    first = _texts(fields, rules, "text_1", "queries", "data_1")
    second = _texts(fields, rules, "text_2", "documents", "data_2")
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: give one with several, or as "
            "many as there are",
            "text_1",
        )
    return _score(fields, rules, tenant, info, list(zip(first, second, strict=True)))


def parse_rerank(
    body: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> RerankRequest:
    """``/rerank``. Raises like ``parse_embeddings``."""
    fields = Fields(body)
    info = _pooled(fields, rules, info, None, "ranks")
    _check_scores(info)
    query = fields.string("query", 1)
    if query is None:
        raise InvalidRequestError("query is missing", "query")
    documents = _texts(fields, rules, "documents")
    top_n = fields.integer("top_n", 0, INT32)
    with_documents = fields.boolean("return_documents", True)
    return RerankRequest(
        score=_score(fields, rules, tenant, info, [(query, text) for text in documents]),
        documents=documents,
        # none and zero: all of them
        top_n=min(top_n or len(documents), len(documents)),
        return_documents=with_documents,
    )


# ---------------------------------------------------------------------- parts


def _no_vectors(model: str) -> str:
    return (
        f"The model {model} does not support embeddings, scores or classes: it generates text, and "
        "its hidden states were not trained to be compared. Serve a model whose files say how it "
        "is pooled, or this one with --runner pooling (docs/embeddings.md)."
    )


def _pooled(
    fields: Fields, rules: RequestRules, info: PoolingInfo | None, task: str | None, what: str
) -> PoolingInfo:
    """What the model gives, if that is ``task`` (None: anything). Raises InvalidRequestError, or
    UnknownModelError for a model that is not here at all."""
    check_model(fields, rules)
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


def _inputs(fields: Fields, rules: RequestRules, prompt: str) -> list[Input]:
    if fields.raw("messages") is not None:
        raise InvalidRequestError(
            "messages are not served here: /tokenize renders a conversation, and input takes its "
            "token ids",
            "messages",
        )
    value = fields.raw("input")
    if value is None:
        raise InvalidRequestError("input is missing", "input")
    if type(value) is str or (type(value) is list and value and type(value[0]) is int):
        value = [value]
    if type(value) is not list or not value:
        raise InvalidRequestError(
            "input must be a text, a list of texts, token ids or lists of them, with at least one "
            f"of these, got {show(value)}",
            "input",
        )
    _check_count(len(value), rules, "input")
    found: list[Input] = []
    for number, item in enumerate(value):
        if type(item) is str:
            found.append(prompt + check_string(item, f"input[{number}]", 1, None))
        elif type(item) is list and item:
            found.append(check_token_ids(item, f"input[{number}]", rules.vocab_size))
        else:
            raise InvalidRequestError(
                f"input[{number}] must be a text or token ids that are not empty, got {show(item)}",
                "input",
            )
    return found


def _texts(fields: Fields, rules: RequestRules, *names: str) -> list[str]:
    """One text or several, under the first of ``names`` that is given; a document may be an object
    with its text."""
    given = [(name, value) for name in names if (value := fields.raw(name)) is not None]
    if not given:
        raise InvalidRequestError(f"{names[0]} is missing", names[0])
    name, value = given[0]
    values = value if type(value) is list else [value]
    if not values:
        raise InvalidRequestError(f"{name} is empty", name)
    _check_count(len(values), rules, name)
    texts = [
        item["text"]
        if type(item) is dict and set(item) <= {"text", "type", "id"} and "text" in item
        else item
        for item in values
    ]
    return [check_string(item, f"{name}[{i}]", 1, None) for i, item in enumerate(texts)]


def max_inputs(rules: RequestRules) -> int:
    """Inputs, or pairs, of one request at most."""
    return min(_MAX_INPUTS, rules.max_sequences or _MAX_INPUTS)


def _check_count(count: int, rules: RequestRules, name: str) -> None:
    most = max_inputs(rules)
    if count > most:
        raise InvalidRequestError(
            f"{name} may hold {most} at a time, got {count}: send several requests", name
        )


def _score(
    fields: Fields,
    rules: RequestRules,
    tenant: str,
    info: PoolingInfo,
    pairs: list[tuple[str, str]],
) -> ScoreRequest:
    max_second = fields.integer("max_tokens_per_doc", 1, INT32)
    instruction = fields.string("instruction")
    if instruction is not None and info.score_template is None:
        raise InvalidRequestError(
            "this model's pairs have no place for an instruction: leave it out", "instruction"
        )
    params = PoolingParams(use_activation=_use_activation(fields))
    if info.task == EMBED:
        # of vectors the angle alone counts
        params = PoolingParams()
    return ScoreRequest(
        pairs=pairs,
        options=_options(fields, rules, tenant, params),
        max_second=max_second,
        instruction=instruction,
    )


def _params(fields: Fields, info: PoolingInfo) -> PoolingParams:
    dimensions = fields.integer("dimensions", 1, INT32)
    if dimensions is not None and dimensions != info.size:
        _check_dimensions(dimensions, info)
    return PoolingParams(dimensions=dimensions, use_activation=_use_activation(fields))


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


def _use_activation(fields: Fields) -> bool | None:
    # the newer name first
    for name in ("use_activation", "normalize", "activation", "softmax"):
        if fields.raw(name) is not None:
            return fields.boolean(name, True)
    return None


def _prompt(fields: Fields, info: PoolingInfo) -> str:
    """What goes before a text."""
    prompts = dict(info.prompts)
    name = fields.string("prompt_name")
    if name is None:
        return "" if info.default_prompt is None else prompts[info.default_prompt]
    if name not in prompts:
        known = ", ".join(map(show, prompts)) or "none"
        raise InvalidRequestError(
            f"prompt_name {show(name)} is not among this model's prompts: {known}", "prompt_name"
        )
    return prompts[name]


def _base64(fields: Fields) -> bool:
    wanted = fields.string("encoding_format") or "float"
    if wanted not in _FORMATS:
        raise InvalidRequestError(
            f"encoding_format must be float or base64, got {show(wanted)}", "encoding_format"
        )
    for name, only in (("embed_dtype", ("float32",)), ("endianness", ("native", "little"))):
        value = fields.string(name)
        if value is not None and value not in only:
            raise InvalidRequestError(
                f"{name}={show(value)} is not served: vectors are little-endian float32", name
            )
    return wanted == "base64"


def _options(
    fields: Fields, rules: RequestRules, tenant: str, params: PoolingParams
) -> PoolingOptions:
    _, tier_class = parse_service_tier(fields.raw("service_tier"))
    for name in (*CALLER_FIELDS, *_NO_EFFECT):
        # the tenant was made from the first
        fields.raw(name)
    special = fields.boolean("add_special_tokens", True)
    keep = fields.integer("truncate_prompt_tokens", -1, INT32)
    if keep == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be -1 (as many as the model takes) or at least 1, got 0",
            "truncate_prompt_tokens",
        )
    if keep == -1 or (keep is not None and keep > rules.max_model_len):
        keep = rules.max_model_len
    return PoolingOptions(
        params=params,
        add_special_tokens=special,
        max_tokens=keep,
        priority=fields.integer("priority", -INT64, INT64 - 1) or 0,
        cache_salt=fields.string("cache_salt", 1, 1024),
        slo=parse_slo(fields.raw("slo"), rules.slo_classes, tier_class),
        tenant=tenant,
        ignored_fields=note_unknown(fields, strict=rules.strict_fields),
    )
