"""Bodies that ask for vectors, parsed and checked. Names and meanings are OpenAI's and vLLM's; of
``/rerank`` also Cohere's and Jina's.

This module does not know how a body is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import CLASSIFY, EMBED, PoolingInfo, PoolingParams
from paceline.http.fields import check_string, check_token_ids, show
from paceline.server.bodies import schemas
from paceline.server.bodies.body import Body
from paceline.server.bodies.generation import GenerationBody
from paceline.server.bodies.kinds import (
    INT32,
    MODEL,
    boolean,
    check_model,
    choice,
    described,
    ignored,
    integer,
    needed,
    refused,
    string,
    token_schema,
    unread,
)
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.schemas import Schema
from paceline.server.bodies.targets import parse_slo
from paceline.server.pooling.requests import (
    Input,
    PoolingOptions,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
)

__all__ = [
    "ClassifyBody",
    "EmbeddingsBody",
    "PoolingBody",
    "RerankBody",
    "ScoreBody",
    "max_inputs",
    "parse_classify",
    "parse_embeddings",
    "parse_pooling",
    "parse_rerank",
    "parse_score",
]

# as at OpenAI
_MAX_INPUTS: Final = 2048
# of all pairs, which are written out one by one
_MAX_PAIR_CHARS: Final = 1 << 24
_TEXT_NAMES: Final = frozenset({"text", "type"})


def max_inputs(rules: RequestRules) -> int:
    """Inputs, or pairs, of one request at most."""
    return min(_MAX_INPUTS, rules.max_sequences or _MAX_INPUTS)


def _check_count(count: int, rules: RequestRules, name: str) -> None:
    most = max_inputs(rules)
    if count > most:
        raise InvalidRequestError(
            f"{name} may hold {most} at a time, got {count}: send several requests", name
        )


def _inputs(value: Any, name: str, rules: RequestRules) -> list[Input]:
    if type(value) is str or (type(value) is list and value and type(value[0]) is int):
        value = [value]
    if type(value) is not list or not value:
        raise InvalidRequestError(
            f"{name} must be a text, a list of texts, token ids or lists of them, with at least "
            f"one of these, got {show(value)}",
            name,
        )
    _check_count(len(value), rules, name)
    found: list[Input] = []
    for number, item in enumerate(value):
        where = f"{name}[{number}]"
        if type(item) is str:
            found.append(check_string(item, where, 1, None))
        elif type(item) is list and item:
            found.append(check_token_ids(item, where, rules.vocab_size))
        else:
            raise InvalidRequestError(
                f"{where} must be a text or token ids that are not empty, got {show(item)}", name
            )
    return found


def _inputs_schema(rules: RequestRules) -> Schema:
    text, ids = schemas.string(low=1), schemas.array(token_schema(rules), 1)
    lists = [schemas.array(kind, 1, max_inputs(rules)) for kind in (text, ids)]
    return {"anyOf": [text, lists[0], ids, lists[1]]}


def _texts(value: Any, name: str, rules: RequestRules) -> list[str]:
    """One text or several; each may be an object with its text."""
    values = value if type(value) is list else [value]
    if not values:
        raise InvalidRequestError(f"{name} is empty", name)
    _check_count(len(values), rules, name)
    found = []
    for place, item in enumerate(values):
        where = f"{name}[{place}]"
        text = item
        if type(item) is dict:
            text = item.get("text")
            if item.get("type", "text") != "text":
                raise InvalidRequestError(
                    f"{where}.type must be 'text', got {show(item['type'])}", name
                )
        found.append(check_string(text, where, 1, None))
    return found


def _unread_texts(value: Any) -> Iterator[str]:
    if type(value) is dict:
        yield from unread(value, _TEXT_NAMES)
    elif type(value) is list:
        for place, item in enumerate(value):
            if type(item) is dict:
                yield from unread(item, _TEXT_NAMES, f"[{place}]")


def _texts_schema(rules: RequestRules) -> Schema:
    text = schemas.string(low=1)
    one: Schema = {"anyOf": [text, schemas.record({"text": text})]}
    return {"anyOf": [one, schemas.array(one, 1, max_inputs(rules))]}


_ACTIVATIONS: Final = ("use_activation", "normalize", "activation", "softmax")
_ACTIVATION: Final = (
    "`false`: without the last function (length 1, or probabilities); several names may only say "
    "the same"
)


class _Shared(Body):
    """What all of these endpoints have in common."""

    model = MODEL
    add_special_tokens = boolean(True, note="as trained, unless `false`")
    truncate_prompt_tokens = replace(
        GenerationBody.truncate_prompt_tokens,
        note="-1: as many as the model takes; special tokens stay, and of a pair the longer text "
        "is cut first. Without it a longer input is a 400",
    )
    priority = GenerationBody.priority
    cache_salt = GenerationBody.cache_salt
    slo = GenerationBody.slo
    service_tier = replace(
        GenerationBody.service_tier,
        note="`flex` is the class `batch`, `priority` the class `interactive`; `auto`, `default` "
        "and `scale` say nothing",
    )
    safety_identifier = GenerationBody.safety_identifier
    user = GenerationBody.user
    use_activation = boolean(None, note=_ACTIVATION)
    normalize = boolean(None, note=_ACTIVATION)
    activation = boolean(None, note=_ACTIVATION)
    softmax = boolean(None, note=_ACTIVATION)
    request_id = ignored(note="`X-Request-Id` does it")

    def activates(self) -> bool | None:
        """Raises InvalidRequestError where its names say different things."""
        given = [(name, v) for name in _ACTIVATIONS if (v := getattr(self, name)) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise _contradiction(given[0], (name, value))
        return given[0][1] if given else None


class ClassifyBody(_Shared):
    """``/classify``."""

    input = needed(
        described(_inputs, _inputs_schema),
        note="a text, a list of texts, token ids, or a list of lists of them; 2,048 at a time at "
        "most",
    )
    messages = refused(
        " are not served here: /tokenize renders a conversation, and input takes its token ids",
        note="`/tokenize` renders a conversation",
    )


def _only(*values: str) -> Any:
    def check(value: Any, name: str, _: RequestRules) -> str:
        if check_string(value, name, 0, None) not in values:
            raise InvalidRequestError(
                f"{name}={show(value)} is not served: vectors are little-endian float32", name
            )
        return str(value)

    return described(check, schemas.string(*values), note="`float32`; `native` or `little`")


class EmbeddingsBody(ClassifyBody):
    """``/v1/embeddings``."""

    dimensions = integer(
        1,
        INT32,
        note="where the files say that vectors may be cut; the rest is brought to length 1",
    )
    encoding_format = choice(
        "float", "base64", default="float", note="`float`, or `base64` of little-endian float32"
    )
    embed_dtype = _only("float32")
    endianness = _only("native", "little")
    prompt_name = string(note="one of the prompts in the model's files goes before each text")


class PoolingBody(EmbeddingsBody):
    """``/pooling``."""

    task = string(note="`embed` or `classify`, which is what the model does")


_TEXTS: Final = replace(
    described(
        _texts,
        _texts_schema,
        note="texts, or objects with `text`; of several names one may be given",
    ),
    unread=_unread_texts,
)


class _Pairs(_Shared):
    max_tokens_per_doc = integer(
        1, INT32, note="documents are cut to so many tokens; not of embeddings"
    )
    instruction = string(note="where the model's template has a place for it (Qwen3-Reranker)")


class ScoreBody(_Pairs):
    """``/score``; the second text has vLLM's newer and older names too, as the first has."""

    text_1 = _TEXTS
    queries = _TEXTS
    data_1 = _TEXTS
    text_2 = _TEXTS
    documents = _TEXTS
    data_2 = _TEXTS


class RerankBody(_Pairs):
    """``/rerank``."""

    query = needed(string(1))
    documents = needed(_TEXTS)
    top_n = integer(0, INT32, note="of the best; 0 or none: all")
    return_documents = boolean(True, note="`false` leaves `document` out")


def parse_embeddings(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """``/v1/embeddings``. Raises InvalidRequestError or UnknownModelError."""
    info = _pooled(values, rules, info, EMBED, "embeddings")
    return _vectors(EmbeddingsBody.read(values, rules), rules, tenant, info)


def parse_pooling(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> VectorRequest:
    """``/pooling``: as the model is pooled. Raises like ``parse_embeddings``."""
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
    """``/classify``. Raises like ``parse_embeddings``."""
    _pooled(values, rules, info, CLASSIFY, "classes")
    body = ClassifyBody.read(values, rules)
    params = PoolingParams(use_activation=body.activates())
    return VectorRequest(inputs=body.input, options=_options(body, rules, tenant, params))


def parse_score(
    values: dict[str, Any], rules: RequestRules, tenant: str, info: PoolingInfo | None
) -> ScoreRequest:
    """``/score``: one text with each of several, or as many with as many. Raises like
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
    """``/rerank``. Raises like ``parse_embeddings``."""
    info = _pooled(values, rules, info, None, "ranks")
    _check_scores(info)
    body = RerankBody.read(values, rules)
    pairs = [(body.query, text) for text in body.documents]
    return RerankRequest(
        score=_score(values, body, rules, tenant, info, pairs, ("query", "documents[{}]")),
        documents=body.documents,
        # none and zero: all of them
        top_n=min(body.top_n or len(body.documents), len(body.documents)),
        return_documents=body.return_documents,
    )


# ---------------------------------------------------------------------- parts


def _no_vectors(model: str) -> str:
    return (
        f"The model {model} does not support embeddings, scores or classes: it generates text, and "
        "its hidden states were not trained to be compared. Serve a model whose files say how it "
        "is pooled, or this one with --runner pooling (docs/embeddings.md)."
    )


def _pooled(
    values: dict[str, Any],
    rules: RequestRules,
    info: PoolingInfo | None,
    task: str | None,
    what: str,
) -> PoolingInfo:
    """What the model gives, if that is ``task`` (None: anything); told before any other fault of
    the body. Raises InvalidRequestError, or UnknownModelError for a model that is not here."""
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
    """How an error names one of them."""
    return f"{name}[{{}}]" if len(texts) > 1 else name


def _contradiction(first: tuple[str, Any], second: tuple[str, Any]) -> InvalidRequestError:
    (one, value), (other, another) = first, second
    return InvalidRequestError(
        f"{one}={show(value)} and {other}={show(another)} mean the same here: give one of them",
        other,
    )


def _given(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    """The name that is given, and its texts; raises InvalidRequestError for none and for several
    that differ."""
    given = [(name, found) for name in names if (found := getattr(body, name)) is not None]
    if not given:
        raise InvalidRequestError(f"{names[0]} is missing", names[0])
    texts: list[str] = given[0][1]
    for name, others in given[1:]:
        if others != texts:
            raise _contradiction(given[0], (name, others))
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
    body: _Pairs,
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
        for name in ("max_tokens_per_doc", *_ACTIVATIONS):
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
    """What goes before a text."""
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
    body: _Shared, rules: RequestRules, tenant: str, params: PoolingParams
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
