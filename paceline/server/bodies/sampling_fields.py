"""The fields of a body that say how to sample, as SamplingParams."""

from __future__ import annotations

import re
import secrets
from typing import Any, Final, TypeVar

from paceline.core.errors import InvalidRequestError
from paceline.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from paceline.http.fields import Fields, check_string, show
from paceline.server.bodies.rules import RequestRules
from paceline.server.bodies.structured import parse_structured
from paceline.server.bodies.tool_calls import ToolPlan

__all__ = [
    "INT32",
    "INT64",
    "MAX_NAMED_LOGPROBS",
    "check_logprob_bytes",
    "logprob_count",
    "or_else",
    "parse_bad_words",
    "parse_sampling",
]

INT32: Final = 2**31 - 1
INT64: Final = 2**63
_TOKEN_ID_KEY: Final = re.compile(r"[0-9]{1,10}")
_MAX_WORD_CHARS: Final = 1024
MAX_NAMED_LOGPROBS: Final = 128
# about what one takes in an answer, and all of an answer together may
_LOGPROB_BYTES: Final = 64
_MAX_LOGPROB_BYTES: Final = 64 << 20


def parse_sampling(
    fields: Fields,
    rules: RequestRules,
    max_tokens: int | None,
    logprobs: int | None,
    tools: ToolPlan | None,
) -> SamplingParams:
    """Ranges of the numbers are checked by SamplingParams itself."""
    default = rules.default_sampling
    min_tokens = or_else(fields.integer("min_tokens", -INT32, INT32), 0)
    top_k = or_else(fields.integer("top_k", -INT32, INT32), int(default.get("top_k", 0)))
    seed = fields.integer("seed", -INT64, INT64 - 1)
    stop_token_ids = fields.token_ids("stop_token_ids", rules.vocab_size) or []
    if len(stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError(
            f"stop_token_ids may hold {MAX_STOP_TOKENS} ids, got {len(stop_token_ids)}",
            "stop_token_ids",
        )
    ignore_eos = fields.boolean("ignore_eos", False)
    grammar = parse_structured(fields)
    if tools is not None:
        grammar = tools.grammar(grammar)
    if grammar is not None and ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos cannot go with {grammar.field}: the output ends where the grammar does",
            "ignore_eos",
        )
    allowed = fields.token_ids("allowed_token_ids", rules.vocab_size)
    named = fields.token_ids("logprob_token_ids", rules.vocab_size) or []
    if named and logprobs is None:
        raise InvalidRequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
    if len(named) > MAX_NAMED_LOGPROBS:
        raise InvalidRequestError(
            f"logprob_token_ids may hold {MAX_NAMED_LOGPROBS} ids, got {len(named)}",
            "logprob_token_ids",
        )
    return SamplingParams(
        max_tokens=max(1, min_tokens) if max_tokens is None else max_tokens,
        temperature=or_else(fields.number("temperature"), default.get("temperature", 1.0)),
        # -1 is 0 by another name
        top_k=0 if top_k == -1 else top_k,
        top_p=or_else(fields.number("top_p"), default.get("top_p", 1.0)),
        min_p=or_else(fields.number("min_p"), default.get("min_p", 0.0)),
        presence_penalty=or_else(fields.number("presence_penalty"), 0.0),
        frequency_penalty=or_else(fields.number("frequency_penalty"), 0.0),
        repetition_penalty=or_else(
            fields.number("repetition_penalty"), default.get("repetition_penalty", 1.0)
        ),
        logit_bias=_logit_bias(fields.object("logit_bias") or {}, rules.vocab_size),
        seed=secrets.randbits(63) if seed is None else seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(dict.fromkeys(named)),
        stop_token_ids=frozenset(stop_token_ids),
        eos_token_ids=frozenset() if ignore_eos else rules.eos_token_ids,
        min_tokens=min_tokens,
        grammar=grammar,
        allowed_token_ids=None if allowed is None else frozenset(allowed),
    )


def logprob_count(fields: Fields, name: str, rules: RequestRules) -> int | None:
    """How many tokens' log-probabilities are asked for at each place; -1 asks for all."""
    count = fields.integer(name, -INT32, INT32)
    if count is None:
        return None
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


def check_logprob_bytes(count: int | None, max_tokens: int, n: int, name: str) -> None:
    """Raises InvalidRequestError if so many log-probabilities at each place make an answer too
    large to hold."""
    told = (count or 0) * max_tokens * n * _LOGPROB_BYTES
    if told > _MAX_LOGPROB_BYTES and (count or 0) > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"{count} log-probabilities for each of up to {max_tokens} tokens of {n} choices are "
            f"about {told >> 20} MiB; {_MAX_LOGPROB_BYTES >> 20} are served: lower max_tokens",
            name,
        )


def _logit_bias(values: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in values.items():
        if not _TOKEN_ID_KEY.fullmatch(key) or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias has key {show(key)}; keys are token ids, of this model 0 to "
                f"{vocab_size - 1}",
                "logit_bias",
            )
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias of token {key} must be a number between -100 and 100, "
                f"got {show(value)}",
                "logit_bias",
            )
        pairs.append((int(key), float(value)))
    return tuple(pairs)


def parse_bad_words(values: list[Any]) -> tuple[str, ...]:
    if len(values) > MAX_BAD_WORDS[0] // 2:
        raise InvalidRequestError(
            f"bad_words may hold {MAX_BAD_WORDS[0] // 2} strings, got {len(values)}", "bad_words"
        )
    return tuple(check_string(value, "bad_words", 1, _MAX_WORD_CHARS) for value in values)


_T = TypeVar("_T")


def or_else(value: _T | None, default: _T) -> _T:
    return default if value is None else value
