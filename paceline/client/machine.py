"""One call as a state machine: inputs go in, actions come out.

It has no sockets, threads, clocks or randomness: drivers bring bytes and the time, and carry out
the actions. ``stream.py`` and ``async_stream.py`` are such drivers, and so are the tests.

    WAITING ──time──> CONNECTING ──Connected──> ASKED ──Head 200──> STREAMING ──[DONE]──> OVER
       ^                  |                       |  \\                  |
       |                  |                       |   Head 4xx, 5xx      |
       |                  v                       v         v            v
       '--------------- failed <------------------'------ REFUSED -------'   (or OVER, with Fail)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from paceline.client.answer import Answer, usage_of
from paceline.client.chunks import ChunkError, Reported, read_event
from paceline.client.errors import (
    ClientError,
    NoAnswerError,
    NotParsedError,
    RefusedError,
    StreamInterruptedError,
)
from paceline.client.events import Event, FellBack, Restarted, Resumed, Retrying, Started
from paceline.client.policy import Policy, RetryBudget, Target
from paceline.client.refusals import message_of, retry_after
from paceline.client.steps import (
    Action,
    Broken,
    Close,
    Connected,
    Data,
    Emit,
    Fail,
    Head,
    Input,
    Open,
    Request,
    Start,
    Tick,
)
from paceline.statuses import retry_of
from paceline.wire.sse import SseEvents

__all__ = ["Machine"]

_MAX_ERROR_BYTES: Final = 64 * 1024
# seconds for the rest of a refusal
_ERROR_SECONDS: Final = 2.0
# fields that the client adds itself, and leaves out if a server refuses one of them by name
_OWN_FIELDS: Final = ("return_token_ids", "seed", "stream_options", "resume_output_ids")


class _State(enum.Enum):
    WAITING = enum.auto()
    CONNECTING = enum.auto()
    ASKED = enum.auto()
    REFUSED = enum.auto()
    STREAMING = enum.auto()
    OVER = enum.auto()


class Machine:
    """One call over at most ``policy.attempts`` attempts.

    Args:
        targets: in order of preference.
        budget: shared by all calls of a client.
        draw: a number from 0 up to 1, for jitter.
        left_out: for each target the fields that its server is known to refuse; the machine adds
            to them, and a client keeps them over calls.
    """

    def __init__(
        self,
        request: Request,
        targets: Sequence[Target],
        policy: Policy,
        budget: RetryBudget,
        draw: Callable[[], float],
        left_out: Sequence[set[str]],
    ) -> None:
        self._request = request
        self._targets = targets
        self._policy = policy
        self._budget = budget
        self._draw = draw
        self._left_out = left_out
        self._state = _State.WAITING
        self._out: list[Action] = []
        self._answer = Answer()
        self._started = False
        # deadlines of the call, and of the present state
        self._end = self._until = math.inf
        self._target = self._attempt = 0
        # earliest time of the next attempt at each target
        self._ready = [-math.inf] * len(targets)
        # targets that did not continue after the tokens sent
        self._cannot_resume: set[int] = set()
        # refused fields left out at this target on trial; kept for it once it answers
        self._trial: set[str] = set()
        # start and events of the present attempt
        self._opened = 0.0
        self._events = SseEvents(policy.max_event_bytes)
        # output tokens before it; None once the server has proved to continue, and for a new answer
        self._seam: int | None = None
        self._refusal: Head | None = None
        self._refusal_body = bytearray()

    @property
    def over(self) -> bool:
        return self._state is _State.OVER

    @property
    def deadline(self) -> float:
        """Time at which a Tick is due, on the clock of ``handle``."""
        return min(self._until, self._end)

    def handle(self, event: Input, now: float) -> list[Action]:
        """Return the actions, in order. ``now`` never goes back; the list belongs to the caller."""
        self._out = []
        if self.over:
            return self._out
        if isinstance(event, Start):
            self._budget.deposit()
            self._end = now + self._policy.total_timeout
            self._open(now)
        elif now >= self._end:
            reason = "the call took too long"
            self._give_up(reason, NoAnswerError(reason, self._attempt))
        elif isinstance(event, Tick):
            self._tick(now)
        elif self._state is _State.WAITING:
            # an input of a dropped connection
            pass
        elif isinstance(event, Broken):
            self._failed(event.reason, now)
        elif isinstance(event, Connected):
            self._state = _State.ASKED
            self._until = self._opened + self._policy.first_token_timeout
        elif isinstance(event, Head):
            self._head(event, now)
        elif isinstance(event, Data):
            self._data(event.data, now)
        else:
            self._closed(now)
        return self._out

    def cancel(self) -> list[Action]:
        """End the call, as the caller wants no more."""
        self._out = []
        self._drop()
        self._state = _State.OVER
        return self._out

    # ---------------------------------------------------------------- attempts

    def _open(self, now: float) -> None:
        self._attempt += 1
        self._send(now)

    def _send(self, now: float) -> None:
        self._state = _State.CONNECTING
        self._opened = now
        self._until = now + self._policy.connect_timeout
        self._events = SseEvents(self._policy.max_event_bytes)
        self._refusal = None
        self._seam = None
        answer = self._answer
        if self._can_resume(self._target):
            self._seam = len(answer.ids)
        elif self._attempt > 1:
            # begin again; output so far, if any, is void with the caller's permission
            self._answer = Answer()
            if answer.told:
                self._out.append(Emit(Restarted(self._target)))
        self._out.append(Open(self._target, self._request.path, self._body()))

    def _body(self) -> dict[str, Any]:
        given = self._request.body
        options = dict(given.get("stream_options") or {})
        options.setdefault("include_usage", True)
        own: dict[str, Any] = {
            "return_token_ids": True,
            "seed": self._request.seed,
            "stream_options": options,
        }
        if self._seam is not None:
            own["resume_output_ids"] = list(self._answer.ids)
            # the count of tokens with each chunk proves that the server continues after these
            own["stream_options"] = options | {"continuous_usage_stats": True}
        left_out = self._left_out[self._target] | self._trial
        own = {name: value for name, value in own.items() if name not in left_out}
        if given.get("seed") is not None:
            own.pop("seed", None)
        return {**given, **own, "model": self._targets[self._target].model, "stream": True}

    def _can_resume(self, target: int) -> bool:
        # ids mean the same only to the same model
        same = self._targets[target].model == self._targets[self._target].model
        able = (
            target not in self._cannot_resume and "return_token_ids" not in self._left_out[target]
        )
        return self._answer.resumable and same and able

    def _failed(
        self,
        reason: str,
        now: float,
        *,
        status: int = 0,
        after: float | None = None,
        refusal: RefusedError | None = None,
    ) -> None:
        """End a lost attempt: with another attempt, or with the call.

        Args:
            refusal: an answer that this target would repeat; another target may not.
        """
        if self._answer.resumable and len(self._answer.ids) >= self._max_tokens:
            self._answer.reason = self._answer.reason or "length"
        if self._answer.reason is not None:
            # at most counts were missing
            self._finish()
            return
        self._drop()
        policy = self._policy
        backoff = min(policy.backoff_max, policy.backoff_base * 2.0 ** (self._attempt - 1))
        wait = max(after or 0.0, self._draw() * backoff)
        too_long = after is not None and after > policy.max_retry_after
        self._ready[self._target] = math.inf if too_long or refusal else now + wait
        following = self._next(now) if self._attempt < policy.attempts else None
        paid = following is not None and self._budget.take(now)
        if following is None or not paid:
            if following is not None:
                reason += "; the budget of retries is spent"
            error = refusal or NoAnswerError(reason, self._attempt, status, after)
            self._give_up(reason, error)
            return
        wait = max(0.0, self._ready[following] - now)
        self._out.append(Emit(Retrying(self._attempt + 1, reason, wait)))
        if following != self._target:
            self._trial = set()
            self._out.append(Emit(FellBack(following)))
            if not self._can_resume(following):
                # the next attempt must not continue from these ids
                self._answer.ids_whole = False
        self._target = following
        if wait > 0:
            self._state = _State.WAITING
            self._until = now + wait
        else:
            self._open(now)

    def _next(self, now: float) -> int | None:
        """Return the target of the next attempt: the first after this one that is ready in time."""
        count = len(self._targets)
        for step in range(1, count + 1):
            target = (self._target + step) % count
            in_time = self._ready[target] < self._end
            if in_time and (self._may_begin_again or self._can_resume(target)):
                return target
        return None

    @property
    def _max_tokens(self) -> float:
        given = self._request.body
        limit = given.get("max_completion_tokens") or given.get("max_tokens")
        return limit if isinstance(limit, int) else math.inf

    @property
    def _may_begin_again(self) -> bool:
        return self._policy.restart_allowed or not self._answer.told

    def _give_up(self, reason: str, error: ClientError) -> None:
        if self._answer.reason is not None:
            # the failure came after the complete answer
            self._finish()
            return
        self._drop()
        if self._answer.told:
            error = StreamInterruptedError(reason, self._attempt, self._answer.text)
        self._state = _State.OVER
        self._out.append(Fail(error))

    def _drop(self) -> None:
        if self._state not in (_State.WAITING, _State.OVER):
            self._out.append(Close())
            # further inputs from it belong to no attempt
            self._state = _State.WAITING

    # ---------------------------------------------------------------- what happens

    def _tick(self, now: float) -> None:
        if now < self._until:
            return
        if self._state is _State.WAITING:
            self._open(now)
        elif self._state is _State.CONNECTING:
            self._failed("no connection in time", now)
        elif self._state is _State.REFUSED:
            self._refused(now)
        elif self._state is _State.ASKED or self._until == self._first_token_end:
            self._failed("no first token in time", now)
        else:
            self._failed("no further token in time", now)

    @property
    def _first_token_end(self) -> float:
        return self._opened + self._policy.first_token_timeout

    def _head(self, head: Head, now: float) -> None:
        if head.status != 200:
            self._state = _State.REFUSED
            self._refusal = head
            self._refusal_body.clear()
            self._until = now + _ERROR_SECONDS
        elif "text/event-stream" not in head.headers.get("content-type", "").lower():
            self._failed("the answer is no event stream", now)
        elif "resume_output_ids" in head.headers.get("x-paceline-ignored-fields", ""):
            self._not_resumed(now)
        else:
            self._left_out[self._target].update(self._trial)
            self._state = _State.STREAMING

    def _data(self, data: bytes, now: float) -> None:
        if self._state is _State.REFUSED:
            self._refusal_body += data
            if len(self._refusal_body) > _MAX_ERROR_BYTES:
                self._refused(now)
            return
        for event in self._events.feed(data):
            if self._state is not _State.STREAMING:
                return
            self._event(event, now)
        if self._events.too_long and self._state is _State.STREAMING:
            self._failed(f"an event has more than {self._policy.max_event_bytes} bytes", now)

    def _closed(self, now: float) -> None:
        if self._state is _State.REFUSED:
            self._refused(now)
        else:
            self._failed("the stream ended early", now)

    def _event(self, event: bytes, now: float) -> None:
        try:
            found = read_event(event)
            if isinstance(found, Reported):
                self._reported(found, now)
            elif found is not None and (self._seam is None or self._prove(found, now)):
                self._chunk(found, now)
        except ChunkError as error:
            self._failed(str(error), now)

    def _chunk(self, chunk: dict[str, Any], now: float) -> None:
        if not self._started:
            self._started = True
            names = (chunk.get(name) for name in ("id", "model"))
            told = [name if isinstance(name, str) else "" for name in names]
            self._out.append(Emit(Started(self._target, *told)))
        events: list[Event] = []
        num_ids = len(self._answer.ids)
        try:
            self._answer.read(chunk, events)
        finally:
            self._out.extend(Emit(event) for event in events)
        if events or len(self._answer.ids) > num_ids or self._answer.reason is not None:
            self._until = now + self._policy.gap_timeout

    def _prove(self, chunk: dict[str, Any], now: float) -> bool:
        """Return whether the chunk may be used: the server went on after the seam, or sent nothing.

        A server that does not know ``resume_output_ids`` begins again, and its text would come
        twice. One that knows it counts the tokens before the seam too, and has the same prompt.
        """
        assert self._seam is not None
        listed = chunk.get("choices")
        choices = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
        for holder in (chunk, *choices):
            prompt_ids = holder.get("prompt_token_ids")
            if prompt_ids and self._answer.prompt_ids not in (None, prompt_ids):
                self._not_resumed(now)
                return False
        if not any(map(_says_something, choices)):
            return True
        ids = [c.get("token_ids") for c in choices]
        new = sum(len(some) for some in ids if isinstance(some, list))
        counted = usage_of(chunk.get("usage"))
        if counted is None or counted.completion_tokens < self._seam + new:
            self._not_resumed(now)
            return False
        self._out.append(Emit(Resumed(self._target, self._seam)))
        self._seam = None
        return True

    def _not_resumed(self, now: float) -> None:
        self._cannot_resume.add(self._target)
        self._failed("the server does not go on behind tokens it is given", now)

    # ---------------------------------------------------------------- refusals and ends

    def _refused(self, now: float) -> None:
        head = self._refusal
        assert head is not None
        text = bytes(self._refusal_body).decode(errors="replace")
        status = head.status
        own = {name for name in self._sent_own() if name in text}
        if status in (400, 422) and own:
            if "resume_output_ids" in own:
                self._cannot_resume.add(self._target)
                self._failed("the server refuses to resume", now, status=status)
            else:
                # nothing was computed, so sending again without these fields is not another attempt
                self._trial |= own
                self._drop()
                self._send(now)
            return
        retry = retry_of(status, head.headers.get("x-should-retry", "").lower())
        reason, refusal = f"status {status}", RefusedError(status, message_of(text))
        if retry == "anywhere":
            self._failed(reason, now, status=status, after=retry_after(head))
        elif retry == "elsewhere":
            self._failed(reason, now, refusal=refusal)
        else:
            self._give_up(reason, refusal)

    def _sent_own(self) -> set[str]:
        given = self._request.body
        sent = {name for name in _OWN_FIELDS if given.get(name) is None}
        if self._seam is None:
            sent.discard("resume_output_ids")
        return sent - self._left_out[self._target] - self._trial

    def _reported(self, error: Reported, now: float) -> None:
        code, words = error.code, error.words
        retry = retry_of(code) if code is not None and code >= 400 else "anywhere"
        if retry == "nowhere":
            self._give_up(words, RefusedError(200, words))
        else:
            refusal = RefusedError(200, words) if retry == "elsewhere" else None
            self._failed(f"the server reports: {words}", now, refusal=refusal)

    def _finish(self) -> None:
        self._drop()
        self._state = _State.OVER
        finished = self._answer.finished(self._target)
        if self._request.parse is not None and not finished.tool_calls:
            try:
                finished = replace(finished, parsed=self._request.parse(finished.text))
            except ValueError as error:
                why = str(error) if finished.reason == "stop" else f"it ended by {finished.reason}"
                self._out.append(Fail(NotParsedError(why, finished.text)))
                return
        self._out.append(Emit(finished))


def _says_something(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    content = delta if isinstance(delta, dict) else {}
    return bool(
        choice.get("token_ids")
        or choice.get("finish_reason")
        or choice.get("text")
        or any(value for name, value in content.items() if name != "role")
    )
