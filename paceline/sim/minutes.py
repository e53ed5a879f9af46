"""The last minutes of a live engine as a recording, from the frames that its timeline kept.

What ``paceline serve --record`` writes to a file is here put together from what the page is told:
the workload with its targets, and the steps that step times are fitted to. Frames say who computed
what as changes, so rows are those of the model that they rebuild.

Results that were read late are taken to have been there when the backend began the next step. Left
out are steps that frames do not tell whole: those that stand for several, those told without
their chunks, and those before the first keyframe. A request that was under way at the end has as
many output tokens as it had come to.

This module does not know who kept the frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from paceline.engine.timeline.codec import Decoder
from paceline.engine.timeline.events import FrameType, Kind, Plan, State, Told
from paceline.engine.timeline.model import Model, Seen, Step
from paceline.sim.arrival import Arrival
from paceline.sim.config import ReplicaConfig
from paceline.sim.recording import RecordedRequest, RecordedStep, Recording

__all__ = ["recording_of", "workload_of"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a step, as it was planned."""

    wide: tuple[tuple[int, int], ...]
    narrow_keys: int
    longest: int
    samples: int


class _Reader:
    def __init__(self) -> None:
        self.model = Model(self._stepped, self._ended)
        self.steps: list[RecordedStep] = []
        self.requests: list[RecordedRequest] = []
        self._rows: dict[int, _Rows] = {}
        # output tokens of requests so far, by number
        self._outputs: dict[int, int] = {}
        # the step before was left out, so its end does not say when this one could begin
        self._after_gap = False

    def read(self, frames: bytes) -> None:
        for frame in Decoder().feed(frames):
            if isinstance(frame, Told) and frame.type in (FrameType.START, FrameType.GAP):
                # plans of an engine that is gone, or from before a gap, have no result
                self._rows.clear()
                self._after_gap = True
                if frame.type is FrameType.START:
                    self._outputs.clear()
            whole = isinstance(frame, Plan) and self.model.synced and _is_whole(frame)
            self.model.take(frame)
            if whole and isinstance(frame, Plan):
                self._rows[frame.step] = self._rows_of(frame)
        for seen in self.model.requests.values():
            self._ended(seen)

    def _rows_of(self, plan: Plan) -> _Rows:
        chunks = {
            event.lane: event.value
            for event in plan.events
            if event.kind in (Kind.CHUNK, Kind.DRAFT)
        }
        wide: list[tuple[int, int]] = []
        keys = longest = samples = 0
        for seen in self.model.running():
            tokens = chunks.get(seen.lane)
            if tokens is not None:
                wide.append((seen.computed - tokens, tokens))
                samples += self._samples(seen, tokens)
            elif seen.state is State.DECODE:
                start = max(0, seen.computed - 1)
                keys += start
                longest = max(longest, start)
                samples += self._samples(seen, 1)
        return _Rows(tuple(wide), keys, longest, samples)

    def _samples(self, seen: Seen, tokens: int) -> bool:
        """Whether a row that computed so many tokens brought the next one: it reached the end of
        what there was. A request that was preempted computes its output tokens again."""
        if seen.told is None:
            return True
        prompt = seen.told.prompt_tokens
        # of a request that ran before these frames begin, as many as it had computed
        before = seen.computed - tokens
        found = self._outputs.get(seen.number, max(0, before - prompt + 1))
        samples = seen.computed >= prompt + found
        self._outputs[seen.number] = found + samples
        return samples

    def _stepped(self, step: Step) -> None:
        plan, done = step.plan, step.done
        rows = self._rows.pop(plan.step, None)
        if rows is None or done is None:
            self._after_gap = True
            return
        # at a pipeline depth of 2 it was planned while the one before ran
        planned = step.start if self._after_gap else plan.planned
        if not self._after_gap:
            self._was_ready(done.done - done.backend)
        self._after_gap = False
        self.steps.append(
            RecordedStep(
                planned=planned,
                done=done.done,
                seconds=done.backend,
                wide=rows.wide,
                narrow_rows=plan.narrow,
                narrow_keys=rows.narrow_keys,
                longest=rows.longest,
                samples=rows.samples,
            )
        )

    def _was_ready(self, begun: float) -> None:
        """The backend began the next step then, so the result of the last one was there by then,
        however late it was read. Where the engine's thread gets no processor for a while it finds
        two results at once; taken by when they were read, the second step would seem to have taken
        no time at all, and fits of relative errors would be of such steps alone."""
        last = self.steps[-1]
        if last.planned < begun < last.done:
            self.steps[-1] = replace(last, done=begun)

    def _ended(self, seen: Seen) -> None:
        told, end = seen.told, seen.ended
        so_far = self._outputs.pop(seen.number, 0)
        if told is None:
            return
        self.requests.append(
            RecordedRequest(
                request_id=told.request_id,
                arrival=told.arrival,
                taken=told.added,
                scheduled=None if end is None else _or_none(end.first_scheduled),
                first_token=None if end is None else _or_none(end.first_token),
                last_token=self.model.now if end is None else end.when,
                prompt_tokens=told.prompt_tokens,
                output_tokens=so_far if end is None else end.output_tokens,
                cached_tokens=0 if end is None else end.cached,
                preemptions=seen.preemptions if end is None else end.preemptions,
                end=seen.end or "",
                slo={
                    "slo_class": told.slo_class,
                    "best_effort": told.best_effort,
                    "ttft": _target(told.ttft),
                    "tpot": _target(told.tpot),
                    "deadline": _target(told.deadline),
                },
                tenant=told.tenant,
                priority=told.priority,
            )
        )


def recording_of(frames: bytes, config: ReplicaConfig) -> Recording:
    """What the frames of a live engine tell, with the settings that it was started with.

    Args:
        frames: whole ones, such as ``GET /ui/api/timeline`` answers.
    """
    reader = _Reader()
    reader.read(frames)
    requests = sorted(_once(reader.requests), key=lambda request: request.arrival)
    return Recording(config, tuple(reader.steps), tuple(requests), 0)


def workload_of(recording: Recording) -> Iterator[Arrival]:
    """As ``Recording.workload``, and with as much in the prefix cache as there was.

    Frames hold no texts, so who shared which tokens with whom is not known, but how many each found
    is: so many of its blocks are those of one prefix that all share. The first who has them
    computes them; who found nothing shares nothing. Pieces of ``Arrival.prefix`` are blocks.
    """
    size = recording.config.cache.block_size
    answered = [request for request in recording.requests if request.output_tokens >= 1]
    for request, arrival in zip(answered, recording.workload(), strict=True):
        # the last token of a prompt is always computed
        found = min(request.cached_tokens, request.prompt_tokens - 1) // size
        yield replace(arrival, prefix=tuple(range(found))) if found else arrival


def _once(requests: Iterable[RecordedRequest]) -> Iterable[RecordedRequest]:
    """A request that went on in another engine was announced twice: it is one that came once."""
    found: dict[str, RecordedRequest] = {}
    for request in requests:
        before = found.get(request.request_id)
        if before is not None:
            request = replace(request, arrival=min(before.arrival, request.arrival))
        found[request.request_id] = request
    return found.values()


def _is_whole(plan: Plan) -> bool:
    return plan.merged <= 1 and not plan.thin


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _target(value: float) -> float | None:
    """Frames have 32 bits for it, in which 0.03 is a little less."""
    return None if math.isnan(value) else float(f"{value:.6g}")
