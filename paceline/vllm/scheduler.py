"""vLLM's scheduler that carries the core's plans out.

::

    plan = core.schedule(now)
    requests that the plan leaves out are hidden, the others sorted as in the plan
    max_num_scheduled_tokens = plan.num_tokens
    output = AsyncScheduler.schedule()         allocates, admits, builds vLLM's SchedulerOutput
    what was hidden is put back; what came out otherwise is amended in the core

Chunks are cut in the one small method that vLLM asks for every row's length. vLLM's classes stay
unchanged. A fault on our side ends pacing, not the engine: vLLM then schedules by itself for a
second, and a new core takes its requests over.

This is the only module that imports vLLM.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.errors import RequestError
from paceline.vllm.channel import Channel
from paceline.vllm.names import check_names
from paceline.vllm.pacer import Pacer
from paceline.vllm.settings import read_settings, untried

__all__ = ["PacedScheduler"]

_NOTHING: Final[Mapping[str, int]] = {}
# times that pacing begins again after a fault, and after how many seconds
_MOST_FAULTS: Final = 3
_PAUSE_SECONDS: Final = 1.0
_log: Final = logging.getLogger(__name__)


class PacedScheduler(AsyncScheduler):
    """vLLM's scheduler, which carries the core's plans out. Made by vLLM's engine process. The
    benchmark replaces the two clocks.

    Raises:
        ConfigError: this vLLM lacks a name that is used, or a setting or feature is refused.
    """

    # vLLM's own
    running: list[Any]
    waiting: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    # the core's clock, and the one on which vLLM notes when a request arrived
    clock = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_names(self, AsyncScheduler, vllm.__version__)
        # vLLM keeps one block for itself, which is never free
        num_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        groups = max(1, getattr(self.kv_cache_manager, "num_kv_cache_groups", 1))
        settings = read_settings(self.vllm_config, num_blocks, groups, self.block_size)
        for feature in untried(self.vllm_config):
            _log.warning("paceline.vllm passes through, and was not tried with, %s", feature)
        self.pacer = Pacer(
            settings, self.kv_cache_manager, self.requests.get, clock=self.clock, wall=self.wall
        )
        self._channel = Channel(self.pacer.answer)
        self._most_tokens = self.max_num_scheduled_tokens
        # tokens of each row of the plan that is carried out now
        self._want: Mapping[str, int] = _NOTHING
        # steps whose results are not in: vLLM's output, and the plan; None: vLLM's own step
        self._flying: deque[tuple[Any, SchedulerOutput | None]] = deque()
        self._paces, self._again_at = True, 0.0
        # requests that were refused or dropped, to be answered with the next outputs
        self._refused: list[Any] = []

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known and self._paces:
            self._guarded(self._add, request)

    def _add(self, request: Any) -> None:
        if getattr(request, "resumable", False):
            # its prompt grows while it runs, which the core cannot follow
            self.pacer.foreign.add(request.request_id)
            return
        try:
            self.pacer.add(request, self.max_model_len)
        except RequestError as error:
            self.pacer.refuse(request, error)
            super().finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self._refused.append(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        if self._paces and ended:
            self._guarded(self.pacer.abort, [each.request_id for each in ended])
        return ended

    # ------------------------------------------------------------------ a step

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        due = not self._paces and self._due()
        if due and not any(output.num_scheduled_tokens for output, _ in self._flying):
            self._paces, due = True, False
            self._guarded(self._take_over)
        staged = self._guarded(self._stage) if self._paces else None
        if staged is None:
            self.pacer.counts.num_own_steps += 1
            # one is left empty before pacing begins again, so that no step is in flight then
            self.max_num_scheduled_tokens = 0 if due else self._most_tokens
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self.max_num_scheduled_tokens = self._most_tokens
            self._flying.append((output, None))
            return output
        plan, shown, admitted, hidden = staged
        waiting, before = self.waiting, list(shown)
        self.running, self.waiting = shown, create_request_queue(self.policy)
        for request in admitted:
            self.waiting.add_request(request)
        self._want = {row.request_id: row.num_tokens for row in plan.rows}
        if not self.pacer.foreign:
            self.max_num_scheduled_tokens = plan.num_tokens
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running += hidden
            left, self.waiting = self.waiting, waiting
            if admitted:
                self.waiting.remove_requests(admitted)
            for request in reversed(list(left)):
                self.waiting.prepend_request(request)
            want, self._want = self._want, _NOTHING
            self.max_num_scheduled_tokens = self._most_tokens
        ran = self._guarded(self._settle, plan, want, output, before, admitted)
        self._flying.append((output, ran))
        return output

    def _stage(self) -> tuple[SchedulerOutput, list[Any], list[Any], list[Any]]:
        """Plan the next step. Returns the plan, its running and its waiting requests in its order,
        and the running ones that it leaves out. What the core does not know comes last."""
        self.pacer.foreign &= self.requests.keys()
        plan = self.pacer.plan()
        for name in plan.released:
            request = self.requests.get(name)
            if request is not None and request.status == RequestStatus.RUNNING:
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
        for name in self.pacer.take_dropped():
            self._refused.append(self.requests[name])
            super().finish_requests(name, RequestStatus.FINISHED_ERROR)
        running = RequestStatus.RUNNING
        named = [self.requests[row.request_id] for row in plan.rows]
        admitted = [request for request in named if request.status != running]
        if self.pacer.foreign:
            admitted += self._sessions()
            named += [self.requests[name] for name in self.pacer.foreign]
            # they take places of which the core does not know
            del admitted[max(0, self.max_num_running_reqs - len(self.running)) :]
        shown = [request for request in named if request.status == running]
        kept = set(map(id, shown))
        return plan, shown, admitted, [each for each in self.running if id(each) not in kept]

    def _sessions(self) -> list[Any]:
        """Return the waiting requests that the core does not know. One that waits for more of its
        prompt lies in another queue of vLLM's, which ``schedule`` reads by itself."""
        return [each for each in self.waiting if each.request_id in self.pacer.foreign]

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        most: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(most, self._want.get(request.request_id, most))

    def _settle(
        self,
        plan: SchedulerOutput,
        want: Mapping[str, int],
        output: Any,
        shown: list[Any],
        admitted: list[Any],
    ) -> SchedulerOutput:
        """Tell the core what came out otherwise than planned."""
        ran = output.num_scheduled_tokens
        rows: Iterable[ScheduledRow] = plan.rows
        if ran == want:
            # only the prefix that was found for an admitted request can differ
            names = {request.request_id for request in admitted}
            rows = [row for row in plan.rows if row.request_id in names] if names else ()
        done: dict[str, range] = {}
        for row in rows:
            num_tokens = ran.get(row.request_id, 0)
            stop = self.requests[row.request_id].num_computed_tokens
            if not num_tokens:
                done[row.request_id] = range(row.start, row.start)
            elif num_tokens != row.num_tokens or stop != row.start + num_tokens:
                done[row.request_id] = range(stop - num_tokens, stop)
        gone = []
        if done:
            gone = [r.request_id for r in shown if r.status == RequestStatus.PREEMPTED]
            gone = [name for name in gone if name not in self.pacer.foreign]
        return self.pacer.settle(plan, {k: v for k, v in done.items() if k not in gone}, gone)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        flying, plan = self._flying.popleft() if self._flying else (None, None)
        if self._paces and plan is not None and plan.rows:
            self._guarded(self._learn, plan, flying is scheduler_output, model_runner_output)
        if self._refused:
            self._answer_refused(outputs)
        return outputs

    def _learn(self, plan: SchedulerOutput, in_order: bool, result: Any) -> None:
        assert in_order, "results must come in the order of steps"
        index, tokens = result.req_id_to_index, result.sampled_token_ids
        sampled = [tuple(tokens[index[row.request_id]]) if row.samples else () for row in plan.rows]
        for name in self.pacer.update(plan, sampled):
            assert name not in self.requests, f"{name} ended in the core alone"
        self.pacer.end(row.request_id for row in plan.rows if row.request_id not in self.requests)

    def _answer_refused(self, outputs: dict[int, Any]) -> None:
        """Add the end of refused requests to vLLM's outputs."""
        refused, self._refused = self._refused, []
        for request in refused:
            ended = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR
            )
            if request.client_index not in outputs:
                outputs[request.client_index] = EngineCoreOutputs(outputs=[])
            outputs[request.client_index].outputs.append(ended)

    def shutdown(self) -> None:
        self._channel.close()
        self.pacer.close()
        super().shutdown()

    # ------------------------------------------------------------------ faults

    def _guarded(self, call: Any, *args: Any) -> Any:
        """Return what ``call`` returns; None after a fault, which ends pacing for now."""
        try:
            return call(*args)
        except Exception:
            self.pacer.counts.num_faults += 1
            # the plans in flight are of a core that is given up
            self._flying = deque((output, None) for output, _ in self._flying)
            self.pacer.give_up()
            self._paces, self._again_at = False, self.clock() + _PAUSE_SECONDS
            until = "for a second" if self._is_forgiven() else "from now on"
            _log.exception(
                "paceline_fault number=%d: vLLM schedules by itself %s. Please report this",
                self.pacer.counts.num_faults, until,
            )  # fmt: skip
            return None

    def _is_forgiven(self) -> bool:
        return self.pacer.counts.num_faults <= _MOST_FAULTS

    def _due(self) -> bool:
        """Whether pacing begins again after a fault."""
        return self._is_forgiven() and self.clock() >= self._again_at

    def _take_over(self) -> None:
        """Give all of vLLM's requests to a new core. They wait there, so those that run are
        preempted, and find most of what they had computed in vLLM's prefix cache."""
        for request in [each for each in self.running if not getattr(each, "resumable", False)]:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
        self.pacer.restart()
        for request in sorted(self.requests.values(), key=lambda each: each.arrival_time):
            self._add(request)
