"""The scheduler's plans, the results of steps and news of requests: frozen values, no behaviour.

::

    Scheduler.schedule(now) -> SchedulerOutput      the plan of one step
    ModelBackend.execute(plan) -> StepResult        what that step sampled
    Scheduler.update(plan, result, now) -> tuple[RequestUpdate, ...]

Rows and updates are NamedTuples: a step has one per running request, and they are quickly made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.core.request import FinishReason
from paceline.core.sampling_params import SamplingParams

__all__ = [
    "DRAFT_MODEL", "BlockCopy", "BlockSwap", "Draft", "NewRequest", "RequestUpdate",
    "ScheduledRow", "SchedulerOutput", "StepNote", "StepResult", "Timeline", "TokenLogprobs",
    "WindowBlock",
]  # fmt: skip

# the source name of draft tokens that the backend's draft model makes when the step runs
DRAFT_MODEL: Final = "draft_model"


class ScheduledRow(NamedTuple):
    """One request's share of a step: positions ``[start, start + num_tokens)``."""

    request_id: str
    # first position computed in this step; everything before it is in the KV cache
    start: int
    # positions computed in this step, >= 1
    num_tokens: int
    # appended to the request's block table before the step runs
    new_block_ids: tuple[int, ...]
    # whether the last position's logits are sampled; False if known tokens come after the chunk
    samples: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: copy block ``src`` to ``dst`` and set the request's table[index] = dst. All
    copies of a plan happen, in order, before anything of that step is written."""

    request_id: str
    index: int
    src: int
    dst: int


class BlockSwap(NamedTuple):
    """Move a block's content between the KV pool and host memory."""

    src: int
    dst: int
    # True: src is a block of the pool and dst one of the host's; False: the other way
    to_host: bool


class WindowBlock(NamedTuple):
    """The window block in which layers with a sliding window keep a block's part from now on."""

    block: int
    window_block: int
    # the window block to copy from; -1: none, and the old content is to be forgotten
    source: int


class Draft(NamedTuple):
    """Draft tokens of a row: the last ``len(token_ids)`` of its positions hold these, and the
    position before them the last known token.

    After each of these positions, from the first on, a token is chosen as without drafts (by its
    own position among the request's tokens, with the draft tokens before it as history), while the
    draft token before it was right and the request's grammar can be read on. So a row yields 1 to
    ``len(token_ids)`` + 1 tokens, the same that as many steps would have yielded.
    """

    # index in ``SchedulerOutput.rows``; the row samples
    row: int
    # all below 0: the backend's draft model makes this number of tokens, or fewer
    token_ids: tuple[int, ...]
    # source of the tokens, as statistics name it: ``DRAFT_MODEL`` or another name
    source: str


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the backend holds no state for: seen first, or resumed after preemption."""

    request_id: str
    # prompt, followed by what was generated before a preemption
    token_ids: tuple[int, ...]
    # how many of token_ids are prompt (penalties and output positions need it)
    num_prompt_tokens: int
    sampling: SamplingParams
    # block table at admission, shared prefix blocks first; the row's new_block_ids is then empty
    block_ids: tuple[int, ...]
    # the backend's number of its adapter, -1 for none, and the factor on what that adds
    adapter: int = -1
    adapter_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. Valid until executed; plans are executed in ``step_id`` order.

    A backend applies, in this order: ``released``, ``swaps``, ``new_requests``, ``block_copies``,
    ``rows``. A row whose last input token was sampled by an earlier, still running step uses the
    token that step sampled: the backend keeps its own copy of each request's tokens.
    """

    step_id: int
    rows: tuple[ScheduledRow, ...]
    new_requests: tuple[NewRequest, ...]
    block_copies: tuple[BlockCopy, ...]
    # requests (finished, aborted, preempted) whose backend state is to be dropped
    released: tuple[str, ...]
    # sum of row.num_tokens
    num_tokens: int
    # in this order, before anything of this step is written
    swaps: tuple[BlockSwap, ...] = ()
    # in the order of rows; most rows have none
    drafts: tuple[Draft, ...] = ()
    # rows whose request has a grammar, for which ``StepResult.forced`` is wanted
    forces: tuple[int, ...] = ()
    # the same; () unless layers with a sliding window have blocks of their own
    window_blocks: tuple[WindowBlock, ...] = ()


class StepNote(NamedTuple):
    """Conditions under which a plan was made, for people: no backend needs any of it."""

    # token budget of the step
    budget: int
    # predicted seconds of the step beyond which best effort stays out of it; may be infinite
    limit_s: float
    # predicted seconds of the step
    predicted_s: float
    # why the head of the queue is blocked, a ``queues.wait_clocks.Reason``; None: it is not
    blocked_by: int | None
    # level of the pressure valve
    pressure: int
    # both counted after the step was planned
    num_free_blocks: int
    num_waiting: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one sampled position, from the raw logits."""

    token_id: int
    logprob: float
    # 1 is the most likely token
    rank: int
    # (token id, logprob), most likely first
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step, row for row of ``plan.rows``."""

    step_id: int
    # sampled token ids; () for rows with samples=False, for rows that failed, and for rows of
    # pooling requests, which end with their vector; several for rows with drafts
    sampled: tuple[tuple[int, ...], ...]
    # per row, one entry per sampled token; None where the request wants none. () if no request does
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    # (request id, message): requests that failed alone in this step, e.g. NaN logits
    errors: tuple[tuple[str, str], ...] = ()
    # (request id, entries of all prompt tokens but the first), with the request's first token
    prompt_logprobs: tuple[tuple[str, tuple[TokenLogprobs, ...]], ...] = ()
    # (request id, vector in little-endian float32) of pooling requests whose prompt is computed
    pooled: tuple[tuple[str, bytes], ...] = ()
    # (row, token ids) of ``plan.forces`` whose grammar leaves no choice after the sampled tokens
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # (row, token ids) of draft tokens that the backend made, as many as were verified
    made: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # for each of ``made``, known tokens that the draft model read now, and still has to; (): none
    caught_up: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    # seconds that the backend spent on this step, and before that on making draft tokens
    elapsed: float = 0.0
    drafting: float = 0.0


class Timeline(NamedTuple):
    """History of a request and reasons for it: sent with its first token, the first after each
    preemption or demotion, those of rows with drafts, and at its end, so that callers have it."""

    # (reason, seconds) spent waiting to be admitted, first or again; see ``queues.wait_clocks``
    waited: tuple[tuple[str, float], ...]
    # steps that computed more than one of its tokens
    num_chunks: int
    num_preemptions: int
    # tokens computed more than once
    num_recomputed_tokens: int
    # tokens restored from host memory instead
    num_swapped_tokens: int
    # the request was demoted because it could no longer meet a target, and not restored since
    demoted: bool
    # predicted seconds from arrival to first token, made on arrival; None: nothing was known yet
    predicted_ttft: float | None
    # (source, draft tokens verified, draft tokens that were right)
    drafts: tuple[tuple[str, int, int], ...] = ()


class RequestUpdate(NamedTuple):
    """New tokens of one request after a step, and its end."""

    request_id: str
    # ids appended in this step; may be empty when the request only ended
    new_token_ids: tuple[int, ...]
    # one entry per new token, or None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    # stop token id that ended the request, or None
    stop_reason: int | None
    # prompt tokens served from the prefix cache at first admission
    num_cached_tokens: int
    # when the request first got tokens in a plan
    first_scheduled_time: float
    num_preemptions: int
    # set with finish_reason ERROR
    error: str | None = None
    # set with any finish_reason, and with the first tokens after an admission or demotion
    timeline: Timeline | None = None
