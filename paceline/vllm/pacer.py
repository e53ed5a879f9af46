"""The core inside vLLM's engine process: its clock, its requests, and what it tells of them.

``scheduler`` calls it from the engine's thread, and the channel's thread asks it for fates, counts
and forecasts: one lock is held by either while it is in the core.

This module does not import vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepResult, Timeline
from paceline.core.request import FinishReason, Request
from paceline.core.scheduler import Scheduler
from paceline.engine.recorder import FileRecorder
from paceline.errors import QueueFullError, RequestError
from paceline.vllm.mirror import MirroredCache
from paceline.vllm.requests import (
    CHARACTERS,
    TAG,
    arguments_of,
    core_request,
    foreseen_request,
    slo_arguments,
    slo_of,
)
from paceline.vllm.settings import Settings

__all__ = ["Counts", "Fate", "Pacer", "Refusal"]

# requests whose fates are kept after their end
_KEPT: Final = 1_000
_DEPTH: Final = 2
_NUMBERS: Final = ("num_steps", "num_amended", "num_own_steps", "num_faults")
# characters of each token before any were counted, and the weight of what was counted before each
# new prompt
_CHARACTERS, _KEEP = 4.0, 0.98
# characters of each token in a text, at least and at most
_FEWEST, _MOST = 0.5, 64.0
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _alone(
    method: Callable[Concatenate[Pacer, _P], _R],
) -> Callable[Concatenate[Pacer, _P], _R]:
    """Let one thread at a time run such methods."""

    @functools.wraps(method)
    def call(self: Pacer, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class Refusal(NamedTuple):
    """Why a request was not served."""

    status: int
    message: str
    # seconds; None: coming back does not help
    retry_after: float | None
    reason: str
    param: str | None


class Fate(NamedTuple):
    """State of a request so far: a refusal, or its timeline."""

    refusal: Refusal | None
    timeline: Timeline | None
    # seconds from arrival to first token; None: it has none yet
    ttft: float | None
    # rate after the first token; None for a single token
    tokens_per_second: float | None
    # the targets, as ``vllm_xargs`` has them, and those that were missed
    targets: Mapping[str, str | float | int]
    violated: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Counts:
    """Counters since the start, for metrics."""

    num_steps: int = 0
    # steps of which something did not run as planned
    num_amended: int = 0
    # steps that vLLM scheduled by itself, and faults that led to that
    num_own_steps: int = 0
    num_faults: int = 0
    # by SLO class: requests that ended, those that met every target they had, and by class and
    # kind what was missed
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    kept: Counter[str] = dataclasses.field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)


class Pacer:
    """The core and its counts, see the module. ``find`` returns vLLM's own request by its id."""

    def __init__(
        self,
        settings: Settings,
        cache: Any,
        find: Callable[[str], Any],
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._settings, self._theirs, self._find = settings, cache, find
        self._clock, self._wall = clock, wall
        self._lock = threading.RLock()
        self.counts = Counts()
        # whether the core has all of vLLM's requests
        self._leads = False
        # of prompts that came as text: characters and tokens, older ones counting less
        self._measured = 1_000.0 * _CHARACTERS, 1_000.0
        # ids of requests that vLLM schedules by itself within our steps
        self.foreign: set[str] = set()
        # by the middleware's tag and by vLLM's id, oldest first
        self.fates: OrderedDict[str, Fate] = OrderedDict()
        self._tags: dict[str, str] = {}
        self._live: dict[str, Request] = {}
        # when the plans in flight were made, oldest first, and when the last result came
        self._planned: list[float] = []
        self._result_at = 0.0
        self._recorder = (
            None
            if settings.record is None
            else FileRecorder(Path(settings.record), settings.scheduler, settings.cache, _DEPTH)
        )
        self.restart()

    @_alone
    def restart(self) -> None:
        """Begin with an empty core; no step is in flight."""
        settings = self._settings
        self.kv = MirroredCache(settings.cache, self._theirs, self._find, settings.num_theirs)
        self.core = Scheduler(self._settings.scheduler, self._settings.cache, kv=self.kv)
        self.give_up()
        self._leads = True

    @_alone
    def give_up(self) -> None:
        """Forget all requests: vLLM serves them by itself."""
        self._leads = False
        self.foreign.clear()
        self._tags.clear()
        self._live.clear()
        self._planned.clear()

    # ------------------------------------------------------------------ requests

    @_alone
    def add(self, theirs: Any, max_model_len: int) -> None:
        """Take a request that vLLM has queued.

        Raises:
            RequestError: it is not served; ``refuse`` keeps why.
        """
        now = self._clock()
        # vLLM's time is that of another process, on the wall's clock
        arrival = now - max(0.0, self._wall() - theirs.arrival_time)
        request = core_request(theirs, max_model_len, arrival, now)
        self.core.add_request(request)
        self._live[request.request_id] = request
        arguments = arguments_of(theirs)
        self._tags[request.request_id] = str(arguments.get(TAG, ""))
        characters, number = arguments.get(CHARACTERS), request.num_prompt_tokens
        # other numbers are those of pictures, or a lie, and tell nothing of other callers' texts
        if type(characters) is int and _FEWEST * number <= characters <= _MOST * number:
            before, tokens = self._measured
            self._measured = _KEEP * before + characters, _KEEP * tokens + number
        if self._recorder is not None:
            self._recorder.added(request, now)

    @_alone
    def refuse(self, theirs: Any, error: RequestError) -> None:
        """Keep why a request is not served."""
        self._refuse(arguments_of(theirs), theirs.request_id, error)

    def _refuse(self, arguments: Mapping[str, Any], name: str, error: RequestError) -> None:
        refusal = _refusal(error)
        if isinstance(error, QueueFullError):
            self._judge(slo_of(arguments).slo_class, ("refused",))
        tag = str(arguments.get(TAG, ""))
        self._keep(tag, name, Fate(refusal, None, None, None, {}, ()))

    @_alone
    def take_dropped(self) -> list[str]:
        """Return the waiting requests that the last plan dropped, once each."""
        dropped = self.core.take_expired()
        for expired in dropped:
            self.refuse(self._find(expired.request_id), expired.error)
            self._forget(expired.request_id)
        names = [expired.request_id for expired in dropped]
        self._record_end(names)
        return names

    @_alone
    def abort(self, request_ids: Sequence[str]) -> None:
        """Note requests that ended in vLLM otherwise than by a step."""
        self._end(self.core.abort(request_ids))
        self.foreign.difference_update(request_ids)
        self._record_end(request_ids)

    @_alone
    def end(self, request_ids: Iterable[str]) -> None:
        """Note requests of a step that vLLM ended: a stop token or string was found."""
        self._record_end(self._end(self.core.abort(request_ids, FinishReason.STOP)))

    def _record_end(self, request_ids: Sequence[str]) -> None:
        if request_ids and self._recorder is not None:
            self._recorder.ended(request_ids, self._clock())

    # ------------------------------------------------------------------ steps

    @_alone
    def plan(self) -> SchedulerOutput:
        """Return the plan of the next step."""
        self.kv.begin_plan(self.core.state.running.requests)
        return self.core.schedule(self._clock())

    @_alone
    def settle(
        self, plan: SchedulerOutput, done: Mapping[str, range], preempted: Sequence[str]
    ) -> SchedulerOutput:
        """Take in what vLLM made of the newest plan, and return the plan as it runs."""
        now = self._clock()
        if plan.rows:
            self.counts.num_steps += 1
        if done or preempted:
            self.counts.num_amended += 1
            plan = self.core.amend(plan, done, preempted, now)
        if plan.rows:
            self._planned.append(now)
        return plan

    @_alone
    def update(self, plan: SchedulerOutput, sampled: Sequence[tuple[int, ...]]) -> list[str]:
        """Take in the tokens of the oldest step in flight; returns the ids of ended requests."""
        now = self._clock()
        planned = self._planned.pop(0)
        # steps run one after another
        elapsed = now - max(planned, self._result_at)
        self._result_at = now
        self.kv.forget_lookups()
        result = StepResult(plan.step_id, tuple(sampled), elapsed=elapsed)
        updates = self.core.update(plan, result, now, tell_all=False)
        ended = self._end(updates)
        if self._recorder is not None:
            self._recorder.stepped(plan, planned, now, elapsed, updates)
        return ended

    # ------------------------------------------------------------------ fates

    def _end(self, updates: Iterable[RequestUpdate]) -> list[str]:
        ended = []
        now = self._clock()
        for update in updates:
            if update.finish_reason is None:
                continue
            name = update.request_id
            ended.append(name)
            request, tag = self._live[name], self._tags[name]
            first, arrival = request.first_token_time, request.asked.arrival_time
            violated: tuple[str, ...] = ()
            if first is not None:
                violated = request.slo.violations(arrival, first, now, request.num_output_tokens)
            if update.finish_reason is not FinishReason.ABORT:
                self._judge(request.slo.slo_class, violated)
            ttft = speed = None
            if first is not None:
                ttft, later = first - arrival, request.num_output_tokens - 1
                speed = later / (now - first) if later > 0 and now > first else None
            targets = slo_arguments(request.slo)
            self._keep(tag, name, Fate(None, update.timeline, ttft, speed, targets, violated))
            self._forget(name)
        return ended

    def _judge(self, slo_class: str, missed: Sequence[str]) -> None:
        self.counts.ended[slo_class] += 1
        self.counts.kept[slo_class] += not missed
        for kind in missed:
            self.counts.missed[slo_class, kind] += 1

    def _keep(self, tag: str, name: str, fate: Fate) -> None:
        before = self.fates.get(tag)
        if before is not None and before.refusal is not None:
            # of several choices or prompts one was refused, and so the whole answer is
            tag = ""
        for key in (tag, name):
            if key:
                self.fates[key] = fate
        while len(self.fates) > 2 * _KEPT:
            self.fates.popitem(last=False)

    def _forget(self, name: str) -> None:
        self._live.pop(name, None)
        self._tags.pop(name, None)

    # ------------------------------------------------------------------ for the channel's thread

    @_alone
    def answer(self, message: Mapping[str, Any]) -> Any:
        """Return the answer to a message of ``channel``."""
        if "fate" in message:
            fate = self.fates.get(str(message["fate"]))
            return None if fate is None else _told(fate)
        if "foresee" in message:
            return self._foresee(message["foresee"], message.get("counts"))
        counts, stats = self.counts, self.core.stats()
        states = Counter((each.slo.slo_class, each.status.value) for each in self._live.values())
        return {
            **{name: getattr(counts, name) for name in _NUMBERS},
            "ended": dict(counts.ended), "kept": dict(counts.kept),
            "missed": [(*names, count) for names, count in counts.missed.items()],
            "requests": [(*names, count) for names, count in states.items()],
            "demoted": stats.num_demoted, "pressure_level": stats.pressure_level,
            "step_tokens": {"prefill": stats.num_prefill_tokens, "decode": stats.num_decode_tokens},
            "step_seconds": {"predicted": stats.predicted_step_seconds,
                             "actual": stats.actual_step_seconds},
            "wasted": {"recomputed": stats.num_recomputed_tokens,
                       "discarded": stats.num_discarded_tokens},
            "blocked": {name: int(name == stats.blocked_by) for name, _ in stats.waited},
            "refused": dict(stats.refused), "waited": dict(stats.waited),
        }  # fmt: skip

    def _foresee(self, asked: Mapping[str, Any], engine: int | None) -> Any:
        """Return the forecast for a request that was not given to vLLM yet. ``engine``: the one at
        which a refusal counts, as its caller is told; None: nothing counts."""
        if not self._leads or engine not in (None, os.getpid()):
            return None
        characters, tokens = self._measured
        limit = self._settings.scheduler.max_model_len
        request = foreseen_request(asked, tokens / characters, limit, self._clock())

        def judged(num_found: int, *, counts: bool = False) -> QueueFullError | None:
            self.kv.assume_found(request, num_found)
            return self.core.foresee(request, counts=counts)

        error = judged(0)
        predicted = request.history.predicted_ttft
        # its prompt may be cached, which is known once it is tokens
        if error is not None and judged(request.num_prompt_tokens - 1) is None:
            error = None
        if error is not None and engine is not None:
            self._refuse(asked["arguments"], "", judged(0, counts=True) or error)
        told = None if error is None else _refusal(error)._asdict()
        return {
            "engine": os.getpid(), "predicted_ttft": predicted, "refusal": told,
            "prompt_tokens": request.num_prompt_tokens,
        }  # fmt: skip

    @_alone
    def close(self) -> None:
        """Write the end of the recording."""
        if self._recorder is not None:
            self._recorder.close()


def _refusal(error: RequestError) -> Refusal:
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), error.retry_after, error.reason, None)
    return Refusal(400, str(error), None, "", error.param)


def _told(fate: Fate) -> dict[str, Any]:
    timeline = None if fate.timeline is None else fate.timeline._asdict()
    refusal = None if fate.refusal is None else fate.refusal._asdict()
    return {
        "refusal": refusal, "timeline": timeline, "ttft": fate.ttft,
        "tokens_per_second": fate.tokens_per_second, "targets": dict(fate.targets),
        "violated": list(fate.violated),
    }  # fmt: skip
