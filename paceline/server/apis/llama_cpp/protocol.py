"""Bodies of llama-server's ``/completion`` and ``/infill``, turned into those of completions.

Sampling fields that mean the same here are translated; docs/use/api.md lists the others. Fields
without effect here are named in the answer's header, like unknown fields.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.errors import InvalidRequestError
from paceline.http.fields import (
    check_array,
    check_integer,
    check_number,
    check_string,
    check_token_ids,
    show,
)
from paceline.server.generation.adapters import check_places
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body, Field
from paceline.server.protocol.field_types import (
    INT32,
    anything,
    boolean,
    described,
    ignored,
    integer,
    needed,
    refused,
    string,
    token_schema,
    unheeded,
)
from paceline.server.protocol.generation import CompletionBody
from paceline.server.protocol.requests import GenerationOptions, RequestRules, parse_completion
from paceline.server.protocol.rules import NamedAdapter
from paceline.server.protocol.schemas import Schema

__all__ = [
    "SAMPLERS",
    "LlamaBody",
    "LlamaRequest",
    "Part",
    "adapter_scales",
    "parse_llama_completion",
    "parse_parts",
    "part_schema",
]

# a text or a token id of a prompt
Part = str | int

# the methods used, in this order
SAMPLERS: Final = ("penalties", "temperature", "min_p", "top_k", "top_p")
# unserved methods that a list may name: they have no effect unless their fields are set
_ABSENT: Final = frozenset({"dry", "top_n_sigma", "typ_p", "typical_p", "xtc"})
_LETTERS: Final = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip
# fields that turn off a method which a list leaves out
_NEUTRAL: Final[dict[str, dict[str, float]]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
}
# pairs whose order makes no difference: each keeps the likeliest tokens at any scale
_COMMUTE: Final = ({"temperature", "top_k"}, {"min_p", "top_k"})
# values that clients of llama-server send for a random seed
_RANDOM: Final = (-1, 2**32 - 1)
_NEVER: Final = -1e6
_MAX_BIAS_CHARS: Final = 1024
_MAX_FIELDS: Final = 64


def parse_parts(value: Any, name: str, rules: RequestRules) -> tuple[Part, ...]:
    """Parse one prompt: a text, or a sequence of ids and texts."""
    if type(value) is dict:
        if value.get("multimodal_data"):
            raise InvalidRequestError(f"{name}: this model reads text alone", name)
        value = value.get("prompt_string")
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise InvalidRequestError(
            f"{name} must be a string, or a list of strings and token ids, got {show(value)}", name
        )
    check_token_ids([part for part in value if type(part) is not str], name, rules.vocab_size)
    return tuple(value)


def _prompts(
    value: Any, name: str, rules: RequestRules
) -> tuple[tuple[tuple[Part, ...], ...], bool]:
    """Parse the prompts; also return whether they came as a list of prompts."""
    # ids and texts in one list are one prompt, and so are ids only
    is_list = type(value) is list and not any(type(part) is int for part in value)
    if not is_list:
        return (parse_parts(value, name, rules),), False
    if not 1 <= len(value) <= rules.max_prompts:
        raise InvalidRequestError(
            f"{name} holds {len(value)} prompts; 1 to {rules.max_prompts} in one request", name
        )
    return tuple(parse_parts(part, name, rules) for part in value), True


def _stop(value: Any, _name: str, _rules: RequestRules) -> Any:
    """Drop the empty strings that some clients send; the rest is checked elsewhere."""
    if type(value) is list and len(value) <= _MAX_FIELDS:
        return [text for text in value if text != ""]
    return None if value == "" else value


def _biases(
    value: Any, name: str, rules: RequestRules
) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
    """Parse biases by id, and by text."""
    pairs: list[Any] = []
    if type(value) is dict:
        pairs = [[int(k) if k.isdecimal() and len(k) < 11 else k, v] for k, v in value.items()]
    elif type(value) is list:
        pairs = value
    else:
        raise InvalidRequestError(f"{name} must be a list or an object, got {show(value)}", name)
    by_id: dict[int, float] = {}
    texts: list[tuple[str, float]] = []
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2:
            raise InvalidRequestError(f"{name} must hold [token, bias], got {show(pair)}", name)
        token, bias = pair
        bias = _NEVER if bias is False else check_number(bias, name)
        if type(token) is str:
            texts.append((check_string(token, name, 1, _MAX_BIAS_CHARS), bias))
        else:
            token = check_integer(token, name, 0, rules.vocab_size - 1)
            by_id[token] = by_id.get(token, 0.0) + bias
    if len(texts) > rules.vocab_size:
        raise InvalidRequestError(f"{name} holds {len(texts)} texts", name)
    return by_id, tuple(texts)


def _samplers(value: Any, name: str, _: RequestRules) -> list[str]:
    """Parse the methods in their order."""
    if type(value) is str:
        value = [_LETTERS.get(letter, letter) for letter in value]
    known = (*SAMPLERS, *_ABSENT)
    if type(value) is not list or any(method not in known for method in value):
        raise InvalidRequestError(
            f"{name} must be a list of some of {', '.join(sorted(known))}, got {show(value)}",
            name,
        )
    if len(set(value)) < len(value):
        raise InvalidRequestError(f"{name} names one twice: here each is done once", name)
    return [method for method in value if method in SAMPLERS]


def _names(value: Any, name: str, _: RequestRules) -> tuple[str, ...]:
    values = check_array(value, name)
    if len(values) > _MAX_FIELDS:
        raise InvalidRequestError(f"{name} may hold {_MAX_FIELDS} names, got {len(values)}", name)
    return tuple(check_string(item, name, 1, 256) for item in values)


def part_schema(rules: RequestRules) -> Schema:
    part = {"anyOf": [schemas.STRING, token_schema(rules)]}
    whole = schemas.record({"prompt_string": schemas.STRING})
    return {"anyOf": [schemas.STRING, schemas.array(part), whole]}


def _prompts_schema(rules: RequestRules) -> Schema:
    one = part_schema(rules)
    return {"anyOf": [one, schemas.array(one, 1, rules.max_prompts)]}


class AdapterScale(msgspec.Struct, frozen=True):
    """One adapter of a list, by its place in ``GET /lora-adapters``."""

    id: int
    scale: float


def _lora(value: Any, name: str, rules: RequestRules) -> dict[int, float]:
    """Return scales by place. Raises InvalidRequestError for anything else or several at once."""
    try:
        entries = msgspec.convert(value, list[AdapterScale])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"{name} must be a list of objects with id and scale: {error}", name
        ) from None
    scales = {entry.id: entry.scale for entry in entries if entry.scale}
    check_places(scales, len(rules.adapters))
    return scales


def adapter_scales(body: bytes) -> dict[int, float]:
    """Parse the body of ``POST /lora-adapters``. Raises InvalidRequestError."""
    try:
        entries = msgspec.json.decode(body, type=list[AdapterScale])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"the request body must be a list of objects with id and scale: {error}"
        ) from None
    return {entry.id: entry.scale for entry in entries}


def _adapter_of(
    body: LlamaBody, named: NamedAdapter | None, rules: RequestRules
) -> NamedAdapter | None:
    """Return the adapter of a request: its own, that of its model's name, or the one applied."""
    found = tuple(rules.adapters.values())
    if body.lora is not None:
        # an empty list is the model itself
        return next((replace(found[i], scale=scale) for i, scale in body.lora.items()), None)
    if named is not None:
        return named
    return next((replace(each, scale=each.applied) for each in found if each.applied), None)


def _undone(what: str, *harmless: Any) -> Field[None]:
    says = f"={{value}} is not served: this server does not do {what}"
    return refused(says, harmless, note=what)


def _slots(*harmless: Any) -> Field[Any]:
    return ignored(
        unless=harmless,
        note="there are no slots (the prefix cache is everybody's), and a full context ends the "
        "answer; values other than their defaults are named in the header",
    )


_STOP_TEXT: Final = schemas.string(high=1024)
_CHOICES: Final = integer(1, lambda rules: rules.max_choices)
# fields of methods that are refused if requested
_OF_METHOD: Final = ignored(note="of methods that are off")


class LlamaBody(
    Body,
    passes=(
        CompletionBody,
        (
            "model", "temperature", "top_k", "top_p", "min_p", "presence_penalty",
            "frequency_penalty", "ignore_eos", "stream", "slo", "priority", "cache_salt",
            "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "typical_p",
            "tfs_z", "top_n_sigma",
        ),
    ),
):  # fmt: skip
    """``/completion``, and ``/infill`` except its prompt."""

    prompt = needed(
        described(_prompts, _prompts_schema),
        note='a string, ids, ids and strings mixed, `{"prompt_string"}`, or a list of these; '
        "special tokens go before one that begins with a string",
    )
    n_predict = integer(
        -2,
        INT32,
        note="below 0 or absent: what the context has left; 0: the prompt is computed and cached, "
        "the answer is empty; more than the context has left is cut, and `truncated` says so",
    )
    max_tokens = anything({}, note="`n_predict`, where that is not given")
    n = n_cmpl = _CHOICES
    stop = described(_stop, {"anyOf": [_STOP_TEXT, schemas.array(_STOP_TEXT, 0, _MAX_FIELDS)]})
    seed = anything(schemas.INTEGER, note="-1 and 4294967295: a random one, which the answer tells")
    samplers = described(
        _samplers,
        {"type": ["array", "string", "null"]},
        note="what is left out is not done; an order that gives other results than penalties, "
        "temperature, min_p, top_k, top_p is a 400",
    )
    repeat_penalty = anything(
        CompletionBody.repetition_penalty.schema,
        note="over the whole context, as the other penalties are over the output",
    )
    repeat_last_n = integer(
        -1,
        INT32,
        note="0: no penalties; another than -1 beside penalties is named in the header: they look "
        "at the whole context",
    )
    logit_bias = described(
        _biases,
        {"anyOf": [schemas.OBJECT, schemas.array({"type": "array", "minItems": 2, "maxItems": 2})]},
        note='`[[id, bias]]`, `[["text", bias]]` (each of its tokens), `[[id, false]]` (never), '
        '`{"id or text": bias}`',
    )
    n_probs = integer(0, MAX_LOGPROBS, 0, note="20 at most, of the raw logits")
    json_schema = anything({"type": ["object", "string", "boolean"]}, note="a schema or its text")
    grammar = string(note="GBNF or Lark")
    cache_prompt = boolean(
        True,
        note="false: nothing cached is used for it, and what it leaves is used by no other request",
    )
    return_tokens = boolean(note="streams always have their tokens")
    timings_per_token = boolean()
    response_fields = described(
        _names, schemas.array(schemas.string(low=1, high=256), 0, _MAX_FIELDS)
    )
    t_max_predict_ms = integer(
        -1,
        INT32,
        0,
        note="ends an answer with a whole line after that time; `stop_type` is `limit`",
    )
    id_slot = _slots(-1)
    n_keep = n_discard = n_cache_reuse = _slots(0)
    return_progress = _slots(False)
    sse_ping_interval = _slots()
    # fields of methods that are refused if requested
    dynatemp_exponent = _OF_METHOD
    dry_base = _OF_METHOD
    dry_allowed_length = _OF_METHOD
    dry_penalty_last_n = _OF_METHOD
    dry_sequence_breakers = _OF_METHOD
    xtc_threshold = _OF_METHOD
    mirostat_tau = _OF_METHOD
    mirostat_eta = _OF_METHOD
    post_sampling_probs = _undone(
        "probabilities after sampling; without it, n_probs tells those of the raw logits", False
    )
    n_indent = _undone("a least indentation", 0)
    min_keep = _undone("a least number of candidates", 0, 1)
    grammar_lazy = _undone("a grammar that begins later", False)
    grammar_triggers = _undone("a grammar that begins later", [])
    lora = described(
        _lora,
        schemas.array(schemas.record({"id": schemas.INTEGER, "scale": {"type": "number"}})),
        note="at most one with a scale other than 0; an empty list: the model itself",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRequest:
    """A body of ``/completion``."""

    options: GenerationOptions
    prompts: tuple[tuple[Part, ...], ...]
    # a list of prompts was given: answers are a list too
    is_list: bool
    # cache the prompt; the answer has no tokens
    only_prompt: bool
    # log-probabilities at each position; 0: none
    n_probs: int
    return_tokens: bool
    timings_per_token: bool
    # seconds after its first token when an answer with a complete line ends; 0: never
    time_limit: float
    # None: all fields
    response_fields: tuple[str, ...] | None
    # each token of the text gets the bias
    text_biases: tuple[tuple[str, float], ...]
    # the given text, for the answer
    grammar: str


def parse_llama_completion(
    values: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> LlamaRequest:
    """Parse a body. Raises InvalidRequestError or UnknownModelError."""
    body = LlamaBody.read(values, rules)
    prompts, is_list = body.prompt
    made = body.passed()
    for name, given in (
        ("repeat_penalty", body.repeat_penalty),
        ("json_schema", body.json_schema),
        ("grammar", body.grammar),
    ):
        if given is not None:
            made[name] = given
    limit = _limit(body, rules)
    biases, text_biases = body.logit_bias or ({}, ())
    if not body.cache_prompt:
        # a salt that no other request has
        made["cache_salt"] = secrets.token_hex(16)
    samplers, window = body.samplers, body.repeat_last_n
    for name in SAMPLERS:
        if (samplers is not None and name not in samplers) or (name, window) == ("penalties", 0):
            made |= _NEUTRAL[name]
    asked = parse_completion(
        made
        | {
            # placeholders; the texts are tokenised later
            "prompt": [""] * len(prompts),
            "max_tokens": limit or None,
            "seed": None if body.seed in _RANDOM else body.seed,
            "logprobs": body.n_probs or None,
            "n": body.n if body.n_cmpl is None else body.n_cmpl,
            "stop": body.stop,
        },
        rules,
        tenant,
    )
    sampling = replace(asked.options.sampling, logit_bias=tuple(biases.items()))
    _check_order(samplers, sampling)
    ignored_fields = (*body.ignored_fields, *_idle_window(window, sampling, rules))
    return LlamaRequest(
        options=replace(
            asked.options,
            sampling=sampling,
            cuts_max_tokens=True,
            ignored_fields=ignored_fields,
            adapter=_adapter_of(body, asked.options.adapter, rules),
        ),
        prompts=prompts,
        is_list=is_list,
        only_prompt=limit == 0,
        n_probs=body.n_probs,
        return_tokens=body.return_tokens,
        timings_per_token=body.timings_per_token,
        time_limit=max(0, body.t_max_predict_ms) / 1000,
        response_fields=body.response_fields,
        text_biases=text_biases,
        grammar=body.grammar or "",
    )


def _limit(body: LlamaBody, rules: RequestRules) -> int | None:
    """Return the maximum of output tokens, cut to the context; None: as many as fit."""
    limit = body.n_predict
    if limit is None and body.max_tokens is not None:
        limit = check_integer(body.max_tokens, "max_tokens", -2, INT32)
    return None if limit is None or limit < 0 else min(limit, max(1, rules.max_model_len - 1))


def _check_order(samplers: list[str] | None, sampling: SamplingParams) -> None:
    """Raise InvalidRequestError if the methods in use are named in an order that gives other
    results than the order here."""
    penalised = _is_penalised(sampling)
    active = {"penalties"} if penalised else set()
    if sampling.temperature > 0.0:
        active |= {"temperature"} if sampling.temperature != 1.0 else set()
        active |= {"min_p"} if sampling.min_p > 0.0 else set()
        active |= {"top_k"} if sampling.top_k > 0 else set()
        active |= {"top_p"} if sampling.top_p < 1.0 else set()
    order = [name for name in samplers or () if name in active]
    for place, first in enumerate(order):
        for second in order[place + 1 :]:
            if SAMPLERS.index(first) > SAMPLERS.index(second) and {first, second} not in _COMMUTE:
                raise InvalidRequestError(
                    f"samplers has {first} before {second}, and here it comes after: leave "
                    f"samplers out, or give the order that is served, {', '.join(SAMPLERS)}",
                    "samplers",
                )


def _is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _idle_window(window: int | None, sampling: SamplingParams, rules: RequestRules) -> list[str]:
    """Report ``repeat_last_n`` as without effect: penalties cover the whole context here."""
    if window is None or not 0 < window < rules.max_model_len or not _is_penalised(sampling):
        return []
    unheeded(window, "repeat_last_n", rules)
    return ["repeat_last_n"]
