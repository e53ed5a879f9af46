"""The values that cross between a server and an engine.

``GenerationRequest`` goes in, ``GenerationOutput`` deltas come out. Both sides may live in one
process or in two; everything here serialises with msgspec and nothing else is ever sent. Types sent
with every token are not tracked by the garbage collector (``gc=False``): they hold values alone, so
they are in no cycle.
Times are seconds of ``time.monotonic()``, which all processes of one host share.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from paceline.core.outputs import Timeline, TokenLogprobs
from paceline.core.pooling import PoolingInfo
from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.core.sampling_params import SamplingParams
from paceline.core.slo import NO_SLO, Slo
from paceline.core.stats import SchedulerStats

__all__ = [
    "TOO_AMBIGUOUS",
    "AdapterStatus",
    "BlockStats",
    "ChoiceDelta",
    "ClassUse",
    "EngineFaults",
    "EngineInfo",
    "EngineStats",
    "GenerationOutput",
    "GenerationRequest",
    "KvSource",
    "RequestTimes",
    "Resume",
    "ResumedChoice",
    "SchedulerStats",
    "Timeline",
    "TokenLogprobs",
    "parse_kv_url",
    "tokens_per_second",
]

# error of a request whose grammar leaves too many alternatives to follow: its own fault
TOO_AMBIGUOUS: Final = "the output's grammar leaves too much open at this place"


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times of a request's events, for metrics."""

    arrival: float
    first_scheduled: float
    first_token: float
    last_token: float
    # longest time between two deliveries of tokens
    longest_gap: float = 0.0


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a choice on an earlier engine."""

    token_ids: tuple[int, ...]
    # all of it was delivered: nothing more is made
    ended: bool = False


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a request that an earlier engine delivered before it ended: the request goes on
    after that, and only new output is delivered."""

    choices: tuple[ResumedChoice, ...]
    # None: no token came, or it is unknown
    times: RequestTimes | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue ``n`` times."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # choices; choice i is sampled with seed + i and shares the prompt's blocks copy-on-write
    n: int = 1
    # strings that end the output; handled where text is made, never seen by the scheduler
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # False: no text is made (token-in/token-out callers)
    detokenize: bool = True
    arrival_time: float
    # seconds since then that it has waited for its model to be loaded
    load_wait: float = 0.0
    # lower runs sooner
    priority: int = 0
    cache_salt: str | None = None
    # the caller's targets, and the caller
    slo: Slo = NO_SLO
    tenant: str = ""
    # nothing is shown to the caller before the end
    whole: bool = False
    # most draft tokens in one row of it
    max_draft_tokens: int = MOST_DRAFT_TOKENS
    # the output that the caller expects, for the most part
    prediction: tuple[int, ...] = ()
    # its answer may be kept, to draft later ones of the same tenant and salt from it
    store: bool = True
    # None: the request starts here
    resume: Resume | None = None
    # key of a registered adapter, None for the model as it is, and the factor on what it adds
    adapter: str | None = None
    adapter_scale: float = 1.0
    # where blocks of it may be fetched
    kv_source: KvSource | None = None


class KvSource(msgspec.Struct, frozen=True, kw_only=True):
    """Another engine that has computed a part of a request's tokens."""

    # tcp://HOST:PORT
    url: str
    # of its blocks, see ``EngineInfo.kv_fingerprint``
    fingerprint: str


def parse_kv_url(url: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``. Raises ValueError for anything else."""
    parts = urlsplit(url)
    rest = parts.path, parts.query, parts.fragment, parts.username, parts.password
    # the port raises ValueError if it is not one
    if parts.scheme != "tcp" or not parts.hostname or not parts.port or any(rest):
        raise ValueError(f"{url!r} must be tcp://HOST:PORT")
    return parts.hostname, parts.port


class AdapterStatus(msgspec.Struct, frozen=True, tag="adapter", array_like=True):
    """News of one adapter, also as a message."""

    key: str
    # "resident"; "registered", not in memory now; "failed"; "gone", unloaded
    status: str
    num_bytes: int = 0
    # most ranks of a module
    rank: int = 0
    # why it failed, and the name of the error's class
    error: str = ""
    kind: str = ""
    # SHA-256 of its contents; empty: it was not loaded yet
    digest: str = ""
    # that loading took, of a resident one
    seconds: float = 0.0


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New output of one choice since the last delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    # one entry per id in token_ids, or None if not wanted
    logprobs: tuple[TokenLogprobs, ...] | None = None
    # "stop", "length", "abort" or "error" on the last delta of the choice, else None
    finish_reason: str | None = None
    # the stop string or stop token id that ended it, None for end-of-sequence
    stop_reason: int | str | None = None
    # set with finish_reason "error"
    error: str | None = None
    # set with any finish_reason, unless the engine had sent no update of it yet
    timeline: Timeline | None = None


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One delivery to the caller of ``EngineClient.generate``."""

    request_id: str
    choices: tuple[ChoiceDelta, ...]
    num_prompt_tokens: int
    # prompt tokens that came from the prefix cache
    num_cached_tokens: int
    # output tokens of all choices so far
    num_output_tokens: int
    # every choice has ended; nothing follows
    finished: bool
    times: RequestTimes | None = None
    num_preemptions: int = 0
    # for every prompt token but the first, once, if the request wants them
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # the vector of a pooling request in little-endian float32, with the end
    pooled: bytes | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a ready engine, sent once."""

    model: str
    backend: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    enable_prefix_caching: bool
    # format of the KV cache
    kv_dtype: str
    # bytes of one KV block over all layers that have no window blocks
    block_bytes: int
    # bytes of all window blocks, and their number
    window_bytes: int = 0
    num_window_blocks: int = 0
    # why these formats and this device were chosen, for people; "" where there was no choice
    choice: str = ""
    # the NUMA nodes that the engine is bound to, such as "0" or "0-3"; "": to none
    numa_nodes: str = ""
    # most sequences that wait at once; None: any number
    max_num_waiting: int | None = None
    # None: the engine generates tokens
    pooling: PoolingInfo | None = None
    # bytes for adapters; 0: the engine has none. Those that may run at once; None: any number
    adapter_bytes: int = 0
    max_adapters: int | None = None
    # what KV blocks depend on, in hexadecimal, and the port at which peers ask for them; empty and
    # 0: they are not kept, or not given away
    kv_fingerprint: str = ""
    kv_port: int = 0


class BlockStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of KV blocks that came from, or went to, outside the engine's memory."""

    # (source, result, tokens): source "disk" or "peer"; result "hit", they came; "late", after the
    # deadline; "gone", the place had them no more, or not as they were written; "error", the place
    # could not be reached
    fetched: tuple[tuple[str, str, int], ...] = ()
    # tokens given to other engines
    sent_tokens: int = 0
    # whether the store is written to; False also without one
    store_up: bool = False
    store_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    # by kind, see ``blocks.store.Counts``
    errors: tuple[tuple[str, int], ...] = ()


class EngineFaults(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of engines and their effect on requests since start."""

    # whether an engine is ready
    up: bool = True
    # engines lost by reason: "exit" (it ended), "stalled", "stopped"
    losses: tuple[tuple[str, int], ...] = ()
    # seconds from the latest loss to the next engine's readiness
    recovery_seconds: float = 0.0
    # requests sent to another engine with their output so far, and those that failed instead: after
    # too many tries, or because they had ended the engine
    num_resent: int = 0
    num_lost: int = 0
    num_poisoned: int = 0


class ClassUse(NamedTuple):
    """Use of the engine by one class of requests at one moment."""

    slo_class: str
    num_running: int
    num_waiting: int
    # entries of block tables: a shared block counts for each of its requests
    num_blocks: int


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters of one engine, up to a tenth of a second old."""

    num_bytes: int = 0
    # keys of those in memory and whether they are pinned, the last used first; and their number
    resident: tuple[tuple[str, bool], ...] = ()
    num_resident: int = 0
    # since start: loads by outcome ("loaded", "failed", "no_room") and their seconds, adapters that
    # left memory by reason ("room", "unloaded"), and seconds that requests waited for theirs
    loads: tuple[tuple[str, int], ...] = ()
    load_seconds: float = 0.0
    gone: tuple[tuple[str, int], ...] = ()
    wait_seconds: float = 0.0
    # keys of those that requests run with, and of those that only waiting requests name; the
    # busiest, and how many others
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    num_others: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, sent with every step and at least once a second when idle."""

    # time of the engine's last completed step or idle beat
    time: float
    # steps completed since start; health compares it with unfinished work
    num_steps: int
    scheduler: SchedulerStats = SchedulerStats()
    # by SLO class, up to a tenth of a second old
    classes: tuple[ClassUse, ...] = ()
    # for each step with new tokens since the last snapshot: their number, plus the whole prompts of
    # those that were first tokens
    iteration_tokens: tuple[int, ...] = ()
    # bytes of finished answers that are kept for drafts
    finished_answers_bytes: int = 0
    # None: no blocks are kept or sent
    blocks: BlockStats | None = None
    # None: the engine has none
    adapters: AdapterStats | None = None

    @classmethod
    def at_rest(cls, info: EngineInfo) -> EngineStats:
        """Return the snapshot of an engine that has done nothing yet."""
        idle = SchedulerStats(
            num_blocks=info.num_blocks,
            num_free_blocks=info.num_blocks,
            num_window_blocks=info.num_window_blocks,
            num_free_window_blocks=info.num_window_blocks,
        )
        return cls(time=0.0, num_steps=0, scheduler=idle)


def tokens_per_second(tokens: int, choices: int, seconds: float) -> float | None:
    """Return the speed of ``choices`` outputs together, ``seconds`` after their first tokens; None
    without later tokens."""
    return round((tokens - choices) / seconds, 2) if tokens > choices and seconds > 0.0 else None
