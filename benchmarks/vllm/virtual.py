"""vLLM's real scheduler classes without a model, on a virtual clock. Run by vLLM's environment.

``AsyncScheduler``, ``KVCacheManager`` and ``Request`` are vLLM's own. A step takes the time that an
8B model takes on an H100, roughly: 6 ms, 42 us a token, and 0.022 us for each key that a row
reads; two steps are in flight, as in vLLM's engine. ``CPU`` is a server on two cores instead, where
any prompt makes a step long. Time in Python does not count as virtual time: it is measured apart.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import sys
import tempfile
import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from paceline.vllm.scheduler import PacedScheduler

BLOCK_SIZE = 16
MAX_LENGTH = 8192
# times that a refused caller comes back
MOST_RETURNS = 10
TPOT = 0.025


class Kind(NamedTuple):
    """A machine, and what it is asked for; times are in seconds."""

    # of a step, of a token, of a key that a row reads, of a row of one token beyond that, and of a
    # step that has any other row
    step: float
    token: float
    key: float
    row: float
    prompt: float
    # lengths of short prompts, of long ones, and of outputs
    short: tuple[int, int]
    long: tuple[int, int]
    outputs: tuple[int, int]
    # to the first token of either
    ttft: tuple[float, float]
    # steps in flight
    depth: int


GPU = Kind(
    6e-3, 42e-6, 0.022e-6, 0.0, 0.0, (64, 768), (2_000, 3_500), (32, 256), (0.5, 3.0), depth=2
)
CPU = Kind(
    30e-3, 0.6e-3, 0.0, 1.4e-3, 40e-3, (32, 256), (600, 1_200), (16, 64), (2.0, 2.0), depth=1
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One run. ``scheduler`` is "vllm" or "paced"."""

    scheduler: str
    # arrivals a second, and how many; 0 a second: all at once
    rate: float
    count: int = 1_500
    # whether the machine is ``CPU``
    cpu: bool = False
    seed: int = 0
    # vLLM's --max-num-batched-tokens and --max-num-seqs
    tokens: int = 8192
    seqs: int = 256
    blocks: int = 30_000
    # target of a token after the first, s
    tpot: float = TPOT
    # shares of requests that are aborted at some time, and that begin like others
    aborted: float = 0.0
    shared: float = 0.0
    # lengths of prompts and outputs; None: short ones, and 15 % long ones
    lengths: tuple[int, int] | None = None
    # whether each step is compared with the plan, and all counters with vLLM's
    checks: bool = False
    # arrivals a second of another tenant, which are not counted
    flood: float = 0.0
    # whether refused callers come back when they were told to
    returns: bool = False
    # of ``--additional-config``
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    # only steps with so many waiting count for the time in Python; None: all
    waiting: tuple[int, int] | None = None

    @property
    def kind(self) -> Kind:
        return CPU if self.cpu else GPU


class Clock:
    """The virtual time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Job:
    """One request, and what came of it."""

    request: Any
    arrival: float
    prompt: int
    output: int
    ttft: float
    tpot: float
    abort_after: float | None
    judged: bool = True
    refusals: int = 0
    # whether it was served when it first came back after the last arrival; None: it did not
    taken: bool | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    @property
    def kept(self) -> bool:
        """Return whether both targets were met."""
        each = (self.last - self.first) / max(1, len(self.tokens) - 1)
        complete = len(self.tokens) == self.output
        return complete and self.first - self.arrival <= self.ttft and each <= self.tpot


class Own:
    """The seconds that vLLM's own methods took, of which a paced step calls one each."""

    seconds = 0.0


def _timed(name: str) -> None:
    method = getattr(AsyncScheduler, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            Own.seconds += time.perf_counter() - began

    setattr(AsyncScheduler, name, call)


def config_of(folder: Path, case: Case) -> VllmConfig:
    """Return vLLM's configuration for a model of which only ``config.json`` exists."""
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": MAX_LENGTH, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=MAX_LENGTH, dtype="bfloat16",
        max_num_batched_tokens=case.tokens, max_num_seqs=case.seqs, block_size=BLOCK_SIZE,
        enable_prefix_caching=True, async_scheduling=True,
        additional_config={"paceline": case.settings},
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = case.blocks
    return config


def scheduler_of(config: VllmConfig, case: Case, clock: Clock) -> Any:
    """Return vLLM's scheduler or ours, over blocks that hold nothing."""
    import torch

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    cache = KVCacheConfig(
        num_blocks=case.blocks, kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )  # fmt: skip

    class Paced(PacedScheduler):
        pass

    Paced.clock = Paced.wall = staticmethod(clock)
    kind = Paced if case.scheduler == "paced" else AsyncScheduler
    return kind(
        vllm_config=config, kv_cache_config=cache, block_size=BLOCK_SIZE,
        structured_output_manager=StructuredOutputManager(config), log_stats=True,
    )  # fmt: skip


def jobs_of(case: Case) -> Iterator[Job]:
    """Yield the requests in the order of arrival: the same for every scheduler."""
    yield from _tenant(case, "light" if case.flood else "", case.rate, case.count, case.seed)
    if case.flood:
        count = int(case.count * case.flood / case.rate)
        yield from _tenant(case, "flood", case.flood, count, case.seed + 1_000)


def _tenant(case: Case, tenant: str, rate: float, count: int, seed: int) -> Iterator[Job]:
    chance = random.Random(seed)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    prefix = [chance.randrange(32_000) for _ in range(512)]
    at, kind = 0.0, case.kind
    for number in range(count):
        at += chance.expovariate(rate) if rate else 0.0
        long = chance.random() < 0.15
        prompt = chance.randint(*(kind.long if long else kind.short))
        output = chance.randint(*kind.outputs)
        if case.lengths is not None:
            prompt, output = case.lengths
        tokens = [chance.randrange(32_000) for _ in range(prompt)]
        if chance.random() < case.shared:
            tokens[: len(prefix)] = prefix[:prompt]
        gone = chance.expovariate(0.5) if chance.random() < case.aborted else None
        ttft = kind.ttft[prompt >= kind.long[0]]
        targets: dict[str, Any] = {"ttft_ms": 1e3 * ttft, "tpot_ms": 1e3 * case.tpot}
        targets |= {"tenant": tenant} if tenant else {}
        sampling = SamplingParams(
            max_tokens=output, temperature=0.0, ignore_eos=True, extra_args=targets
        )
        request = Request(
            f"{tenant}{number}", tokens, sampling, None, arrival_time=at, block_hasher=hasher
        )
        yield Job(request, at, prompt, output, ttft, case.tpot, gone, tenant != "flood")


class Run:
    """One case, step by step."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.clock = case, Clock()
        self.scheduler = scheduler_of(config_of(folder, case), case, self.clock)
        self.jobs = {job.request.request_id: job for job in jobs_of(case)}
        # by time of arrival
        self.coming = sorted(self.jobs.values(), key=attrgetter("arrival"), reverse=True)
        # time of the last arrival
        self.over = self.coming[0].arrival
        self.leaving = sorted(
            (job.arrival + job.abort_after, name)
            for name, job in self.jobs.items()
            if job.abort_after is not None
        )
        # (output of vLLM, when the step ends)
        self.flying: deque[tuple[Any, float]] = deque()
        self.busy_until = 0.0
        # seconds in the scheduler, of which vLLM's own methods took a part, and in how many steps
        self.seconds = self.own_seconds = 0.0
        self.num_timed = 0
        self.num_steps = self.num_compared = 0

    def run(self) -> dict[str, Any]:
        """Run until every request has ended."""
        scheduler, clock, depth = self.scheduler, self.clock, self.case.kind.depth
        while self.coming or self.flying or scheduler.requests:
            self._arrive()
            if len(self.flying) < depth and scheduler.has_requests():
                output = self._call("schedule")
                self._launch(output)
                if output.total_num_scheduled_tokens and len(self.flying) < depth:
                    continue
            if self.flying:
                output, end = self.flying.popleft()
                clock.now = max(clock.now, end)
                self._deliver(output)
            elif self.coming:
                clock.now = max(clock.now, self.coming[-1].arrival)
        return self._summary()

    def _call(self, name: str, *args: Any) -> Any:
        least, most = self.case.waiting or (0, self.case.count)
        counts = least <= len(self.scheduler.waiting) <= most
        began, own = time.perf_counter(), Own.seconds
        result = getattr(self.scheduler, name)(*args)
        if counts:
            self.seconds += time.perf_counter() - began
            self.own_seconds += Own.seconds - own
            self.num_timed += name == "update_from_output"
        return result

    def _arrive(self) -> None:
        while self.coming and self.coming[-1].arrival <= self.clock.now:
            self.scheduler.add_request(self.coming.pop().request)
        while self.leaving and self.leaving[0][0] <= self.clock.now:
            _, name = self.leaving.pop(0)
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _launch(self, output: Any) -> None:
        tokens = output.num_scheduled_tokens
        requests = self.scheduler.requests
        keys = sum(requests[name].num_computed_tokens for name in tokens)
        kind, rows = self.case.kind, sum(count == 1 for count in tokens.values())
        seconds = kind.step + kind.token * sum(tokens.values()) + kind.key * keys + kind.row * rows
        seconds = seconds + kind.prompt * (rows < len(tokens)) if tokens else 0.0
        self.busy_until = max(self.clock.now, self.busy_until) + seconds
        self.flying.append((output, self.busy_until))
        self.num_steps += bool(tokens)
        # the row of a request that samples ends behind its known tokens
        output.samples = {r for r in tokens if not requests[r].is_prefill_chunk}
        if self.case.checks and self.case.scheduler == "paced":
            self._compare(tokens)

    def _compare(self, tokens: dict[str, int]) -> None:
        """Compare the step with the amended plan, and the core's counters with vLLM's."""
        scheduler, core = self.scheduler, self.scheduler.pacer.core
        _, plan = scheduler._flying[-1]
        assert plan is not None, "a step was not planned by the core"
        assert {row.request_id: row.num_tokens for row in plan.rows} == tokens
        core.check_integrity()
        for request in core.requests:
            theirs = scheduler.requests[request.request_id]
            if theirs.status == RequestStatus.RUNNING:
                assert theirs.num_computed_tokens == request.num_computed_tokens
                assert theirs.num_output_placeholders == request.num_pending_tokens
            assert theirs.num_tokens == request.num_tokens
        self.num_compared += 1

    def _deliver(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            job = self.jobs[name]
            sampled.append([len(job.tokens) % 32_000] if name in output.samples else [])
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )  # fmt: skip
        outputs = self._call("update_from_output", output, result)
        for each in outputs.values():
            for news in each.outputs:
                job = self.jobs[news.request_id]
                if news.finish_reason == FinishReason.ERROR:
                    self._refused(job)
                    continue
                job.first = job.first or self.clock.now
                job.last = self.clock.now
                job.tokens += news.new_token_ids

    def _refused(self, job: Job) -> None:
        """Let a refused caller come back at the time that its answer says."""
        refusal = self.scheduler.pacer.fates[job.request.request_id].refusal
        assert refusal is not None and refusal.retry_after is not None
        if job.refusals and job.taken is None and job.arrival >= self.over:
            job.taken = False
        job.refusals += 1
        if not self.case.returns or job.refusals > MOST_RETURNS:
            return
        job.arrival = self.clock.now + math.ceil(refusal.retry_after)
        old = job.request
        job.request = Request(
            f"{old.request_id}+", old.prompt_token_ids, old.sampling_params, None,
            arrival_time=job.arrival, block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )  # fmt: skip
        self.jobs[job.request.request_id] = job
        insort(self.coming, job, key=lambda each: -each.arrival)

    def _summary(self) -> dict[str, Any]:
        every = {id(job): job for job in self.jobs.values() if job.judged}.values()
        jobs = [job for job in every if job.abort_after is None and not job.refusals]
        back = [job for job in every if job.refusals]
        for job in back:
            if job.taken is None and job.arrival >= self.over:
                job.taken = bool(job.tokens)
        long = [job for job in jobs if job.prompt >= self.case.kind.long[0]]
        short = [job for job in jobs if job.prompt < self.case.kind.long[0]]
        firsts = sorted(job.first - job.arrival for job in jobs)
        exact = all(len(job.tokens) == job.output for job in jobs)
        found: dict[str, Any] = {
            "kept": share(job.kept for job in jobs),
            "short_kept": share(job.kept for job in short),
            "long_kept": share(job.kept for job in long),
            "exact": exact,
            "refused": len(back),
            "served_at_last": share(bool(job.tokens) for job in back),
            "served_on_return": share(job.taken for job in back if job.taken is not None),
            "ttft_p50_s": round(firsts[len(firsts) // 2], 4),
            "ttft_p99_s": round(firsts[int(0.99 * len(firsts))], 4),
            "tokens_per_s": round(sum(len(j.tokens) for j in jobs) / max(j.last for j in jobs), 1),
            "steps": self.num_steps,
            "us_per_step": round(1e6 * self.seconds / max(1, self.num_timed), 1),
            "vllm_us_per_step": round(1e6 * self.own_seconds / max(1, self.num_timed), 1),
        }
        if self.case.scheduler == "paced":
            counts = self.scheduler.pacer.counts
            found |= {
                "amended": round(counts.num_amended / max(1, counts.num_steps), 5),
                "own_steps": counts.num_own_steps, "faults": counts.num_faults,
                "compared": self.num_compared,
                "preemptions": self.scheduler.pacer.core.stats().num_preemptions,
            }  # fmt: skip
        return found


def share(values: Iterator[bool]) -> float | None:
    """Return the share of true values; None without any."""
    found = list(values)
    return round(sum(found) / len(found), 4) if found else None


def main() -> None:
    """Read cases from standard input, one JSON object a line, and print one result a line."""
    for name in ("schedule", "update_from_output"):
        _timed(name)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            values = json.loads(line)
            pairs = {name: tuple(values[name]) for name in ("lengths", "waiting") if name in values}
            print(json.dumps(Run(Case(**(values | pairs)), Path(folder)).run()), flush=True)


if __name__ == "__main__":
    main()
