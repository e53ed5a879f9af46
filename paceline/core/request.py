"""A request and its counters.

There are no phases. A request owns ``num_tokens`` tokens (prompt + output so far) and
``num_computed_tokens`` of them have their keys and values in the cache, or will have once the
steps already planned have run. Prefill, chunked prefill, decode, a prefix-cache hit and recompute
after preemption are all just values of that difference. ``num_pending_tokens`` counts tokens that
planned steps will sample but whose ids are not known yet; with it, step N+1 can be planned while
step N runs.

This module does not know how requests are ordered, where blocks come from, or what time it is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import InvalidRequestError
from paceline.core.grammar import Grammar
from paceline.core.slo import NO_SLO, Slo

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKENS",
    "Band",
    "FinishReason",
    "Request",
    "RequestStatus",
    "SamplingParams",
]

MAX_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 128
# token sequences, and tokens of all of them together
MAX_BAD_WORDS: Final = (256, 4096)
_SEED_RANGE: Final = 2**63


class RequestStatus(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Band(enum.IntEnum):
    """What a request has to lose by waiting; whoever has more goes first."""

    # the targets of whoever is not best effort
    ORDINARY = 0
    # best effort: what was promised beside that
    PROMISED = 1
    # targets that it has missed, or cannot meet any more
    RELEGATED = 2
    # best effort without any target: nobody waits for it
    BACKGROUND = 3


class FinishReason(enum.Enum):
    """Why a request ended; the values are the wire names."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


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


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to generate, with the counters the scheduler moves.

    Created by the engine, owned by the scheduler from ``add_request`` until it is finished; only
    the scheduler and its KV cache manager change it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # seconds on the clock that drives the scheduler
    arrival_time: float
    # lower runs sooner, as in vLLM
    priority: int = 0
    # requests share cached prefix blocks only under the same salt
    cache_salt: str | None = None
    # id of the request whose prompt this one shares (n > 1): it waits for the parent's prompt and
    # then takes over its blocks copy-on-write
    fork_of: str | None = None
    # forks of it that will be added next: the queue has places for all of them or takes none
    num_forks: int = 0
    # what the caller needs
    slo: Slo = NO_SLO
    # who asks, for fairness; "" when callers are not told apart
    tenant: str = ""
    # its tenant had far less than an equal share when it came, under a policy that minds: set by
    # the scheduler
    favoured: bool = False

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    # known tokens: prompt and output
    num_tokens: int = field(init=False)
    # most tokens this request can ever hold
    max_total_tokens: int = field(init=False)
    # of the prompt, tokens that were not in the prefix cache when it came, or that its parent has
    # not computed; set by the scheduler
    num_new_tokens: int = field(init=False)
    # tokens that may end it
    stop_ids: frozenset[int] = field(init=False)
    # those who have the same are taken to have outputs of similar length
    label: tuple[str, int, int] = field(init=False)
    # tokens whose keys and values are cached, or will be once planned steps ran
    num_computed_tokens: int = 0
    # tokens that planned steps will sample, ids not known yet
    num_pending_tokens: int = 0
    # block table: position p lives in block_ids[p // block_size]
    block_ids: list[int] = field(default_factory=list)
    # chained hash of the leading full blocks of known tokens, extended on demand
    block_hashes: list[bytes] = field(default_factory=list)
    # leading entries of block_ids already offered to, or taken from, the prefix cache
    num_hashed_blocks: int = 0
    # the block that holds the next position to be written may be shared with a fork
    shares_tail: bool = False
    # the policy's key and the order of arrival; smaller runs sooner. Set by the scheduler
    order: tuple[float, int] = (0.0, 0)
    finish_reason: FinishReason | None = None
    # host blocks that hold the first num_swapped_tokens tokens' keys and values
    host_block_ids: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0
    # of its blocks, those brought back from there ahead of its turn; and whether that was tried
    # since it was moved there
    num_fetched_blocks: int = 0
    was_fetched: bool = False
    # the stop token id that ended the output, if one did
    stop_reason: int | None = None

    # accounting, for metrics and explanations
    num_cached_tokens: int = 0
    # tokens that were there when it was first let in, cached or another one's
    num_found_tokens: int = 0
    num_preemptions: int = 0
    # tokens that were computed when last preempted and are not computed again yet
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    # steps in a row in which a running best-effort request got nothing
    num_skipped_steps: int = 0
    # seconds for which it was the first of best effort to wait, and held up by others
    seconds_first: float = 0.0
    # it was best effort until that had lasted too long (``patience``)
    promoted: bool = False
    # admissions that overtook this request while it headed the queue
    times_bypassed: int = 0
    num_restored_tokens: int = 0
    num_chunks: int = 0
    # whether its caller has been told all this since it last changed
    told: bool = False
    relegated: bool = False
    predicted_ttft: float | None = None
    # what the forecast had been multiplied by
    forecast_bias: float = 1.0
    # predicted final number of output tokens; valid while there are fewer
    predicted_output: int = 0
    # since when it waits, and what the queue had been held up by until then
    waiting_since: float = 0.0
    waits_before: tuple[float, ...] = ()
    # seconds waited so far, reason by reason (``core.waits.REASONS``)
    waits: list[float] = field(default_factory=list)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.num_new_tokens = self.num_prompt_tokens
        self.max_total_tokens = self.num_prompt_tokens + self.sampling.max_tokens
        self.stop_ids = self.sampling.eos_token_ids | self.sampling.stop_token_ids
        self.label = (
            self.slo.slo_class,
            self.num_prompt_tokens.bit_length(),
            self.sampling.max_tokens.bit_length(),
        )

    @property
    def band(self) -> Band:
        """What it has to lose by waiting."""
        slo = self.slo
        if not slo.best_effort:
            return Band.ORDINARY
        if self.relegated:
            return Band.RELEGATED
        return Band.BACKGROUND if slo.background else Band.PROMISED

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, known or pending, that still need a forward pass."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_lacking_tokens(self) -> int:
        """The same, less what a request that has not begun will find in the prefix cache, as far as
        was known when it came."""
        found = self.num_computed_tokens or self.num_prompt_tokens - self.num_new_tokens
        return self.num_tokens + self.num_pending_tokens - found

    def append_output(self, token_id: int) -> FinishReason | None:
        """Add one sampled token. Returns why the output ends with it, or None if it goes on."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1
        num_output = self.num_tokens - self.num_prompt_tokens
        if token_id in self.stop_ids and num_output >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total_tokens else None

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Known tokens ``[start, stop)`` of prompt + output."""
        prompt = self.num_prompt_tokens
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]
