"""Sampling parameters of a sequence: validated at birth, and never looked at by the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Final

from paceline.core.grammar import Grammar
from paceline.core.pooling import PoolingParams
from paceline.errors import InvalidRequestError
from paceline.ranges import Range, outside, ranges_of

__all__ = ["MAX_BAD_WORDS", "MAX_LOGPROBS", "MAX_STOP_TOKENS", "SAMPLING", "SamplingParams"]

MAX_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 128
# number of token sequences, and of tokens in all of them together
MAX_BAD_WORDS: Final = (256, 4096)
_BIASES: Final = Range(-(10**6), 10**6)
_REPETITION: Final = Range(0, 100, above=True, too_low="greater than zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one sequence, with vLLM's meanings and, in errors, vLLM's words.

    Raises:
        InvalidRequestError: a value outside its range, with the field in ``param``.
    """

    # most tokens to generate, >= 1
    max_tokens: Annotated[int, Range(1)]
    # 0 is greedy; otherwise logits are divided by it
    temperature: Annotated[float, Range(0, 100, too_low="non-negative")] = 1.0
    # keep the k most likely tokens; 0 keeps all
    top_k: Annotated[int, Range(0, 2**31, too_low="0 (disable), or at least 1")] = 0
    # keep the smallest set whose probability reaches top_p
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    # keep tokens at least min_p times as likely as the likeliest
    min_p: Annotated[float, Range(0, 1)] = 0.0
    # subtracted from a logit once if the token is in the output
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    # subtracted from a logit once per occurrence in the output
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    # divides positive and multiplies negative logits of tokens in prompt or output
    repetition_penalty: Annotated[float, _REPETITION] = 1.0
    # (token id, bias) pairs added to the logits
    logit_bias: tuple[tuple[int, float], ...] = ()
    # sampling at output position i depends on (seed, i) alone, so a resumed request is repeatable
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    # None: no logprobs; k: the chosen token's and the k likeliest tokens'
    logprobs: Annotated[int | None, Range(0, 2**31)] = None
    # with ``logprobs``: report these tokens instead of the likeliest
    logprob_token_ids: tuple[int, ...] = ()
    # ids that end the output; the id itself is kept in the output tokens
    stop_token_ids: frozenset[int] = frozenset()
    # the model's end-of-sequence ids; empty when the caller set ignore_eos
    eos_token_ids: frozenset[int] = frozenset()
    # stop and eos ids cannot be sampled before this many output tokens
    min_tokens: Annotated[int, Range(0, too_low="greater than or equal to 0")] = 0
    # this and the rest stay out of repr, as they may be long: what the output must match
    grammar: Grammar | None = field(default=None, repr=False)
    # the only ids that may be sampled, those that end the output included; None: all
    allowed_token_ids: frozenset[int] | None = field(default=None, repr=False)
    # the last token of such a sequence is not sampled after the tokens before it
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    # None: none; k: log-probabilities of each prompt token and of the k likeliest in its place
    prompt_logprobs: Annotated[int | None, Range(0, MAX_LOGPROBS)] = field(default=None, repr=False)
    # None: the caller wants tokens; else a vector of the prompt and no token (``max_tokens`` is 1)
    pooling: PoolingParams | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, message in chain(outside(self, SAMPLING), self._faults()):
            raise InvalidRequestError(message, name)

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Yield (field, message) for each fault other than a number outside its range."""
        if self.min_tokens > self.max_tokens:
            most = f"less than or equal to max_tokens={self.max_tokens}"
            yield "min_tokens", f"min_tokens must be {most}, got {self.min_tokens}"
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            yield "allowed_token_ids", "allowed_token_ids is empty: nothing could be sampled"
        total = sum(map(len, self.bad_words))
        if len(self.bad_words) > MAX_BAD_WORDS[0] or total > MAX_BAD_WORDS[1]:
            most = f"at most {MAX_BAD_WORDS[0]} of {MAX_BAD_WORDS[1]} tokens together"
            found = f"{len(self.bad_words)} sequences of {total} tokens"
            yield "bad_words", f"bad_words come to {found}; {most}"
        if not all(self.bad_words):
            yield "bad_words", "bad_words holds an empty word"
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            num = len(self.stop_token_ids)
            yield "stop_token_ids", f"at most {MAX_STOP_TOKENS} stop_token_ids, got {num}"
        for token_id, bias in self.logit_bias:
            if token_id < 0:
                yield "logit_bias", f"logit_bias has a negative token id {token_id}"
            if bias not in _BIASES:
                yield "logit_bias", f"logit_bias for token {token_id} must be {_BIASES}, got {bias}"


SAMPLING: Final = ranges_of(SamplingParams)
