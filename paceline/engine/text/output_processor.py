"""Conversion of engine updates to answers: text, stop strings, usage and times, by request.

::

    RequestUpdate of r/0, r/1, ... --> OutputProcessor --> one GenerationOutput of r per batch
                                                       --> ids the engine is to abort

Runs in the caller's process, never in the engine's loop, so that text work cannot stall a step. It
does not know sockets, threads or the readers of its outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.core.outputs import RequestUpdate, Timeline, TokenLogprobs
from paceline.core.request import FinishReason
from paceline.engine.fanout import choice_id, open_choices
from paceline.engine.protocol import Tokenizer
from paceline.engine.text.detokenizer import IncrementalDetokenizer, StopFound, StopStrings
from paceline.engine.types import (
    ChoiceDelta,
    GenerationOutput,
    GenerationRequest,
    RequestTimes,
    Resume,
    ResumedChoice,
)
from paceline.errors import InvalidRequestError

__all__ = ["OutputProcessor", "Processed", "merge_outputs", "resumed_texts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Processed:
    """The results of one batch of updates."""

    # at most one per request
    outputs: tuple[GenerationOutput, ...]
    # choices that ended here while the engine still works on them: by a stop string, or because
    # detokenization failed
    stopped: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Request:
    """A request and the sums over its choices."""

    request: GenerationRequest
    # ids of choices that have not ended
    live: set[str]
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    # preemptions so far, by choice, and last those on earlier engines
    num_preemptions: list[int] = field(default_factory=list)
    # 0.0 until the engine reports it
    first_scheduled: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    longest_gap: float = 0.0
    # waiting for the next output; None once sent
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    told_prompt_logprobs: bool = False
    # the vector of a pooling request
    pooled: bytes | None = None
    # output of each choice so far, for an engine that may have to continue it
    token_ids: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenerationRequest) -> _Request:
        live = {choice_id(request.request_id, index) for index in open_choices(request)}
        resume = request.resume
        before = 0 if resume is None else resume.num_preemptions
        self = cls(request, live, num_preemptions=[*[0] * request.n, before])
        if resume is None:
            self.token_ids = [[] for _ in range(request.n)]
            return self
        self.token_ids = [list(choice.token_ids) for choice in resume.choices]
        self.num_output_tokens = resume.num_output_tokens
        self.num_cached_tokens = resume.num_cached_tokens
        # they came with the first token
        self.told_prompt_logprobs = self.num_output_tokens > 0
        if (times := resume.times) is not None:
            self.first_scheduled, self.first_token = times.first_scheduled, times.first_token
            self.last_token, self.longest_gap = times.last_token, times.longest_gap
        return self

    def resume(self) -> Resume:
        """Return the output so far, for another engine to continue."""
        live = self.live
        return Resume(
            choices=tuple(
                ResumedChoice(
                    token_ids=tuple(token_ids),
                    ended=choice_id(self.request.request_id, index) not in live,
                )
                for index, token_ids in enumerate(self.token_ids)
            ),
            times=self.times(),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=sum(self.num_preemptions),
        )

    def account(self, update: RequestUpdate, num_tokens: int, index: int, now: float) -> None:
        """Count one update, of which ``num_tokens`` tokens are delivered."""
        self.num_output_tokens += num_tokens
        self.num_preemptions[index] = update.num_preemptions
        if index == 0 and self.request.resume is None:
            # the others are forks: they only share the first one's prompt
            self.num_cached_tokens = update.num_cached_tokens
        if not self.first_scheduled:
            self.first_scheduled = update.first_scheduled_time
        if num_tokens or self.pooled is not None:
            if self.first_token is None:
                self.first_token = now
            elif now - self.last_token > self.longest_gap:
                self.longest_gap = now - self.last_token
            self.last_token = now

    def times(self) -> RequestTimes | None:
        if self.first_token is None:
            return None
        return RequestTimes(
            arrival=self.request.arrival_time,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            last_token=self.last_token,
            longest_gap=self.longest_gap,
        )

    def output(self, choices: tuple[ChoiceDelta, ...]) -> GenerationOutput:
        request = self.request
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return GenerationOutput(
            request_id=request.request_id,
            choices=choices,
            prompt_logprobs=prompt_logprobs,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            finished=not self.live,
            times=self.times(),
            num_preemptions=sum(self.num_preemptions),
            pooled=self.pooled,
        )


class _Choice:
    """One sequence and its conversion to text."""

    __slots__ = (
        "detokenizer", "index", "owner", "passed_over", "stops", "timeline", "token_ids",
        "tokenizer",
    )  # fmt: skip

    def __init__(self, owner: _Request, index: int, tokenizer: Tokenizer) -> None:
        request = owner.request
        self.owner = owner
        self.index = index
        self.tokenizer = tokenizer
        # ids delivered so far
        self.token_ids = owner.token_ids[index]
        # the latest one
        self.timeline: Timeline | None = None
        self.detokenizer: IncrementalDetokenizer | None = None
        self.stops: StopStrings | None = None
        if request.detokenize:
            self.detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=request.skip_special_tokens
            )
        if request.stop:
            self.stops = StopStrings(
                request.stop,
                include_in_output=request.include_stop_str_in_output,
                hidden=_special_in(request.stop, tokenizer) if request.skip_special_tokens else (),
            )
        # text that another engine has delivered
        self.passed_over = "".join(
            self._pass_over(token_id, number) for number, token_id in enumerate(self.token_ids, 1)
        )

    def _pass_over(self, token_id: int, number: int) -> str:
        """Process the ``number``-th token of all, whose text another engine has delivered.

        Raises:
            InvalidRequestError: a stop string ends with it.
        """
        if self.detokenizer is None:
            return ""
        text = self._text(self.detokenizer, token_id)
        if self.stops is None:
            return text
        may_stop = number > self.owner.request.sampling.min_tokens
        found = self.stops.push(text, may_stop=may_stop)
        if isinstance(found, StopFound):
            raise InvalidRequestError(
                f"the text of resume_output_ids has the stop string {found.stop!r}, which ends the "
                f"output, after {number} of {len(self.token_ids)} tokens",
                "resume_output_ids",
            )
        return found

    def _text(self, detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        """Return the text that a token adds, or the mark of one that is left out of the text."""
        special = self.owner.request.skip_special_tokens and self.tokenizer.special_token_ids
        if self.stops is None or not special or token_id not in special:
            return detokenizer.push((token_id,))
        return self.stops.mark(self.tokenizer.token_bytes(token_id).decode("utf-8", "replace"))

    def take(self, update: RequestUpdate) -> ChoiceDelta:
        """Return the next delta. ``stop_reason`` is a string if a stop string ended the choice."""
        token_ids = update.new_token_ids
        reason = update.finish_reason
        if update.timeline is not None:
            self.timeline = update.timeline
        if self.detokenizer is None:
            return self._delta(update, "", len(token_ids), reason)
        if self.stops is None and reason is None and update.logprobs is None:
            # the common case
            self.token_ids.extend(token_ids)
            return ChoiceDelta(
                index=self.index,
                text=self.detokenizer.push(token_ids),
                token_ids=token_ids,
                error=update.error,
            )
        text = ""
        min_tokens = self.owner.request.sampling.min_tokens
        spoken = len(token_ids)
        if reason is FinishReason.STOP and not self.owner.request.include_stop_str_in_output:
            # the engine uses STOP only for stop tokens; the token stays in the ids, not in the text
            spoken -= 1
        if self.stops is None:
            text = self.detokenizer.push(token_ids[:spoken])
            if reason is not None:
                text += self.detokenizer.finish()
            return self._delta(update, text, len(token_ids), reason)
        num_known = len(self.token_ids)
        for position in range(min(spoken, len(token_ids))):
            found = self.stops.push(
                self._text(self.detokenizer, token_ids[position]),
                may_stop=num_known + position + 1 > min_tokens,
            )
            if isinstance(found, StopFound):
                return self._stopped(update, text, found, position + 1)
            text += found
        if reason is not None:
            may_stop = num_known + len(token_ids) > min_tokens
            rest = self.stops.push(self.detokenizer.finish(), may_stop=may_stop)
            if isinstance(rest, StopFound):
                return self._stopped(update, text, rest, len(token_ids))
            text += rest + self.stops.flush()
        return self._delta(update, text, len(token_ids), reason)

    def _stopped(
        self, update: RequestUpdate, text: str, found: StopFound, count: int
    ) -> ChoiceDelta:
        return self._delta(update, text + found.text, count, FinishReason.STOP, found.stop)

    def _delta(
        self,
        update: RequestUpdate,
        text: str,
        count: int,
        reason: FinishReason | None,
        stop: str | None = None,
    ) -> ChoiceDelta:
        """Return a delta with the first ``count`` of the update's ids, and note their delivery."""
        self.token_ids.extend(update.new_token_ids[:count])
        logprobs = update.logprobs
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=update.new_token_ids[:count],
            logprobs=None if logprobs is None else logprobs[:count],
            finish_reason=None if reason is None else reason.value,
            stop_reason=update.stop_reason if stop is None else stop,
            error=update.error,
            timeline=None if reason is None else self.timeline,
        )


def _special_in(stops: Sequence[str], tokenizer: Tokenizer) -> set[str]:
    """Return the texts of the special tokens in stop strings."""
    # a stop string with half of a surrogate pair is in no text
    texts = [stop for stop in stops if stop == stop.encode("utf-8", "replace").decode()]
    ids = {i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)}
    return {tokenizer.token_bytes(i).decode() for i in ids & tokenizer.special_token_ids}


def resumed_texts(request: GenerationRequest, tokenizer: Tokenizer) -> dict[int, str]:
    """Return the delivered text of each choice that goes on; see ``GenerationRequest.resume``.

    Raises InvalidRequestError if a stop string is in it.
    """
    owner = _Request.of(request)
    return {i: _Choice(owner, i, tokenizer).passed_over for i in open_choices(request)}


class OutputProcessor:
    """The unfinished answers. Used from one thread; holds a request from ``add`` until its last
    choice has ended or it is discarded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._choices: dict[str, _Choice] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests with a choice that has not ended."""
        return len(self._requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids of the unfinished requests."""
        return tuple(self._requests)

    def add(self, request: GenerationRequest) -> None:
        """Expect updates of a request's choices.

        Raises:
            InvalidRequestError: no choices, an id in use, or stop strings that cannot be matched.
        """
        if request.n < 1:
            raise InvalidRequestError(f"n must be at least 1, got {request.n}", "n")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        if "" in request.stop:
            raise InvalidRequestError("stop holds an empty string, which is everywhere", "stop")
        if request.stop and not request.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True: no text is made", "stop")
        owner = _Request.of(request)
        choices = {
            choice_id(request.request_id, index): _Choice(owner, index, self._tokenizer)
            for index in open_choices(request)
        }
        self._requests[request.request_id] = owner
        self._choices |= choices

    def request(self, request_id: str) -> GenerationRequest:
        """Return an unfinished request. KeyError for others."""
        return self._requests[request_id].request

    def resume(self, request_id: str) -> Resume:
        """Return the delivered output of an unfinished request, for another engine to continue.
        KeyError for others."""
        return self._requests[request_id].resume()

    def unfinished_choices(self, request_id: str) -> tuple[str, ...]:
        """Ids of the choices that have not ended; () for an unknown request."""
        owner = self._requests.get(request_id)
        return () if owner is None else tuple(sorted(owner.live))

    def discard(self, request_id: str) -> tuple[str, ...]:
        """Forget a request; return the choices that the engine may still be working on."""
        owner = self._requests.pop(request_id, None)
        if owner is None:
            return ()
        for choice in owner.live:
            del self._choices[choice]
        return tuple(sorted(owner.live))

    def note_prompt_logprobs(
        self, entries: Iterable[tuple[str, tuple[TokenLogprobs, ...]]]
    ) -> None:
        """Store the prompt logprobs that came with first tokens of choices; they are sent once,
        though a preempted request computes its prompt again."""
        for request_id, logprobs in entries:
            choice = self._choices.get(request_id)
            if choice is not None and not choice.owner.told_prompt_logprobs:
                choice.owner.told_prompt_logprobs = True
                choice.owner.prompt_logprobs = logprobs

    def note_pooled(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Store the vectors of choices that end with the updates processed next."""
        for request_id, vector in entries:
            choice = self._choices.get(request_id)
            if choice is not None:
                choice.owner.pooled = vector

    def process(self, updates: Iterable[RequestUpdate], now: float) -> Processed:
        """Turn one batch of updates into outputs.

        Args:
            updates: in the engine's order. Updates of unknown choices (ended here, discarded)
                are dropped.
            now: when the tokens arrived, for ``RequestTimes``.
        """
        touched: dict[_Request, list[ChoiceDelta]] = {}
        stopped: list[str] = []
        failed: list[str] = []
        for update in updates:
            choice = self._choices.get(update.request_id)
            if choice is None:
                continue
            try:
                delta = choice.take(update)
            except Exception as error:
                # a tokenizer that fails on one answer must not end the others
                _log.exception("making text of %s failed", update.request_id)
                delta = _failed(choice, error)
            owner = choice.owner
            owner.account(update, len(delta.token_ids), choice.index, now)
            if delta.finish_reason is not None:
                del self._choices[update.request_id]
                owner.live.remove(update.request_id)
                if update.finish_reason is None:
                    (stopped if delta.error is None else failed).append(update.request_id)
                if not owner.live:
                    del self._requests[owner.request.request_id]
            deltas = touched.get(owner)
            if deltas is None:
                touched[owner] = [delta]
            else:
                _add(deltas, delta)
        outputs = tuple([owner.output(tuple(deltas)) for owner, deltas in touched.items()])
        return Processed(outputs, tuple(stopped), tuple(failed))


def merge_outputs(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Merge consecutive outputs of one request, as if its reader had waited for the last."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    deltas: dict[int, list[ChoiceDelta]] = {}
    for output in outputs:
        for delta in output.choices:
            deltas.setdefault(delta.index, []).append(delta)
    choices = tuple(_merge_deltas(deltas[index]) for index in sorted(deltas))
    logprobs = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    return msgspec.structs.replace(last, choices=choices, prompt_logprobs=logprobs)


def _add(deltas: list[ChoiceDelta], delta: ChoiceDelta) -> None:
    """Append ``delta`` to its choice's delta in the same batch, or else at the end."""
    for place, known in enumerate(deltas):
        if known.index == delta.index:
            deltas[place] = _merge_deltas((known, delta))
            return
    deltas.append(delta)


def _merge_deltas(deltas: Sequence[ChoiceDelta]) -> ChoiceDelta:
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return msgspec.structs.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprobs) if any(d.logprobs is not None for d in deltas) else None,
    )


def _failed(choice: _Choice, error: Exception) -> ChoiceDelta:
    return ChoiceDelta(
        index=choice.index,
        text="",
        token_ids=(),
        finish_reason=FinishReason.ERROR.value,
        error=f"the output could not be turned into text: {type(error).__name__}: {error}",
        timeline=choice.timeline,
    )
