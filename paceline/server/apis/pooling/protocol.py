"""Request bodies for vectors, field by field, and the parsed requests.

Names and meanings are OpenAI's and vLLM's; those of ``/rerank`` also Cohere's and Jina's. This
module does not know the model: ``parsing`` checks bodies against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from paceline.core.pooling import PoolingParams
from paceline.core.slo import Slo
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_string, check_token_ids, show
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body
from paceline.server.protocol.field_types import (
    INT32,
    MODEL,
    boolean,
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
from paceline.server.protocol.generation import GenerationBody
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import Schema

__all__ = [
    "ACTIVATIONS",
    "ClassifyBody",
    "EmbeddingsBody",
    "Input",
    "PairsBody",
    "PoolingBody",
    "PoolingOptions",
    "RerankBody",
    "RerankRequest",
    "ScoreBody",
    "ScoreRequest",
    "SharedBody",
    "VectorRequest",
    "contradiction",
    "max_inputs",
]

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


# OpenAI's maximum
_MAX_INPUTS: Final = 2048
_TEXT_NAMES: Final = frozenset({"text", "type"})


def max_inputs(rules: RequestRules) -> int:
    """Return the maximum inputs, or pairs, of one request."""
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
    """Parse one text or several; each may be an object with its text."""
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


# names of one field
ACTIVATIONS: Final = ("use_activation", "normalize", "activation", "softmax")
_ACTIVATION: Final = (
    "`false`: without the last function (length 1, or probabilities); several names may only say "
    "the same"
)


def contradiction(first: tuple[str, Any], second: tuple[str, Any]) -> InvalidRequestError:
    """Return the error for two names of one field with different values."""
    (one, value), (other, another) = first, second
    return InvalidRequestError(
        f"{one}={show(value)} and {other}={show(another)} mean the same here: give one of them",
        other,
    )


class SharedBody(Body):
    """Fields that all of these endpoints share."""

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
        """Return the common value of its names. Raises InvalidRequestError if they differ."""
        given = [(name, v) for name in ACTIVATIONS if (v := getattr(self, name)) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                raise contradiction(given[0], (name, value))
        return given[0][1] if given else None


class ClassifyBody(SharedBody):
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


class PairsBody(SharedBody):
    """Fields of pairs of texts."""

    max_tokens_per_doc = integer(
        1, INT32, note="documents are cut to so many tokens; not of embeddings"
    )
    instruction = string(note="where the model's template has a place for it (Qwen3-Reranker)")


class ScoreBody(PairsBody):
    """``/score``; both texts have vLLM's newer and older names too."""

    text_1 = _TEXTS
    queries = _TEXTS
    data_1 = _TEXTS
    text_2 = _TEXTS
    documents = _TEXTS
    data_2 = _TEXTS


class RerankBody(PairsBody):
    """``/rerank``."""

    query = needed(string(1))
    documents = needed(_TEXTS)
    top_n = integer(0, INT32, note="of the best; 0 or none: all")
    return_documents = boolean(True, note="`false` leaves `document` out")
