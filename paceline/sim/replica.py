"""One simulated engine: the real scheduler, driven as ``engine.core`` and ``engine.loop`` drive it.

::

    engine loop                              here
      take every message that is there         take arrivals up to now
      plan until ``depth`` steps are handed    the same calls, in the same order
      at depth 2, wait until the next plan     at the event of the running step's end: with the
        is due, take arrivals, plan              time when it was due, and arrivals up to then
      wait for the oldest step's result        an event at its end
      update, send the news                    the same call; Served goes to the consumer

The backend runs steps one after another: a step starts when it was submitted or when the step
before it ended, whichever is later, and takes the time that ``StepTimes`` gives; blocks are swapped
before that. While the loop waits for a result it reads no messages, so an arrival waits for the end
of the step, as it does in the engine.

This module does not know other replicas, or where arrivals come from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from paceline.core.memory.kv_cache import KVCacheManager, blocks_for
from paceline.core.outputs import ScheduledRow, SchedulerOutput, StepResult
from paceline.core.pacing.request_admission import longest_wait
from paceline.core.request import AdapterUse, Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import NO_SLO, Slo
from paceline.engine.recorder import Recorder
from paceline.errors import EngineDeadError, NeverFitsError, QueueFullError, RequestError
from paceline.sim.adapters import SimulatedAdapters
from paceline.sim.arrival import Arrival, Served
from paceline.sim.config import Delays, ReplicaConfig
from paceline.sim.prompts import PromptMaker
from paceline.sim.speculation import drafter_maker
from paceline.sim.step_times.base import StepTimes
from paceline.speculation.drafts import Drafts

__all__ = ["Delays", "Job", "Replica", "ReplicaConfig", "slo_of"]

# token ids that simulated steps sample: an ordinary one, and one that ends an output
_TOKEN = (0,)
_END = 1
_SAMPLES = itemgetter(4)
_SAMPLED: dict[int, tuple[tuple[int, ...], ...]] = {}


@dataclass(slots=True)
class Job:
    """A request in one replica."""

    arrival: Arrival
    number: int
    # when it reached the engine's inbox
    inbox_at: float
    # output tokens to generate here
    output_tokens: int
    # another replica computed its prompt and first output token, and sent the keys and values
    received: bool = False
    # weight in the router's count
    weight: float = 0.0
    request: Request | None = None
    # when its newest token was known
    last_token: float | None = None
    # if it was refused: seconds that it is advised to wait
    retry_after: float | None = None


@dataclass(slots=True)
class _Step:
    plan: SchedulerOutput
    requests_end: tuple[tuple[int, ...], ...]
    planned: float
    end: float
    # duration without swapping, from which the scheduler learns
    seconds: float


class Replica:
    """A simulated engine; see the module. ``Simulator`` drives it by ``submit`` and ``run``.

    Args:
        on_end: called with a job that ended here and "", or with a refused one and the reason.
        on_plan: called with every plan, the time it was made, and when its step starts and ends.
        recorder: receives what a live engine's recorder does.
    """

    def __init__(
        self,
        index: int,
        config: ReplicaConfig,
        step_times: StepTimes,
        prompts: PromptMaker,
        on_end: Callable[[Replica, Job, str, float], None],
        on_plan: Callable[[int, SchedulerOutput, float, float, float], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.index = index
        self.config = config
        self._new_scheduler()
        self._times = step_times
        self._prompts = prompts
        self._on_end = on_end
        self._on_plan = on_plan
        self._recorder = recorder
        # None: no request has had one. Requests that wait for theirs, and those of other requests
        self._adapters: SimulatedAdapters | None = None
        self._held: dict[str, Job] = {}
        self._uses: dict[str, AdapterUse] = {}
        self._depth = config.pipeline_depth
        self._outbound = config.delays.outbound
        self._loop_seconds = config.delays.loop
        self._inbox: deque[Job] = deque()
        self._steps: deque[_Step] = deque()
        self._jobs: dict[str, Job] = {}
        self._backend_free = 0.0
        # when the thread was last active
        self._looked_at = 0.0
        # seconds that the backend computed, and number of steps
        self.busy_seconds = 0.0
        self.num_steps = 0
        # most requests that waited behind a step's plan
        self.most_waiting = 0
        # when ``run`` is due; None: only a message wakes it
        self.due: float | None = None

    def _new_scheduler(self) -> None:
        config = self.config
        drafter = drafter_maker(config.acceptance, _truth) if config.acceptance else None
        speculation = partial(Drafts, make=drafter)
        self._kv = KVCacheManager(config.cache)
        self.scheduler = Scheduler(
            config.scheduling, config.cache, speculation=speculation, kv=self._kv
        )

    # ------------------------------------------------------------------ for routers

    @property
    def num_unfinished(self) -> int:
        """Requests in the inbox, waiting and running."""
        return len(self._inbox) + len(self._held) + len(self._jobs)

    @property
    def free_at(self) -> float:
        """When the steps that the backend has end."""
        return self._backend_free

    @property
    def num_evicted_adapters(self) -> int:
        """Adapters that left memory for others."""
        return 0 if self._adapters is None else self._adapters.num_evicted

    # ------------------------------------------------------------------ driven by the simulator

    def submit(self, job: Job) -> None:
        """Put a message into the inbox at ``job.inbox_at``. The caller then asks ``wakes_at``."""
        self._inbox.append(job)

    def wakes_at(self, now: float) -> float | None:
        """Return when an arrival at ``now`` makes ``run`` due: at once if the loop is idle or waits
        for the policy; None if it waits for a step's result, whose end is due anyway."""
        return None if self._steps else now + self._loop_seconds

    def run(self, now: float) -> None:
        """Do what the engine's thread does at ``now``: handle the oldest step's result if it ended
        by now, then messages, then plan. Sets ``due``."""
        steps = self._steps
        if steps and steps[0].end <= now:
            if self._depth == 2 and len(steps) == 1 and not self.scheduler.awaits_tokens:
                # events while the step ran that matter here: the next one was planned
                self._feed(max(self._looked_at, min(self.scheduler.plan_at, steps[0].end)), 2)
            self._finish_step(steps.popleft())
            # the thread's time between a result and the next plan is not the backend's
            if self._loop_seconds:
                now += self._loop_seconds
        self._looked_at = now
        scheduler = self.scheduler
        inbox = self._inbox
        if self._depth != 2:
            self._feed(now, self._depth)
        elif inbox or not steps:
            self._feed(now, 1)
        if steps:
            self.due = steps[0].end
        else:
            if scheduler.has_unfinished and scheduler.wake_at is None:
                raise EngineDeadError(
                    f"replica {self.index} at {now:.6f} s holds {len(self._jobs)} requests but "
                    "plans nothing"
                )
            self.due = scheduler.wake_at if scheduler.has_unfinished else None
        if inbox and not steps:
            wake = inbox[0].inbox_at
            self.due = wake if self.due is None else min(self.due, wake)
        if self._held and self._adapters is not None and not steps:
            wake = self._adapters.next_at
            self.due = wake if self.due is None else min(self.due, wake)

    def crash(self, now: float) -> list[Job]:
        """Lose everything, as a process that is killed at ``now`` does; return the jobs that were
        here. What it was asked since comes to an empty engine."""
        jobs = [*self._jobs.values(), *self._held.values(), *self._inbox]
        for each in (self._jobs, self._held, self._uses, self._inbox, self._steps):
            each.clear()
        self._adapters, self._backend_free, self.due = None, now, None
        self._new_scheduler()
        return jobs

    # ------------------------------------------------------------------ inside

    def _feed(self, now: float, depth: int) -> None:
        """Take arrivals up to ``now``, and plan until ``depth`` steps are submitted."""
        scheduler, inbox, steps = self.scheduler, self._inbox, self._steps
        while inbox and inbox[0].inbox_at <= now:
            if inbox[0].received and scheduler.has_unfinished and not self._has_room(inbox[0]):
                break
            self._take(inbox.popleft(), now)
        if self._held:
            self._admit_ready(now)
        if scheduler.has_unfinished or steps:
            while len(steps) < depth and not (steps and scheduler.awaits_tokens):
                plan = scheduler.schedule(now)
                if not plan.rows:
                    break
                self._execute(plan, now)
            for expired in scheduler.take_expired():
                job = self._jobs.pop(expired.request_id)
                self._uses.pop(expired.request_id, None)
                job.retry_after = expired.error.retry_after
                expiry = expired.error.reason == "expired"
                self._on_end(self, job, "waited too long" if expiry else expired.error.reason, now)
                if self._recorder is not None:
                    self._recorder.ended((expired.request_id,), now)

    def _take(self, job: Job, now: float) -> None:
        """Add a request, or hold it until its adapter is in memory."""
        arrival, request_id = job.arrival, f"{job.number}/0"
        if not arrival.adapter:
            self._add(job, now)
            return
        if self._adapters is None:
            self._adapters = SimulatedAdapters(self.config.adapters)
        slo = slo_of(arrival)
        wait = self._adapters.wait(arrival.adapter)
        if wait > longest_wait(self.scheduler.config.max_predicted_ttft_s, slo, slo.ttft):
            job.retry_after = wait
            self._on_end(self, job, "predicted-ttft", now)
            return
        # leases of requests that have ended since end
        self._admit_ready(now)
        due = math.inf if slo.ttft is None else arrival.at + slo.ttft
        use = self._adapters.hold(request_id, arrival.adapter, now, due)
        if use is None:
            self._held[request_id] = job
        else:
            self._add(job, now, use)

    def _admit_ready(self, now: float) -> None:
        assert self._adapters is not None
        for request_id, use in self._adapters.ready(now, self._jobs.keys()):
            job = self._held.pop(request_id)
            self._add(job, now, use, max(0.0, now - job.arrival.at))

    def _add(
        self, job: Job, now: float, adapter: AdapterUse | None = None, waited: float = 0.0
    ) -> None:
        arrival = job.arrival
        output = job.output_tokens
        most = self.config.max_tokens
        if arrival.prompt_tokens > self.scheduler.config.max_model_len:
            # a row of a trace may have more tokens than memory has room for
            self._on_end(self, job, "context limit", now)
            return
        # the live engine's id of a request's first choice
        request_id = f"{job.number}/0"
        prompt = self._prompts.tokens(arrival, job.number)
        sampling = _sampling(output, most)
        try:
            request = Request(
                RequestSpec(
                    request_id=request_id,
                    prompt_token_ids=[*prompt, _TOKEN[0]] if job.received else prompt,
                    sampling=sampling,
                    arrival_time=arrival.at,
                    priority=arrival.priority,
                    slo=slo_of(arrival),
                    tenant=arrival.tenant,
                    adapter=adapter,
                    adapter_wait=waited,
                )
            )
            self.scheduler.add_request(request)
        except RequestError as error:
            if isinstance(error, QueueFullError):
                job.retry_after = error.retry_after
            self._on_end(self, job, self._reason(error, len(prompt) + sampling.max_tokens), now)
            return
        job.request = request
        self._jobs[request_id] = job
        if adapter is not None:
            self._uses[request_id] = adapter
        if self._recorder is not None:
            self._recorder.added(request, now)
        if job.received:
            self._kv.land_prefix(request)

    def _has_room(self, job: Job) -> bool:
        """Whether a request with its keys and values would be admitted at once. Until then they
        stay where they are."""
        scheduler = self.scheduler
        stats = scheduler.stats()
        if stats.num_waiting or stats.num_running >= scheduler.config.max_num_seqs:
            return False
        cache = scheduler.cache
        needed = blocks_for(job.arrival.prompt_tokens + 1, cache.block_size)
        return needed + int(cache.watermark * cache.num_blocks) <= stats.num_free_blocks

    def _execute(self, plan: SchedulerOutput, now: float) -> None:
        seconds = self._times.seconds(plan)
        if self._uses and self._adapters is not None:
            seconds += self._adapters.seconds(plan.rows, self._uses)
        moving = self.config.cache.swap_block_seconds
        begin = max(now, self._backend_free)
        start = begin + moving * len(plan.swaps)
        end = start + seconds
        self._backend_free = end
        self._steps.append(_Step(plan, self._sample(plan), now, end, seconds))
        self.busy_seconds += self._backend_free - begin
        self.num_steps += 1
        note = self.scheduler.note
        assert note is not None, "a plan with rows was just made"
        if note.num_waiting > self.most_waiting:
            self.most_waiting = note.num_waiting
        if self._recorder is not None:
            self._recorder.planned(plan, now, note)
        if self._on_plan is not None:
            self._on_plan(self.index, plan, now, start, end)

    def _sample(self, plan: SchedulerOutput) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that the step samples, by row."""
        if plan.drafts:
            drafted = {draft.row: draft.token_ids for draft in plan.drafts}
            return tuple(
                self._verify(row, drafted.get(index, ())) for index, row in enumerate(plan.rows)
            )
        if self.config.max_tokens is None:
            rows = plan.rows
            if rows[-1].samples and all(map(_SAMPLES, rows)):
                return _sampled(len(rows))
            return tuple([_TOKEN if row[4] else () for row in rows])
        sampled: list[tuple[int, ...]] = []
        for request_id, start, num_tokens, _, samples in plan.rows:
            if not samples:
                sampled.append(())
                continue
            sampled.append((_END,) if self._ends(request_id, start + num_tokens) else _TOKEN)
        return tuple(sampled)

    def _ends(self, request_id: str, length: int) -> bool:
        """Whether the token at ``length`` is the last."""
        job = self._jobs.get(request_id)
        return job is None or length - job.arrival.prompt_tokens >= job.output_tokens - 1

    def _verify(self, row: ScheduledRow, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return a row's sampled tokens: one, and one more for each draft that is right."""
        if not row.samples:
            return ()
        drawn: list[int] = []
        known = row.start + row.num_tokens - len(drafts)
        for place in range(len(drafts) + 1):
            ends = self.config.max_tokens is not None and self._ends(row.request_id, known + place)
            drawn.append(_END if ends else _TOKEN[0])
            if place == len(drafts) or drafts[place] != drawn[place]:
                break
        return tuple(drawn)

    def _finish_step(self, step: _Step) -> None:
        now = step.end
        result = StepResult(
            step_id=step.plan.step_id, sampled=step.requests_end, elapsed=step.seconds
        )
        updates = self.scheduler.update(step.plan, result, now, tell_all=False)
        if self._recorder is not None:
            self._recorder.stepped(step.plan, step.planned, now, step.seconds, updates)
        for update in updates:
            job = self._jobs.pop(update[0])
            self._uses.pop(update[0], None)
            job.last_token = now
            self._on_end(self, job, "", now)

    def _reason(self, error: RequestError, num_tokens: int) -> str:
        """Return the reason for refusing a request of ``num_tokens`` tokens, for reports."""
        if isinstance(error, QueueFullError):
            return error.reason
        if isinstance(error, NeverFitsError):
            limit = self.scheduler.config.max_model_len
            return "context limit" if num_tokens > limit else "larger than the KV cache"
        return "invalid"

    def served(self, job: Job, *, reason: str = "") -> Served:
        """Return the record of a job that ended here; ``reason`` if it was refused."""
        refused = bool(reason)
        request = job.request
        if request is None:
            return Served(
                job.arrival, self.index, None, None, None, 0, 0, 0, refused, reason,
                retry_after=job.retry_after,
            )  # fmt: skip
        first, last = request.first_token_time, job.last_token
        return Served(
            job.arrival,
            self.index,
            request.first_scheduled_time,
            None if first is None else first + self._outbound,
            None if last is None else last + self._outbound,
            request.num_tokens - request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_preemptions,
            refused,
            reason,
            request.history.predicted_ttft,
            job.retry_after,
        )


def _truth(request: Request, known: int, count: int) -> Sequence[int]:
    """Return a simulated request's next tokens, without its end."""
    return _TOKEN * count


def slo_of(arrival: Arrival) -> Slo:
    """Return an arrival's targets for the scheduler; class "batch" is best effort, as in the
    server, and so is "best-effort"."""
    if (
        arrival.slo_class == "standard"
        and arrival.ttft is None
        and arrival.tpot is None
        and arrival.deadline is None
    ):
        return NO_SLO
    return Slo(
        slo_class=arrival.slo_class,
        ttft=arrival.ttft,
        tpot=arrival.tpot,
        deadline=arrival.deadline,
        best_effort=arrival.slo_class in ("batch", "best-effort"),
    )


_PARAMS: dict[int, SamplingParams] = {}


def _sampling(output_tokens: int, max_tokens: int | None) -> SamplingParams:
    if max_tokens is not None:
        return SamplingParams(
            max_tokens=max(max_tokens, output_tokens), eos_token_ids=frozenset({_END})
        )
    params = _PARAMS.get(output_tokens)
    if params is None:
        params = _PARAMS[output_tokens] = SamplingParams(max_tokens=output_tokens)
    return params


def _sampled(count: int) -> tuple[tuple[int, ...], ...]:
    found = _SAMPLED.get(count)
    if found is None:
        found = _SAMPLED[count] = (_TOKEN,) * count
    return found
