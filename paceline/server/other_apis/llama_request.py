"""Bodies of llama-server's ``/completion`` and ``/infill`` as those of completions.

Its sampling fields are translated where they mean the same here; see docs/api.md for those that do
not. What nothing here can heed is named in the answer's header, as unknown fields are.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.core.errors import InvalidRequestError
from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.http.fields import (
    Fields,
    check_integer,
    check_number,
    check_string,
    check_token_ids,
    show,
)
from paceline.server.bodies.body import note_unknown
from paceline.server.bodies.kinds import INT32
from paceline.server.bodies.protocol import GenerationOptions, RequestRules, parse_completion
from paceline.server.bodies.sampling_fields import or_else

__all__ = [
    "METHODS",
    "NO_EFFECT",
    "OF_UNSERVED",
    "REFUSED",
    "SAMPLERS",
    "LlamaRequest",
    "Part",
    "parse_llama_completion",
    "parse_parts",
]

# a text or a token id of a prompt
Part = str | int

# what is done, in this order
SAMPLERS: Final = ("penalties", "temperature", "min_p", "top_k", "top_p")
# methods that are not there, which a list may name all the same: they do nothing unless asked to
_ABSENT: Final = frozenset({"dry", "top_n_sigma", "typ_p", "typical_p", "xtc"})
_LETTERS: Final = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
    "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip
# a method that a list leaves out is not used
_NEUTRAL: Final[dict[str, dict[str, float]]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
}
# those whose order makes no difference: each keeps the likeliest, whatever their scale
_COMMUTE: Final = ({"temperature", "top_k"}, {"min_p", "top_k"})
# understood by ``parse_completion``
_PASSED: Final = (
    "model", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
    "frequency_penalty", "ignore_eos", "json_schema", "grammar", "stream", "slo", "priority",
    "cache_salt",
)  # fmt: skip
# refused by it, where a value asks for them
METHODS: Final = (
    "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "typical_p", "tfs_z",
    "top_n_sigma",
)  # fmt: skip
# values that ask for none of it, and what it would be
REFUSED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "post_sampling_probs": (
        (False,),
        "probabilities after sampling; without it, n_probs tells those of the raw logits",
    ),
    "n_indent": ((0,), "a least indentation"),
    "min_keep": ((0, 1), "a least number of candidates"),
    "grammar_lazy": ((False,), "a grammar that begins later"),
    "grammar_triggers": (([],), "a grammar that begins later"),
    "lora": (([],), "adapters"),
}
# by name: the values that change nothing anywhere. There are no slots (the prefix cache is
# everybody's) and nothing is shifted out of a full context; others are told in the header
NO_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "id_slot": (-1,),
    "n_keep": (0,),
    "n_discard": (0,),
    "n_cache_reuse": (0,),
    "return_progress": (False,),
    "sse_ping_interval": (),
}
# of methods that are refused where they are asked for
OF_UNSERVED: Final = (
    "dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "xtc_threshold", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
# how its clients write a random seed
_RANDOM: Final = (-1, 2**32 - 1)
_NEVER: Final = -1e6
_MAX_BIAS_CHARS: Final = 1024
_MAX_FIELDS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRequest:
    """A body of ``/completion``."""

    options: GenerationOptions
    prompts: tuple[tuple[Part, ...], ...]
    # a list of prompts was given: answers are a list too
    is_list: bool
    # the answer has no tokens: the prompt is to be cached
    only_prompt: bool
    # log-probabilities of so many tokens at each place; 0: none
    n_probs: int
    return_tokens: bool
    timings_per_token: bool
    # seconds after its first token when an answer that has a new line ends; 0: never
    time_limit: float
    # None: all of them
    response_fields: tuple[str, ...] | None
    # to be tokenised: each of the text's tokens gets the bias
    text_biases: tuple[tuple[str, float], ...]
    # as it was given, for the answer
    grammar: str


def parse_llama_completion(
    body: dict[str, Any], rules: RequestRules, tenant: str = ""
) -> LlamaRequest:
    """Raises InvalidRequestError or UnknownModelError."""
    fields = Fields(body)
    prompts, is_list = _prompts(fields.raw("prompt"), rules)
    given = {name: fields.raw(name) for name in (*_PASSED, *METHODS)}
    made: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    limit = _limit(fields, rules)
    biases, text_biases = _biases(fields.raw("logit_bias"), rules)
    n_probs = or_else(fields.integer("n_probs", 0, MAX_LOGPROBS), 0)
    seed = fields.raw("seed")
    if not fields.boolean("cache_prompt", True):
        # a salt that nobody else has
        made["cache_salt"] = secrets.token_hex(16)
    samplers = _samplers(fields.raw("samplers"))
    window = fields.integer("repeat_last_n", -1, INT32)
    for name in SAMPLERS:
        if (samplers is not None and name not in samplers) or (name, window) == ("penalties", 0):
            made |= _NEUTRAL[name]
    n, completions = (fields.integer(name, 1, rules.max_choices) for name in ("n", "n_cmpl"))
    asked = parse_completion(
        made
        | {
            # texts are looked at when they are tokenised
            "prompt": [""] * len(prompts),
            "max_tokens": limit or None,
            "seed": None if seed in _RANDOM else seed,
            "logprobs": n_probs or None,
            "n": n if completions is None else completions,
            "stop": _stop(fields.raw("stop")),
        },
        rules,
        tenant,
    )
    sampling = replace(asked.options.sampling, logit_bias=tuple(biases.items()))
    _check_order(samplers, sampling)
    shown = fields.array("response_fields")
    milliseconds = fields.integer("t_max_predict_ms", -1, INT32)
    told = LlamaRequest(
        options=replace(asked.options, sampling=sampling, cuts_max_tokens=True),
        prompts=prompts,
        is_list=is_list,
        only_prompt=limit == 0,
        n_probs=n_probs,
        return_tokens=fields.boolean("return_tokens", False),
        timings_per_token=fields.boolean("timings_per_token", False),
        time_limit=max(0, or_else(milliseconds, 0)) / 1000,
        response_fields=None if shown is None else _names(shown),
        text_biases=text_biases,
        grammar=fields.string("grammar") or "",
    )
    _refuse(fields)
    ignored = [*_idle(fields, rules), *_idle_window(window, sampling, rules)]
    unknown = fields.unknown()
    note_unknown(unknown, fields.asked, strict=rules.strict_fields)
    ignored += unknown
    return replace(told, options=replace(told.options, ignored_fields=tuple(ignored)))


def parse_parts(value: Any, name: str, rules: RequestRules) -> tuple[Part, ...]:
    """One prompt: a text, or ids and texts that follow each other."""
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


def _prompts(value: Any, rules: RequestRules) -> tuple[tuple[tuple[Part, ...], ...], bool]:
    """The prompts, and whether they came as a list of them."""
    if value is None:
        raise InvalidRequestError("prompt is missing", "prompt")
    # ids and texts in one list are one prompt, and so are ids alone
    is_list = type(value) is list and not any(type(part) is int for part in value)
    if not is_list:
        return (parse_parts(value, "prompt", rules),), False
    if not 1 <= len(value) <= rules.max_prompts:
        raise InvalidRequestError(
            f"prompt holds {len(value)} prompts; 1 to {rules.max_prompts} in one request", "prompt"
        )
    return tuple(parse_parts(part, "prompt", rules) for part in value), True


def _limit(fields: Fields, rules: RequestRules) -> int | None:
    """Tokens of output; None: as many as there is place for. More than that is cut."""
    name = "max_tokens" if fields.raw("n_predict") is None else "n_predict"
    fields.raw("max_tokens")
    limit = fields.integer(name, -2, INT32)
    return None if limit is None or limit < 0 else min(limit, max(1, rules.max_model_len - 1))


def _stop(value: Any) -> Any:
    """Without the empty strings that some clients send; the rest is looked at elsewhere."""
    if type(value) is list and len(value) <= _MAX_FIELDS:
        return [text for text in value if text != ""]
    return None if value == "" else value


def _biases(
    value: Any, rules: RequestRules
) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
    """By id, and by text."""
    name = "logit_bias"
    pairs: list[Any] = []
    if type(value) is dict:
        pairs = [[int(k) if k.isdecimal() and len(k) < 11 else k, v] for k, v in value.items()]
    elif type(value) is list:
        pairs = value
    elif value is not None:
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


def _samplers(value: Any) -> list[str] | None:
    """The methods in their order; None: none were named."""
    if value is None:
        return None
    if type(value) is str:
        value = [_LETTERS.get(letter, letter) for letter in value]
    known = (*SAMPLERS, *_ABSENT)
    if type(value) is not list or any(name not in known for name in value):
        raise InvalidRequestError(
            f"samplers must be a list of some of {', '.join(sorted(known))}, got {show(value)}",
            "samplers",
        )
    if len(set(value)) < len(value):
        raise InvalidRequestError("samplers names one twice: here each is done once", "samplers")
    return [name for name in value if name in SAMPLERS]


def _check_order(samplers: list[str] | None, sampling: SamplingParams) -> None:
    """Raises InvalidRequestError if the methods that do something are named in an order that gives
    other results than the order here."""
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


def _names(values: list[Any]) -> tuple[str, ...]:
    name = "response_fields"
    if len(values) > _MAX_FIELDS:
        raise InvalidRequestError(f"{name} may hold {_MAX_FIELDS} names, got {len(values)}", name)
    return tuple(check_string(value, name, 1, 256) for value in values)


def _refuse(fields: Fields) -> None:
    for name, (harmless, what) in REFUSED.items():
        value = fields.raw(name)
        if value is not None and value not in harmless and not _weighs_nothing(name, value):
            raise InvalidRequestError(
                f"{name}={show(value)} is not served: this server does not do {what}", name
            )
    for name in OF_UNSERVED:
        fields.raw(name)


def _weighs_nothing(name: str, value: Any) -> bool:
    """Whether adapters are listed with scale 0 alone."""
    return (
        name == "lora"
        and type(value) is list
        and all(type(entry) is dict and entry.get("scale") == 0 for entry in value)
    )


def _idle(fields: Fields, rules: RequestRules) -> list[str]:
    """Names of fields that ask for what nothing here can heed, and answers do not depend on."""
    found = []
    for name, harmless in NO_EFFECT.items():
        value = fields.raw(name)
        if value is not None and value not in harmless:
            found.append(_note(name, value, rules))
    return found


def _idle_window(window: int | None, sampling: SamplingParams, rules: RequestRules) -> list[str]:
    """Penalties look at the whole context here."""
    if window is None or not 0 < window < rules.max_model_len or not _is_penalised(sampling):
        return []
    return [_note("repeat_last_n", window, rules)]


def _note(name: str, value: Any, rules: RequestRules) -> str:
    if rules.strict_fields:
        raise InvalidRequestError(
            f"{name}={show(value)} has no effect here; this server was started with "
            "--strict-fields",
            name,
        )
    return name
