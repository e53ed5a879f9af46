"""The virtual clock: arrivals in, ``Served`` out, replicas run when they are due.

Events are (time, number) pairs on a heap; the number makes equal times run in the order they were
made, so a run is a function of its arguments. The workload is read one arrival ahead, and a request
that ends is passed to a consumer at once: memory holds only the requests in flight, and those that
clients will send later.

This module does not know what a step computes or costs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.outputs import SchedulerOutput
from paceline.engine.recorder import Recorder
from paceline.errors import ConfigError
from paceline.routing import (
    Demand,
    HandOvers,
    PredictedRouter,
    Pressure,
    Router,
    hash_chain,
)
from paceline.sim.arrival import Arrival, Served
from paceline.sim.pool import Disaggregation, Pool, ReplicaSpec
from paceline.sim.prompts import PromptMaker
from paceline.sim.replica import Job, Replica, ReplicaConfig

__all__ = [
    "Again",
    "PlanObserver",
    "Simulator",
    "Totals",
]

# (replica, plan, when it was made, when its step starts, when it ends)
PlanObserver = Callable[[int, SchedulerOutput, float, float, float], None]
# a client's next request after one ended, no earlier than the given time; None: there is none
Again = Callable[[Served, float], Arrival | None]
# mean output length that routers assume before they have seen an output
_FIRST_GUESS = 256.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole run."""

    # time of the last event, seconds on the workload's clock
    end: float
    num_arrivals: int
    num_refused: int
    num_steps: int
    num_preemptions: int
    # seconds that each replica's backend computed
    busy_seconds: tuple[float, ...]
    # most requests that waited at once, by replica
    most_waiting: tuple[int, ...]
    # times that an adapter left memory for another one
    num_evicted_adapters: int = 0


class _Arrivals:
    """A workload in order, merged with later requests of its clients."""

    def __init__(self, workload: Iterable[Arrival]) -> None:
        self._stream = iter(workload)
        self._head = next(self._stream, None)
        # (time, number, arrival)
        self._again: list[tuple[float, int, Arrival]] = []
        self._num_again = self._num_read = 0
        self.num_taken = 0
        # time of the next arrival; infinity: there is none
        self.next_at = math.inf
        self._look()

    def add(self, arrival: Arrival) -> None:
        """Add a client's next request."""
        self._num_again += 1
        heapq.heappush(self._again, (arrival.at, self._num_again, arrival))
        self._look()

    def take(self) -> Arrival:
        """Return the next arrival; of equal times, the workload's first. Raises ConfigError where
        the workload is out of order."""
        head, self.num_taken = self._head, self.num_taken + 1
        if head is None or (self._again and self._again[0][0] < head.at):
            arrival = heapq.heappop(self._again)[2]
            self._look()
            return arrival
        self._head = next(self._stream, None)
        self._num_read += 1
        if self._head is not None and self._head.at < head.at:
            raise ConfigError(
                f"arrival {self._num_read} at {self._head.at} s comes before the one ahead of it "
                f"at {head.at} s"
            )
        self._look()
        return head

    def _look(self) -> None:
        again = self._again[0][0] if self._again else math.inf
        self.next_at = again if self._head is None else min(again, self._head.at)


class _Group:
    """Replicas behind one router, and the work outstanding at each."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.replicas = replicas
        self.router = router
        self.outstanding = [0.0] * len(replicas)
        # jobs in flight, for a router that needs their first tokens and ends
        self.jobs: dict[int, Job] = {}
        self.first = replicas[0].index


class _Model:
    """All replicas of one model."""

    def __init__(self, front: _Group, back: _Group | None, split: Disaggregation | None) -> None:
        self.front = front
        self.back = back
        self.transfer = None if split is None else split.transfer
        self.split_above = None if split is None else split.split_above
        self.hand_overs = HandOvers()
        self.mean_output = _FIRST_GUESS
        self.num_outputs = 0


class Simulator:
    """A simulation of replicas; see the module. One run per object.

    Args:
        pools: replicas by model; the model "" also takes every arrival whose model has no pool.
        consume: called once for every arrival, in the order in which they end.
        prefix_block: tokens of one piece of ``Arrival.prefix``.
        on_plan: called with every plan; None costs nothing.
        recorder: makes the equivalent of a live engine's recorder from a replica's number and
            configuration.
        again: returns the client's next request after one that ended.
        kills: times, in order, at which the replica with most requests is killed. These go on at
            others behind the tokens that they have; it is empty then, and its router is told.
    """

    def __init__(
        self,
        pools: Mapping[str, Pool] | Pool,
        consume: Callable[[Served], None],
        *,
        prefix_block: int = 512,
        on_plan: PlanObserver | None = None,
        recorder: Callable[[int, ReplicaConfig], Recorder] | None = None,
        again: Again | None = None,
        kills: Iterable[float] = (),
    ) -> None:
        if isinstance(pools, Pool):
            pools = {"": pools}
        self._consume = consume
        self._prefix_block = prefix_block
        self._on_plan = on_plan
        self._recorder = recorder
        self._again = again
        self._kills = deque(kills)
        self._replicas: list[Replica] = []
        self._group_of: list[_Group] = []
        self._model_of: list[_Model] = []
        self._models = {name: self._build(pool) for name, pool in pools.items()}
        if self._kills and any(model.back for model in self._models.values()):
            raise ConfigError("replicas of a disaggregated pool are not killed")
        # (time, number, replica or the job's transfer to its next replica)
        self._events: list[tuple[float, int, Replica]] = []
        self._num_events = 0
        self._arrivals = _Arrivals(())
        self._num_refused = 0
        self._num_preemptions = 0
        # requests that went on after their replica was killed
        self.num_resumed = 0
        # records of what requests had at replicas before, by job number
        self._handed: dict[int, Served] = {}
        # requests whose prompts were computed in the step that was handled last
        self._leaving: list[Job] = []

    def run(self, workload: Iterable[Arrival], *, until: float = math.inf) -> Totals:
        """Serve everything, or what happens before ``until``: requests still running then are not
        consumed.

        Raises:
            ConfigError: arrivals out of order, or for a model that no pool serves.
        """
        events = self._events
        now = 0.0
        arrivals = self._arrivals = _Arrivals(workload)
        kills = self._kills
        kill_at = kills[0] if kills else math.inf
        while (at := arrivals.next_at) < math.inf or events:
            if kill_at <= at and (not events or kill_at <= events[0][0]) and kill_at < until:
                now = max(now, kills.popleft())
                kill_at = kills[0] if kills else math.inf
                self._kill(now)
                continue
            if not events or at <= events[0][0]:
                if at >= until:
                    break
                now = max(now, at)
                number = arrivals.num_taken
                self._arrive(arrivals.take(), number)
                continue
            if events[0][0] >= until:
                break
            time, _, replica = heapq.heappop(events)
            if replica.due != time:
                # it has been woken earlier since
                continue
            now = time
            replica.run(now)
            if self._leaving:
                self._hand_over(replica, now)
            # while no other event comes first, its next event need not go through the heap
            while (
                (due := replica.due) is not None
                and due < arrivals.next_at
                and due < until
                and due < kill_at
                and (not events or due < events[0][0])
            ):
                now = due
                replica.run(now)
                if self._leaving:
                    self._hand_over(replica, now)
            if due is not None:
                self._push(due, replica)
        return Totals(
            end=now,
            num_arrivals=arrivals.num_taken,
            num_refused=self._num_refused,
            num_steps=sum(replica.num_steps for replica in self._replicas),
            num_preemptions=self._num_preemptions,
            busy_seconds=tuple(replica.busy_seconds for replica in self._replicas),
            most_waiting=tuple(replica.most_waiting for replica in self._replicas),
            num_evicted_adapters=sum(each.num_evicted_adapters for each in self._replicas),
        )

    # ------------------------------------------------------------------ inside

    def _build(self, pool: Pool) -> _Model:
        front = self._group(pool.replicas, pool.router)
        split = pool.disaggregation
        back = None if split is None else self._group(split.decode, split.router)
        model = _Model(front, back, split)
        self._model_of += [model] * (len(self._replicas) - len(self._model_of))
        return model

    def _group(self, specs: Sequence[ReplicaSpec], router: Router) -> _Group:
        made = [
            Replica(
                len(self._replicas) + offset,
                spec.config,
                spec.step_times,
                PromptMaker(
                    distinct=spec.config.cache.enable_prefix_caching,
                    prefix_block=self._prefix_block,
                ),
                self._ended,
                self._on_plan,
                None
                if self._recorder is None
                else self._recorder(len(self._replicas) + offset, spec.config),
            )
            for offset, spec in enumerate(specs)
        ]
        group = _Group(made, router)
        self._replicas += made
        self._group_of += [group] * len(made)
        return group

    def _push(self, time: float, replica: Replica) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, replica))

    def _arrive(self, arrival: Arrival, number: int) -> None:
        model = self._models.get(arrival.model) or self._models.get("")
        if model is None:
            known = ", ".join(sorted(self._models))
            raise ConfigError(f"no pool serves model {arrival.model!r}; there are: {known}")
        group, output = model.front, arrival.output_tokens
        if model.back is not None:
            if self._hands_over(model, model.back, arrival):
                output = 1
            else:
                group = model.back
        self._submit(group, model, Job(arrival, number, arrival.at, output))

    def _hands_over(self, model: _Model, back: _Group, arrival: Arrival) -> bool:
        """Whether the prompt is computed in the front group, and its answer made in the other."""
        if model.split_above is None:
            return True
        demand = self._demand(model, arrival, arrival.output_tokens)
        prompts, outputs = (
            self._predicted(group, arrival.at).best(
                demand, arrival.at, len(group.replicas), _look(group, arrival.at)
            )
            for group in (model.front, back)
        )
        return model.hand_overs.pays(demand, prompts, outputs, model.split_above)

    def _predicted(self, group: _Group, now: float) -> PredictedRouter:
        """Return a group's router, told what happened up to ``now``."""
        router = group.router
        assert isinstance(router, PredictedRouter), "checked where it is configured"
        # a live gateway learns of first tokens as they come; here they are looked up when needed
        for number in router.waiting():
            request = group.jobs[number].request
            first = None if request is None else request.first_token_time
            if first is not None and first <= now:
                router.first_token(number, first)
        return router

    def _submit(self, group: _Group, model: _Model, job: Job) -> None:
        index = 0
        if len(group.replicas) > 1 or model.split_above is not None:
            index = self._choose(group, model, job)
        job.weight = job.arrival.prompt_tokens + model.mean_output
        group.outstanding[index] += job.weight
        replica = group.replicas[index]
        job.inbox_at += replica.config.delays.inbound
        replica.submit(job)
        due = replica.wakes_at(job.inbox_at)
        if due is not None and (replica.due is None or due < replica.due):
            replica.due = due
            self._push(due, replica)

    def _choose(self, group: _Group, model: _Model, job: Job) -> int:
        arrival, now = job.arrival, job.inbox_at
        if not isinstance(group.router, PredictedRouter):
            return group.router.choose(arrival.prefix, group.outstanding)
        router = self._predicted(group, now)
        demand = self._demand(model, arrival, job.output_tokens)
        group.jobs[job.number] = job
        look = _look(group, now)
        return router.send(job.number, demand, now, len(group.replicas), look, fetched=job.received)

    def _demand(self, model: _Model, arrival: Arrival, max_tokens: int) -> Demand:
        return Demand(
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=max_tokens,
            output_tokens=model.mean_output,
            prefix=hash_chain(arrival.prefix),
            tokens_per_run=self._prefix_block,
            ttft=arrival.ttft,
            tpot=arrival.tpot,
        )

    def _kill(self, now: float) -> None:
        replica = max(self._replicas, key=lambda each: each.num_unfinished)
        group, model = self._group_of[replica.index], self._model_of[replica.index]
        jobs = replica.crash(now)
        if not jobs:
            # none has any
            return
        for job in jobs:
            group.outstanding[replica.index - group.first] -= job.weight
            if group.jobs.pop(job.number, None) is not None:
                assert isinstance(group.router, PredictedRouter), "it alone is told"
                group.router.ended(job.number, now, 0)
        if isinstance(group.router, PredictedRouter):
            group.router.killed(replica.index - group.first)
        for job in jobs:
            record = replica.served(job)
            self._num_preemptions += record.preemptions
            record = self._handed[job.number] = self._joined(record, job.number)
            asked, done = record.arrival, record.output_tokens
            # the prompt and what its caller has are computed again
            rest = replace(
                asked,
                prompt_tokens=asked.prompt_tokens + done,
                output_tokens=asked.output_tokens - done,
            )
            self.num_resumed += 1
            self._submit(group, model, Job(rest, job.number, now, rest.output_tokens))

    def _joined(self, record: Served, number: int) -> Served:
        """Return a request's record with what it had at replicas before this one."""
        before = self._handed.pop(number, None)
        if before is None:
            return record
        scheduled, first = before.first_scheduled, before.first_token
        return replace(
            before,
            replica=record.replica,
            first_scheduled=record.first_scheduled if scheduled is None else scheduled,
            first_token=record.first_token if first is None else first,
            last_token=record.last_token,
            output_tokens=before.output_tokens + record.output_tokens,
            preemptions=before.preemptions + record.preemptions,
            refused=record.refused,
            reason=record.reason,
        )

    def _ended(self, replica: Replica, job: Job, reason: str, now: float) -> None:
        group = self._group_of[replica.index]
        if group.jobs.pop(job.number, None) is not None:
            assert isinstance(group.router, PredictedRouter), "it alone is told"
            first = None if job.request is None else job.request.first_token_time
            if first is not None:
                group.router.first_token(job.number, first)
            group.router.ended(job.number, now, 0 if reason else job.output_tokens)
        model = self._model_of[replica.index]
        group.outstanding[replica.index - group.first] -= job.weight
        served = not reason
        record = replica.served(job, reason=reason)
        self._num_preemptions += record.preemptions
        arrival = job.arrival
        before = self._handed.get(job.number)
        if before is not None:
            if record.first_token is not None and before.first_token is not None:
                gap = record.first_token - before.first_token
                model.hand_overs.saw(arrival.prompt_tokens, gap)
            record = self._joined(record, job.number)
        elif (
            served and model.back is not None and group is model.front and arrival.output_tokens > 1
        ):
            self._handed[job.number] = record
            self._leaving.append(job)
            return
        if record.refused:
            self._num_refused += 1
        else:
            model.num_outputs += 1
            # running mean over about the last thousand outputs
            share = 1.0 / min(model.num_outputs, 1000)
            model.mean_output += share * (record.arrival.output_tokens - model.mean_output)
        self._consume(record)
        if self._again is not None and (next_one := self._again(record, now)) is not None:
            self._arrivals.add(next_one)

    def _hand_over(self, replica: Replica, now: float) -> None:
        """Send the prompts that a replica has just computed; its next step is planned by now."""
        model = self._model_of[replica.index]
        transfer, back = model.transfer, model.back
        assert transfer is not None and back is not None, "its jobs would have ended there"
        begin = max(now, replica.free_at) if transfer.between_steps else now
        for job in self._leaving:
            arrival = job.arrival
            ready = begin + transfer.seconds(arrival.prompt_tokens)
            moved = Job(arrival, job.number, ready, arrival.output_tokens - 1, received=True)
            self._submit(back, model, moved)
        self._leaving.clear()


def _look(group: _Group, now: float) -> Callable[[int], Pressure]:
    """Return what fetches the report of a group's replica."""
    return lambda index: _pressure(group.replicas[index], now)


def _pressure(replica: Replica, now: float) -> Pressure:
    """Return what the engine's metrics would report."""
    stats = replica.scheduler.stats()
    cache = replica.scheduler.cache
    return Pressure(
        now,
        waiting=float(stats.num_waiting),
        running=float(stats.num_running),
        kv=1.0 - stats.num_free_blocks / max(1, stats.num_blocks),
        capacity_tokens=float(stats.num_blocks * cache.block_size),
        preemptions=float(stats.num_preemptions),
        level=float(stats.pressure_level),
        slots=float(replica.config.scheduler.max_num_seqs),
    )
