"""The last minutes of a live engine as a recording, from the frames that its timeline kept.

The content of a ``paceline serve --record`` file is assembled here from the page's frames: the
workload with its targets, and the steps that step times are fitted to. Frames give rows as changes,
so rows are taken from the model that the frames rebuild.

A result that was read late is assumed to have existed when the backend began the next step. Steps
that frames do not describe in full are left out: those that stand for several, those without their
chunks, and those before the first keyframe. A request still running at the end has the output
tokens that it had got.

This module does not know where the frames were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from paceline.sim.arrival import Arrival
from paceline.sim.config import ReplicaConfig
from paceline.sim.recording import RecordedRequest, RecordedStep, Recording
from paceline.timeline.codec import Decoder
from paceline.timeline.events import FrameType, Kind, Plan, State, Told
from paceline.timeline.model import Model, Seen, Step

__all__ = ["recording_of", "workload_of"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a planned step."""

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
        # number of output tokens so far, by request number
        self._outputs: dict[int, int] = {}
        # the previous step was left out, so its end does not tell when this one could begin
        self._after_gap = False

    def read(self, frames: bytes) -> None:
        for frame in Decoder().feed(frames):
            if isinstance(frame, Told) and frame.type in (FrameType.START, FrameType.GAP):
                # plans of an ended engine, or from before a gap, have no result
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
        """Whether a row of ``tokens`` tokens sampled the next one, that is, reached the end of the
        known tokens. A preempted request computes its output tokens again."""
        if seen.told is None:
            return True
        prompt = seen.told.prompt_tokens
        # a request older than the frames has as many output tokens as it had computed
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
        # at a pipeline depth of 2 it was planned while the previous step ran
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
        """Bound the last step's end by ``begun``, when the backend began the next step: its result
        existed by then, however late it was read. An engine thread that gets no processor for a
        while reads two results at once; by the times of reading, the second step would seem to have
        taken no time, and fits of relative errors would depend on such steps alone."""
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
                scheduled=None if end is None else end.first_scheduled,
                first_token=None if end is None else end.first_token,
                last_token=self.model.now if end is None else end.when,
                prompt_tokens=told.prompt_tokens,
                output_tokens=so_far if end is None else end.output_tokens,
                cached_tokens=0 if end is None else end.cached,
                preemptions=seen.preemptions if end is None else end.preemptions,
                end=seen.end or "",
                slo={
                    "slo_class": told.slo_class,
                    "best_effort": told.best_effort,
                    "ttft": told.ttft,
                    "tpot": told.tpot,
                    "deadline": told.deadline,
                },
                tenant=told.tenant,
                priority=told.priority,
            )
        )


def recording_of(frames: bytes, config: ReplicaConfig) -> Recording:
    """Return a live engine's frames, with the settings that it was started with, as a recording.

    Args:
        frames: complete frames, such as ``GET /ui/api/timeline`` returns.
    """
    reader = _Reader()
    reader.read(frames)
    requests = sorted(_once(reader.requests), key=lambda request: request.arrival)
    return Recording(config, tuple(reader.steps), tuple(requests), 0)


def workload_of(recording: Recording) -> Iterator[Arrival]:
    """Yield arrivals as ``Recording.workload`` does, with the prefix cache's share of each prompt.

    Frames hold no texts, so it is not known which requests shared tokens, but how many each found
    in the cache: as many of its blocks belong to one prefix that all share. The first request with
    them computes them; one that found nothing shares nothing. Pieces of ``Arrival.prefix`` are
    blocks.
    """
    size = recording.config.cache.block_size
    answered = [request for request in recording.requests if request.output_tokens >= 1]
    for request, arrival in zip(answered, recording.workload(), strict=True):
        # a prompt's last token is always computed
        found = min(request.cached_tokens, request.prompt_tokens - 1) // size
        yield replace(arrival, prefix=tuple(range(found))) if found else arrival


def _once(requests: Iterable[RecordedRequest]) -> Iterable[RecordedRequest]:
    """Merge the two announcements of a request that was resumed in another engine."""
    found: dict[str, RecordedRequest] = {}
    for request in requests:
        before = found.get(request.request_id)
        if before is not None:
            request = replace(request, arrival=min(before.arrival, request.arrival))
        found[request.request_id] = request
    return found.values()


def _is_whole(plan: Plan) -> bool:
    return plan.merged <= 1 and not plan.thin
