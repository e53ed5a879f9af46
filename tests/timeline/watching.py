"""A real engine core on a clock that is moved by hand, and a model beside it that knows nothing but
the frames. ``check`` holds one to the other."""

from __future__ import annotations

from typing import Any

from paceline.backends.reference.null import NullBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerOutput
from paceline.core.request import Request, RequestStatus
from paceline.engine.core import EngineCore, EngineParts
from paceline.speculation.drafts import DrafterMaker
from paceline.timeline.codec import Decoder
from paceline.timeline.events import NO_LANE, Frame, State
from paceline.timeline.model import Model, Seen, Step
from paceline.timeline.tap import TimelineTap


class Watched:
    """An engine and its model."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_host_blocks: int = 0,
        depth: int = 1,
        step_seconds: float = 0.01,
        vocab_size: int = 997,
        drafter: DrafterMaker | None = None,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": 1024,
            "future_memory_check": False,
            "max_token_gap_s": None,
        }
        scheduler = SchedulerConfig(**(defaults | config))
        cache = CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            watermark=0.0,
            num_host_blocks=num_host_blocks,
        )
        self.now = 100.0
        self.step_seconds = step_seconds
        # its own cost is nothing here
        self.tap = TimelineTap(scheduler, cache, clock=lambda: 0.0)
        self.core = EngineCore(
            NullBackend(
                vocab_size=vocab_size,
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=scheduler.max_model_len,
                num_host_blocks=num_host_blocks,
            ),
            scheduler,
            cache,
            pipeline_depth=depth,
            clock=lambda: self.now,
            parts=EngineParts(recorders=(self.tap,), drafter=drafter),
        )
        self.plans: list[SchedulerOutput] = []
        self.core.on_plan = self._planned
        self.requests: dict[str, Request] = {}
        self.data = b""
        self.frames: list[Frame] = []
        self.ended: dict[str, Seen] = {}
        self.done: list[Step] = []
        self.decoder = Decoder()
        self.model = Model(self.done.append, self._ended)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add_request(request)
            self.requests[request.request_id] = request
        self.check()

    def abort(self, *request_ids: str) -> None:
        self.core.abort(request_ids)
        self.check()

    def step(self) -> None:
        self.core.step()
        self.core.take_expired()
        self.now += self.step_seconds
        self.check()

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("requests are stuck")

    def check(self) -> None:
        """The model and the scheduler agree, whoever looks."""
        data = self.tap.take(self.now, idle=True)
        self.data += data
        for frame in self.decoder.feed(data):
            self.frames.append(frame)
            self.model.take(frame)
        assert (self.decoder.num_broken, self.decoder.num_unknown) == (0, 0)
        model, scheduler = self.model, self.core.scheduler
        assert model.num_doubts == 0
        running = scheduler.state.running.requests
        known = {r.request_id: r for r in self.requests.values()}
        alive = {n for n, r in known.items() if r.status is not RequestStatus.FINISHED}
        assert {named(seen) for seen in model.requests.values()} == alive
        # a plan without rows preempted these, which is told with the next one
        untold = {n for n in scheduler.state.running._released if n in alive}
        untold -= {r.request_id for r in running}
        told = {named(seen) for seen in model.running()}
        assert told - untold == {r.request_id for r in running}
        assert len(set(model.lanes) - {0}) == len(told)
        rows = {row.request_id: row for row in self.plans[-1].rows} if self.plans else {}
        drafted = (
            {self.plans[-1].rows[d.row].request_id for d in self.plans[-1].drafts} if rows else ()
        )
        for seen in model.running():
            request = known[named(seen)]
            if named(seen) in untold:
                continue
            assert seen.computed == request.num_computed_tokens, named(seen)
            assert seen.preemptions == request.num_preemptions
            row = rows.get(named(seen))
            if row is None:
                # it has had rows before, or would not run
                assert seen.state is State.SKIPPED, named(seen)
            else:
                wide = row.num_tokens > 1 and named(seen) not in drafted
                assert seen.state is (State.CHUNK if wide else State.DECODE)
            if request.timeline_sent:
                assert seen.demoted == request.history.demoted
        for seen in model.waiting():
            request = known[named(seen)]
            assert seen.lane == NO_LANE and request.status is RequestStatus.WAITING
            if request.num_preemptions == 0:
                assert seen.state in (State.WAIT, State.HELD)
            else:
                swapped = request.num_swapped_tokens > 0
                assert seen.state is (State.SWAPPED if swapped else State.PREEMPTED)

    def check_story(self, request: Request) -> None:
        """Of one that ended: what its states add up to is what the engine says of it."""
        seen = self.ended[request.request_id]
        end, history = seen.ended, request.history
        assert end is not None and seen.end == request.finish_reason.value  # type: ignore[union-attr]
        waited = dict.fromkeys(State, 0.0)
        for span in seen.spans:
            assert span.end >= span.start
            waited[span.state] += span.end - span.start
        assert all(
            a.end <= b.start + 1e-9 for a, b in zip(seen.spans, seen.spans[1:], strict=False)
        )
        told = waited[State.WAIT] + waited[State.PREEMPTED] + waited[State.SWAPPED]
        assert abs(told - sum(history.waits)) < 1e-3
        assert abs(seen.waited - told) < 1e-6
        assert [round(w, 3) for w in end.waits] == [round(w, 3) for w in history.waits or [0.0] * 7]
        assert end.chunks == history.num_chunks
        chunks = sum(span.steps for span in seen.spans if span.state is State.CHUNK)
        assert chunks == history.num_chunks
        assert end.preemptions == seen.preemptions == request.num_preemptions
        assert end.output_tokens == request.num_output_tokens
        # from arrival on nothing is missing
        assert abs(seen.spans[0].start - request.asked.arrival_time) < 1e-6
        total = sum(span.end - span.start for span in seen.spans)
        assert abs(total - (end.when - request.asked.arrival_time)) < 1e-3

    def _planned(self, plan: SchedulerOutput) -> None:
        self.plans.append(plan)

    def _ended(self, seen: Seen) -> None:
        self.ended[named(seen)] = seen


def named(seen: Seen) -> str:
    assert seen.told is not None
    return seen.told.request_id
