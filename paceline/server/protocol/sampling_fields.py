"""The fields of a body that control sampling, as SamplingParams."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

from paceline.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    SAMPLING,
    SamplingParams,
)
from paceline.errors import InvalidRequestError
from paceline.http.fields import check_array, check_integer, check_object, check_string, show
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body, Field, OtherName
from paceline.server.protocol.field_types import (
    INT32,
    INT64,
    boolean,
    described,
    integer,
    number,
    token_ids,
    whole,
)
from paceline.server.protocol.rules import RequestRules
from paceline.server.protocol.schemas import Schema
from paceline.server.protocol.structured import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    parse_structured,
)
from paceline.server.protocol.tool_calls import ToolPlan

__all__ = [
    "SamplingBody",
    "check_logprob_bytes",
    "logprobs_of",
    "or_else",
    "parse_sampling",
]

_TOKEN_ID_KEY: Final = re.compile(r"[0-9]{1,10}")
_MAX_WORD_CHARS: Final = 1024
_MAX_WORDS: Final = MAX_BAD_WORDS[0] // 2
_MAX_NAMED_LOGPROBS: Final = 128
# estimated size of one log-probability in an answer, and limit of their sum, bytes
_LOGPROB_BYTES: Final = 64
_MAX_LOGPROB_BYTES: Final = 64 << 20


def _logit_bias(value: Any, name: str, rules: RequestRules) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in check_object(value, name).items():
        if not _TOKEN_ID_KEY.fullmatch(key) or int(key) >= rules.vocab_size:
            raise InvalidRequestError(
                f"{name} has key {show(key)}; keys are token ids, of this model 0 to "
                f"{rules.vocab_size - 1}",
                name,
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequestError(
                f"{name} of token {key} must be a number between -100 and 100, got {show(bias)}",
                name,
            )
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def _bad_words(value: Any, name: str, _: RequestRules) -> tuple[str, ...]:
    words = check_array(value, name)
    if len(words) > _MAX_WORDS:
        raise InvalidRequestError(f"{name} may hold {_MAX_WORDS} strings, got {len(words)}", name)
    return tuple(check_string(word, name, 1, _MAX_WORD_CHARS) for word in words)


def _logprob_count(value: Any, name: str, rules: RequestRules) -> int:
    """Return the number of log-probabilities at each position; -1 requests all."""
    count = check_integer(value, name, -INT32, INT32)
    if count < -1:
        raise InvalidRequestError(f"{name} must be non-negative or -1, got {count}", name)
    wanted = rules.vocab_size if count == -1 else count
    if wanted > rules.max_logprobs:
        asks = f"asks for all {wanted} of the vocabulary" if count == -1 else "is too many"
        raise InvalidRequestError(
            f"{name}={count} {asks}: this server tells {rules.max_logprobs} at most "
            "(--max-logprobs)",
            name,
        )
    return wanted


def _logprob_schema(rules: RequestRules) -> Schema:
    # -1 is allowed where the server's maximum is the vocabulary
    told_all = rules.max_logprobs >= rules.vocab_size
    return schemas.integer(-1 if told_all else 0, rules.max_logprobs)


def logprobs_of(note: str) -> Field[int | None]:
    """A field with the number of log-probabilities at each position."""
    return described(_logprob_count, _logprob_schema, note=note)


class SamplingBody(Body):
    """The sampling fields, by name, of every body that generates.

    SamplingParams itself checks the ranges of the numbers, so that its messages apply.
    """

    temperature = number(
        SAMPLING["temperature"],
        note="absent: the model's (generation_config.json, a GGUF file's general.sampling keys); "
        "of the default model 0.2 and 0.9, as its card says, with a repetition penalty of 1.05",
    )
    top_p = number(SAMPLING["top_p"], note="as `temperature`")
    top_k = integer(-INT32, INT32, note="-1 and 0: all", schema=schemas.integer(-1, INT32))
    min_p = number(SAMPLING["min_p"])
    presence_penalty = number(SAMPLING["presence_penalty"])
    frequency_penalty = number(SAMPLING["frequency_penalty"])
    repetition_penalty = number(SAMPLING["repetition_penalty"])
    repeat_penalty = OtherName("repetition_penalty")
    logit_bias = described(
        _logit_bias,
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": schemas.number(-100, 100),
        },
    )
    seed = integer(-INT64, INT64 - 1)
    stop_token_ids = token_ids(0, MAX_STOP_TOKENS)
    ignore_eos = boolean()
    min_tokens = whole(SAMPLING["min_tokens"])
    min_new_tokens = OtherName("min_tokens")
    prompt_logprobs = integer(
        0,
        MAX_LOGPROBS,
        note="not streamed, prompts of up to 1024 tokens, which then share no cache",
    )
    logprob_token_ids = token_ids(
        0, _MAX_NAMED_LOGPROBS, note="log-probabilities of these instead of the likeliest"
    )
    allowed_token_ids = token_ids(1)
    bad_words = described(
        _bad_words,
        schemas.array(schemas.string(low=1, high=_MAX_WORD_CHARS), 0, _MAX_WORDS),
        note=f"{_MAX_WORDS} words; as the tokenizer spells them at the start and after a space",
    )
    response_format = RESPONSE_FORMAT
    structured_outputs = STRUCTURED_OUTPUTS
    json_schema = OtherName("structured_outputs", "json")
    grammar = OtherName("structured_outputs", "grammar")
    ebnf = OtherName("structured_outputs", "grammar")
    regex = OtherName("structured_outputs", "regex")


def parse_sampling(
    body: SamplingBody,
    rules: RequestRules,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    tools: ToolPlan | None,
) -> SamplingParams:
    default = rules.default_sampling
    min_tokens = or_else(body.min_tokens, 0)
    top_k = or_else(body.top_k, int(default.get("top_k", 0)))
    grammar = parse_structured(body.response_format, body.structured_outputs)
    if tools is not None:
        grammar = tools.grammar(grammar)
    if grammar is not None and body.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos cannot go with {grammar.field}: the output ends where the grammar does",
            "ignore_eos",
        )
    allowed = body.allowed_token_ids
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
    return SamplingParams(
        max_tokens=max(1, min_tokens) if max_tokens is None else max_tokens,
        temperature=or_else(body.temperature, default.get("temperature", 1.0)),
        # -1 means 0
        top_k=0 if top_k == -1 else top_k,
        top_p=or_else(body.top_p, default.get("top_p", 1.0)),
        min_p=or_else(body.min_p, default.get("min_p", 0.0)),
        presence_penalty=or_else(body.presence_penalty, 0.0),
        frequency_penalty=or_else(body.frequency_penalty, 0.0),
        repetition_penalty=or_else(body.repetition_penalty, default.get("repetition_penalty", 1.0)),
        logit_bias=body.logit_bias or (),
        seed=rules.draw_seed() if body.seed is None else body.seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(dict.fromkeys(body.logprob_token_ids or ())),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        eos_token_ids=frozenset() if body.ignore_eos else rules.eos_token_ids,
        min_tokens=min_tokens,
        grammar=grammar,
        allowed_token_ids=None if allowed is None else frozenset(allowed),
        prompt_logprobs=prompt_logprobs,
    )


def check_logprob_bytes(count: int | None, max_tokens: int, n: int, name: str) -> None:
    """Raise InvalidRequestError if that many log-probabilities make an answer too large to hold."""
    num_bytes = (count or 0) * max_tokens * n * _LOGPROB_BYTES
    if num_bytes > _MAX_LOGPROB_BYTES and (count or 0) > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"{count} log-probabilities for each of up to {max_tokens} tokens of {n} choices are "
            f"about {num_bytes >> 20} MiB; {_MAX_LOGPROB_BYTES >> 20} are served: lower max_tokens",
            name,
        )


_T = TypeVar("_T")


def or_else(value: _T | None, default: _T) -> _T:
    return default if value is None else value
