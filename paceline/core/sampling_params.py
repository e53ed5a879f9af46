"""How one sequence is sampled: validated at birth, and never looked at by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import InvalidRequestError
from paceline.core.grammar import Grammar

__all__ = ["MAX_BAD_WORDS", "MAX_LOGPROBS", "MAX_STOP_TOKENS", "SamplingParams"]

MAX_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 128
# token sequences, and tokens of all of them together
MAX_BAD_WORDS: Final = (256, 4096)
_SEED_RANGE: Final = 2**63


def _require(ok: bool, message: str, param: str) -> None:
    if not ok:
        raise InvalidRequestError(message, param)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence is sampled. Validated at birth; every field has vLLM's meaning.

    Raises:
        InvalidRequestError: a value outside its range, with the field in ``param``.
    """

    # tokens to generate at most, >= 1
    max_tokens: int
    # 0 is greedy; otherwise logits are divided by it
    temperature: float = 1.0
    # keep the k most likely tokens; 0 keeps all
    top_k: int = 0
    # keep the smallest set whose probability reaches top_p
    top_p: float = 1.0
    # keep tokens at least min_p times as likely as the likeliest
    min_p: float = 0.0
    # subtracted from a logit once if the token is in the output
    presence_penalty: float = 0.0
    # subtracted from a logit once per occurrence in the output
    frequency_penalty: float = 0.0
    # divides positive and multiplies negative logits of tokens in prompt or output
    repetition_penalty: float = 1.0
    # (token id, bias) pairs added to the logits
    logit_bias: tuple[tuple[int, float], ...] = ()
    # sampling at output position i depends on (seed, i) alone, so a resumed request repeats itself
    seed: int = 0
    # None: no logprobs; k: the chosen token's and the k likeliest tokens'
    logprobs: int | None = None
    # ids that end the output; the id itself is kept in the output tokens
    stop_token_ids: frozenset[int] = frozenset()
    # the model's end-of-sequence ids; empty when the caller set ignore_eos
    eos_token_ids: frozenset[int] = frozenset()
    # stop and eos ids cannot be sampled before this many output tokens
    min_tokens: int = 0
    # the following stay out of repr: they may be long, and no plan depends on them
    # what the output must look like
    grammar: Grammar | None = field(default=None, repr=False)
    # nothing else is sampled, not even what ends the output; None: everything may be
    allowed_token_ids: frozenset[int] | None = field(default=None, repr=False)
    # the last token of such a sequence is not sampled after its others
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    # None: none; k: of each prompt token its own and the k likeliest tokens' log-probabilities
    prompt_logprobs: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        finite = (-1e6, 1e6)
        _require(
            self.max_tokens >= 1,
            f"max_tokens must be at least 1, got {self.max_tokens}",
            "max_tokens",
        )
        _require(
            0.0 <= self.temperature <= 100.0,
            f"temperature must be between 0 and 100, got {self.temperature}",
            "temperature",
        )
        _require(
            0 <= self.top_k <= 2**31,
            f"top_k must be 0 (off) or positive, got {self.top_k}",
            "top_k",
        )
        _require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}", "min_p")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}", name)
        _require(
            0.0 < self.repetition_penalty <= 100.0,
            f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}",
            "repetition_penalty",
        )
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must be between 0 and max_tokens={self.max_tokens}, got {self.min_tokens}",
            "min_tokens",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}",
            "logprobs",
        )
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.prompt_logprobs}",
            "prompt_logprobs",
        )
        _require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids is empty: nothing could be sampled",
            "allowed_token_ids",
        )
        total = sum(map(len, self.bad_words))
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS[0] and total <= MAX_BAD_WORDS[1],
            f"bad_words come to {len(self.bad_words)} sequences of {total} tokens; at most "
            f"{MAX_BAD_WORDS[0]} of {MAX_BAD_WORDS[1]} tokens together",
            "bad_words",
        )
        _require(all(self.bad_words), "bad_words holds an empty word", "bad_words")
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            f"at most {MAX_STOP_TOKENS} stop_token_ids, got {len(self.stop_token_ids)}",
            "stop_token_ids",
        )
        _require(
            -_SEED_RANGE <= self.seed < _SEED_RANGE,
            f"seed must fit in 64 bits, got {self.seed}",
            "seed",
        )
        for token_id, bias in self.logit_bias:
            _require(token_id >= 0, f"logit_bias has a negative token id {token_id}", "logit_bias")
            _require(
                finite[0] <= bias <= finite[1],
                f"logit_bias for token {token_id} is {bias}",
                "logit_bias",
            )
