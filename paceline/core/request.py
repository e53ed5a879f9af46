"""A request in three parts: the caller's request, its progress, and its history.

There are no phases. A request owns ``num_tokens`` tokens (prompt + output so far) and
``num_computed_tokens`` of them have their keys and values in the cache, or will have once the
steps already planned have run. Prefill, chunked prefill, decode, a prefix-cache hit and recompute
after preemption are all just values of that difference. ``num_pending_tokens`` counts tokens that
planned steps will sample but whose ids are not known yet: step N+1 is planned while step N runs.

This module does not know how requests are ordered, where blocks come from, or what time it is.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple

from paceline.core.drafter import Drafter
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import NO_SLO, Slo
from paceline.core.tier import Move, Tier, after, tier_of

__all__ = [
    "MOST_DRAFT_TOKENS", "ORDER", "FinishReason", "Forecast", "ForecastKind", "History", "Request",
    "RequestSpec", "RequestStatus", "ResumedOutput",
]  # fmt: skip

# most draft tokens in one row (``outputs.Draft``)
MOST_DRAFT_TOKENS: Final = 32
# the sort key of requests that wait in the policy's order
ORDER: Final = attrgetter("order")


class RequestStatus(enum.Enum):
    """Stage of a request's life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Reason for a request's end; the values are the wire names."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """Output that another engine made before for this request. The request goes on as if it had
    been preempted here: every setting that looks at output (penalties, ``min_tokens``, the grammar,
    the draws of sampling) depends on positions and tokens alone, which are the same."""

    token_ids: tuple[int, ...]
    # seconds on the clock of that engine's scheduler
    first_scheduled_time: float
    first_token_time: float


class AdapterUse(NamedTuple):
    """A request's adapter, which the backend holds as long as the request lives."""

    # 32 bytes that are equal only for equal contents and scale
    key: bytes
    # the backend's number of it
    slot: int
    # factor on what it adds
    scale: float
    # bytes that a step reads for it, and products for each token
    num_bytes: int
    num_products: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """The caller's request as the engine made it; never changes."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # seconds on the clock that drives the scheduler
    arrival_time: float
    # lower runs sooner, as in vLLM
    priority: int = 0
    # requests share cached prefix blocks only under the same salt
    cache_salt: str | None = None
    # None: the model as it is
    adapter: AdapterUse | None = None
    # seconds from arrival until its adapter was in memory and the request was added
    adapter_wait: float = 0.0
    # id of the request whose prompt this one waits for (n > 1), to share its blocks copy-on-write
    fork_of: str | None = None
    # number of forks of it that will be added next: the queue takes all of them or none
    num_forks: int = 0
    # the caller's targets
    slo: Slo = NO_SLO
    # the caller, for fairness; "" when callers are not distinguished
    tenant: str = ""
    # None: the request starts here
    resumed: ResumedOutput | None = None
    # most draft tokens in one row of it; 0: none
    max_draft_tokens: int = MOST_DRAFT_TOKENS
    # the output that the caller expects, for the most part; () if the caller gave none
    prediction_token_ids: tuple[int, ...] = ()
    # source of draft tokens from what the engine knows, for ``step.speculation`` alone to ask;
    # None: nothing is drafted for it
    drafter: Drafter | None = None


class ForecastKind(NamedTuple):
    """Kind of requests, whose forecasts share one bias."""

    tier: Tier
    priority: int
    boosted: bool
    # the first token is predicted to be late, so that the request is demoted
    late: bool
    # binary exponent of the seconds until it counts as late
    patience: int = 6


class Forecast(NamedTuple):
    """Forecast of the seconds from arrival to first token, without the bias of its kind."""

    kind: ForecastKind
    seconds: float
    # the same without overtakers; seconds that they add for each second of the wait, and how long
    alone: float
    overtaken: float
    overtaken_for: float


@dataclass(slots=True, eq=False)
class History:
    """Measurements of a request, for metrics and explanations, each written by the part of the
    scheduler that acts. No plan depends on it; only ``RequestAdmission`` reads its forecast."""

    # seconds waited so far, reason by reason (``queues.wait_clocks``)
    waits: list[float] = field(default_factory=list)
    # time since which the request waits, and the readings of the queue's clocks then
    waiting_since: float = 0.0
    waits_before: tuple[float, ...] = ()
    # tokens already computed at first admission: cached, or those of its parent
    num_found_tokens: int = 0
    # tokens that were computed before the last preemption and are not computed again yet
    num_lost_tokens: int = 0
    num_recomputed_tokens: int = 0
    # tokens restored from host memory instead
    num_restored_tokens: int = 0
    # steps that computed more than one token
    num_chunks: int = 0
    # the request was demoted, and not restored since
    demoted: bool = False
    # seconds to the first token as predicted on arrival, and the parts of that ``Forecast``
    predicted_ttft: float | None = None
    forecast: Forecast | None = None
    # draft tokens that were verified and draft tokens that were right, by source
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note_draft(self, source: str, num_verified: int, num_right: int) -> None:
        """Count draft tokens of a row, ``num_right`` of them right."""
        verified, right = self.drafts.get(source, (0, 0))
        self.drafts[source] = verified + num_verified, right + num_right


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence to generate, and its progress.

    Created by the engine from a ``RequestSpec`` alone, and owned by the scheduler from
    ``add_request`` until it is finished. ``step`` and ``queues`` move the counters, ``memory`` the
    blocks, and ``tier`` and ``targets`` change by ``move`` alone.
    """

    asked: RequestSpec
    history: History = field(default_factory=History)

    # fixed at birth, kept here to speed up the loops over all rows
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # most tokens this request can ever hold
    max_total_tokens: int = field(init=False)
    # tokens that may end it
    stop_ids: frozenset[int] = field(init=False)
    # requests with equal labels are assumed to have outputs of similar length
    label: tuple[str, int, int] = field(init=False)

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    # the stop token id that ended the output, if one did
    stop_reason: int | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    # whether the caller has been sent the timeline since it last changed
    timeline_sent: bool = False
    # prompt tokens served from the prefix cache at first admission
    num_cached_tokens: int = 0
    # the policy's key, and the key with the number of arrival; smaller runs sooner
    key: float = 0.0
    order: tuple[float, int] = (0.0, 0)
    # admissions that overtook this request while it headed the queue
    times_skipped: int = 0
    num_preemptions: int = 0

    # progress
    output_token_ids: list[int] = field(default_factory=list)
    # known tokens: prompt and output
    num_tokens: int = field(init=False)
    # prompt tokens that neither the prefix cache nor a parent had when the request arrived
    num_new_tokens: int = field(init=False)
    # tokens whose keys and values are cached, or will be once planned steps ran
    num_computed_tokens: int = 0
    # tokens that planned steps will sample, ids not known yet
    num_pending_tokens: int = 0
    # draft tokens among num_computed_tokens; until their step returns, no other is planned
    num_draft_tokens: int = 0
    # what ``keep_drafts`` was given; None: the request was never considered for drafts
    draft_state: object | None = None

    # memory: position p lives in block_ids[p // block_size]
    block_ids: list[int] = field(default_factory=list)
    # chained hash of the leading full blocks of known tokens, extended on demand
    block_hashes: list[bytes] = field(default_factory=list)
    # leading entries of block_ids already offered to, or taken from, the prefix cache
    num_hashed_blocks: int = 0
    # the block that holds the next position to write may be shared with a fork
    shares_tail: bool = False
    # host blocks that hold the first num_swapped_tokens tokens' keys and values
    host_block_ids: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0
    # indices of block_ids whose window blocks it holds, see ``memory.windows``
    window_indices: range = range(0)

    # pacing
    tier: Tier = field(init=False)
    # the caller's targets, or the policy's defaults if the caller gave none
    slo: Slo = field(init=False)
    # the targets that the scheduler still tries to meet
    targets: Slo = field(init=False)
    # seconds after which the first token is late enough for the request to be demoted
    late_after: float = field(init=False)
    # the tenant had far less than an equal share when the request arrived
    boosted: bool = False
    # the request runs on the share of best effort, and keeps slot and blocks while that lasts
    granted: bool = False
    # no ordinary request displaces it: it is granted, or late and begun, as half an answer is of no
    # use to its caller
    keeps_slot: bool = False
    # predicted final number of output tokens; valid while there are fewer
    predicted_output: int = 0

    def __post_init__(self) -> None:
        asked, sampling = self.asked, self.asked.sampling
        self.request_id = asked.request_id
        self.num_prompt_tokens = num_prompt = len(asked.prompt_token_ids)
        if (resumed := asked.resumed) is not None:
            self.output_token_ids += resumed.token_ids
            self.first_scheduled_time = resumed.first_scheduled_time
            self.first_token_time = resumed.first_token_time
        self.num_tokens = self.num_new_tokens = num_prompt + len(self.output_token_ids)
        self.max_total_tokens = num_prompt + sampling.max_tokens
        self.stop_ids = sampling.eos_token_ids | sampling.stop_token_ids
        buckets = num_prompt.bit_length(), sampling.max_tokens.bit_length()
        self.label = (asked.slo.slo_class, *buckets)
        self.tier = tier_of(asked.slo)
        self.set_targets(asked.slo)

    def set_targets(self, slo: Slo, least_ttft: float = 0.0) -> None:
        """Set the targets before the request is queued; it is not late before ``least_ttft``."""
        self.slo = self.targets = slo
        self.late_after = math.inf if slo.ttft is None else max(slo.ttft, least_ttft)

    def move(self, move: Move) -> None:
        """Change the tier by the table of ``tier``; the request must be in no sorted queue."""
        self.tier = after(self.tier, move)
        if move is Move.BOOST:
            self.boosted = True
        elif move is Move.DEMOTE:
            # the first token is late, so its target is given up
            if self.targets.ttft is not None:
                self.targets = replace(self.targets, ttft=None)
            # the caller gets the timeline with the next tokens
            self.history.demoted, self.timeline_sent = True, False
        elif move is Move.RESTORE:
            self.targets = self.slo
            self.order = (self.key, self.order[1])
            self.history.demoted = False

    def keep_drafts(self, state: object) -> None:
        """Keep the state of ``step.speculation`` for this request, which core does not read."""
        self.draft_state = state

    def lengthen(self, count: int) -> None:
        """Count ``count`` draft tokens of a planned row as computed."""
        self.num_computed_tokens += count
        self.num_draft_tokens = count

    def settle_drafts(self, *, num_wrong: int) -> None:
        """Count the wrong draft tokens of a row that has returned as not computed: the next row
        overwrites them."""
        # the caller gets the timeline with the next tokens
        self.timeline_sent = False
        # 0 if the request has ended or been preempted: its blocks are gone
        if self.num_draft_tokens:
            self.num_computed_tokens -= num_wrong
            self.num_draft_tokens = 0

    @property
    def best_effort(self) -> bool:
        """Return whether it is served from what ordinary requests leave."""
        return self.tier is not Tier.ORDINARY

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, known or pending, that still need a forward pass."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_lacking_tokens(self) -> int:
        """The same, less what a request that has not begun found in the prefix cache on arrival."""
        found = self.num_computed_tokens or self.num_prompt_tokens - self.num_new_tokens
        return self.num_tokens + self.num_pending_tokens - found
