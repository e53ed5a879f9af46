"""Placement of one request's attempts: where the next one goes, and whether there may be one.

One budget pays for every attempt after a request's first, and ``max_attempts`` bounds the attempts
of a request, over all tiers and for whatever reason they are made.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.handing import may_hand, needs_prompt, streams_over
from paceline.gateway.proxy.upstream_request import RESUMABLE, takes_ids
from paceline.gateway.routing.endpoint_queue import Queued
from paceline.gateway.routing.picker import AllCoolingDownError, Pick, Tried
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.http.errors import HttpError
from paceline.routing import Dispatch

__all__ = ["Placement"]

# fields of a chat that rule out resuming behind text: they constrain the form of the rest
_BOUND_TO_TOKENS: Final = (
    "tools", "response_format", "logprobs", "structured_outputs", "guided_json", "guided_regex",
    "continue_final_message",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Placement:
    """Attempts of one request so far, and the choice of the next one's endpoint. Times are
    arguments, in seconds of a monotonic clock."""

    context: RequestContext
    # relay of the streamed answer; None: it is not streamed
    relay: StreamRelay | None
    # requests sent, and continuations of a stream among them
    num: int = 0
    num_resumes: int = 0
    # attempts that left an engine which was well; they count against no bound
    num_moves: int = 0
    # engine that is asked to compute the prompt, for the one that answers; None: that one does
    prompt_pick: Pick | None = None
    # the stream goes on at an engine for outputs once it has its first token
    hands_over: bool = False
    # engine whose computed prompt the stream took along, and when it left; None: none
    handed_by: Endpoint | None = None
    handed_at: float = 0.0
    # the stream goes on behind what another engine has sent
    is_resumed: bool = False
    _tried: set[str | tuple[str, str]] = field(default_factory=set)
    # engines that failed to compute the prompt
    _tried_prompts: set[str] = field(default_factory=set)
    # an attempt was lost
    _has_lost: bool = False
    # longest context, in tokens, that was too short for the prompt
    _needs_more: float | None = None
    # route of the next attempt; not the one in the context once the prompt has proved too long
    # for that
    route: Route = field(init=False)

    def __post_init__(self) -> None:
        self.route = self.context.route

    # ---------------------------------------------------------------- what happened

    def note_sent(self) -> None:
        """Count an attempt."""
        self.num += 1

    def note_moved(self, *, begun: bool) -> None:
        """Note that an attempt left its engine; ``begun``: after a part of the stream."""
        self.num_moves += 1
        self.is_resumed = self.is_resumed or begun

    def note_failure(self, endpoint: Endpoint, *, lost: bool) -> None:
        """Send no further attempt there. A refusal concerns one of the engine's models, a loss
        the engine."""
        self._tried.add(endpoint.upstream.name if lost else endpoint.key)

    def note_handed(self, endpoint: Endpoint, now: float) -> None:
        """Note that the stream leaves the engine that has computed its prompt."""
        self.handed_by, self.handed_at = endpoint, now

    def note_prompt_failure(self, endpoint: Endpoint) -> None:
        """Have that engine compute this prompt no more."""
        self._tried_prompts.add(endpoint.upstream.name)

    def forgive(self, endpoint: Endpoint) -> None:
        """Allow another attempt at an endpoint that refused one."""
        self._tried.discard(endpoint.key)

    def is_free_retry(self, *, lost: bool) -> bool:
        """Whether the retry after this failure draws nothing from the budget. A dying engine loses
        many requests at once through no fault of their own, so the first retry after a loss is
        free, and the budget is for repeated failures."""
        is_free = lost and not self._has_lost
        self._has_lost = self._has_lost or lost
        return is_free

    # ---------------------------------------------------------------- the next endpoint

    def place(self, last: Endpoint | None, now: float) -> tuple[Pick, Dispatch] | None:
        """Pick an engine and count the request there; None: it must ``wait`` for one.

        Args:
            last: endpoint of the attempt before.

        Raises:
            HttpError: no engine can take it, or the wait would be too long.
        """
        context = self.context
        # a retry does not queue again
        if last is None and context.flow_control.must_wait(self.route, context.demand):
            return None
        try:
            return self._dispatched(last, now)
        except AllCoolingDownError as error:
            self._check_patience(error, now)
            return None

    async def wait(self, last: Endpoint | None) -> tuple[Pick, Dispatch]:
        """Wait for a free slot, or for the end of a cooldown; otherwise as ``place``."""
        context = self.context
        while True:
            try:
                if last is None and context.flow_control.must_wait(self.route, context.demand):
                    return await self._queue()
                return self._dispatched(last, context.now())
            except AllCoolingDownError as error:
                self._check_patience(error, context.now())
                seconds = error.seconds
            await asyncio.sleep(seconds)

    def leave(self, placed: tuple[Pick, Dispatch]) -> None:
        """Give up a place that came too late for its caller."""
        placed[1].end(self.context.now())
        self.context.flow_control.pump()

    async def _queue(self) -> tuple[Pick, Dispatch]:
        context = self.context
        # callers may reuse their ids
        own_id = f"{context.incoming.request_id} {id(self)}"
        tokens, body = round(context.demand.output_tokens), context.body
        queued = Queued(
            own_id, context.arrived, tokens, body.priority, context.incoming.tenant, body.slo
        )
        async with context.flow_control.slot(self.route, context.demand, queued):
            return self._dispatched(None, context.now())

    def _check_patience(self, error: AllCoolingDownError, now: float) -> None:
        """Raise ``error`` if the cooldown outlasts what the request may still wait."""
        if error.seconds > self.context.config.max_cooldown_wait - (now - self.context.arrived):
            raise error

    def _dispatched(self, last: Endpoint | None, now: float) -> tuple[Pick, Dispatch]:
        pick = self._pick(now, last)
        pick.endpoint.upstream.note_load(pick.endpoint.model)
        fetched = self.prompt_pick is not None or (self._goes_on and self.handed_by is not None)
        load = pick.endpoint.upstream.load
        return pick, load.dispatch(self.context.demand, pick.view, now, fetched=fetched)

    def _pick(self, now: float, last: Endpoint | None) -> Pick:
        """Pick an engine that was not tried. Raises as ``Picker.pick``."""
        context = self.context
        # of the attempt before, perhaps on another route
        self.prompt_pick, self.hands_over = None, False
        only: Callable[[Endpoint], bool] | None = None
        if self._needs_more is not None:
            only = self._is_long_enough
        if self._goes_on:
            assert last is not None, "an engine has sent what the caller got"

            def exactly(endpoint: Endpoint) -> bool:
                return self.can_resume(endpoint, last) and self.resumes_exactly(endpoint)

            def at_all(endpoint: Endpoint) -> bool:
                return self.can_resume(endpoint, last)

            only = exactly if self._can_pick(now, self._tried, exactly, fallback=True) else at_all
            if last is self.handed_by and self._can_hand(now, last):
                only = self._takes_over(last, now)
        pick = context.picker.pick(
            self.route,
            context.demand,
            now,
            tried=self._tried,
            fallback=self._may_fall_back,
            only=only,
            # once an engine has refused the request, its refusal is the answer
            late=not self.num,
            drained=self._goes_on,
        )
        return self._apart(pick, now) if self.route.apart else pick

    def _apart(self, outputs: Pick, now: float) -> Pick:
        """Return the engine to ask first, where ``outputs`` would answer: that one, or one that
        computes the prompt. Raises HttpError if the answer's engine cannot do without."""
        context, there = self.context, outputs.endpoint
        must = needs_prompt(there)
        if not must and (self._goes_on or there.upstream.role == "prompts"):
            return outputs
        tried = {*self._tried, *self._tried_prompts}
        try:
            pick = context.picker.pick(
                self.route, context.demand, now, tried=tried, fallback=self._may_fall_back,
                only=lambda each: may_hand(context, each, there), prompts=True,
            )  # fmt: skip
        except HttpError:
            if must:
                raise
            return outputs
        least = context.config.split_above
        pays = context.picker.hand_overs.pays(context.demand, pick.view, outputs.view, least)
        # a full engine is picked where all are
        if not must and (not pays or pick.endpoint.available(now, context.path)):
            return outputs
        if streams_over(context, pick.endpoint):
            self.hands_over = True
            return pick
        self.prompt_pick = pick
        return outputs

    def may_hand_over(self, now: float, endpoint: Endpoint) -> bool:
        """Whether the stream, whose prompt is computed at ``endpoint``, goes on at an engine for
        outputs: one has room, and can fetch the prompt."""
        return self.hands_over and self._goes_on and self._can_hand(now, endpoint)

    def _can_hand(self, now: float, endpoint: Endpoint) -> bool:
        only = self._takes_over(endpoint, now)
        return self._can_pick(now, {*self._tried, endpoint.upstream.name}, only, fallback=True)

    def _takes_over(self, before: Endpoint, now: float) -> Callable[[Endpoint], bool]:
        path = self.context.path

        def takes(endpoint: Endpoint) -> bool:
            upstream = endpoint.upstream
            return (
                upstream.role != "prompts"
                and not upstream.load.pressed
                and before.upstream.hands_to(upstream)
                and not endpoint.available(now, path)
                and self.can_resume(endpoint, before)
                and self.resumes_exactly(endpoint)
            )

        return takes

    def pick_second(self, first: Endpoint, now: float) -> Pick:
        """Pick an engine of ``first``'s tier and model for a hedge. Raises as ``Picker.pick``."""
        tier = self.tier_of(first)
        return self.context.picker.pick(
            self.route,
            self.context.demand,
            now,
            tried={*self._tried, first.upstream.name},
            # nobody would send the second one a prompt
            only=lambda endpoint: (
                endpoint in tier and endpoint.model == first.model and not needs_prompt(endpoint)
            ),
        )

    def tier_of(self, endpoint: Endpoint) -> Sequence[Endpoint]:
        """Return the endpoints of an endpoint's tier."""
        return next(endpoints for endpoints in self.route.tiers if endpoint in endpoints)

    # ---------------------------------------------------------------- whether there may be one

    @property
    def _num_counted(self) -> int:
        return self.num - self.num_moves

    @property
    def _goes_on(self) -> bool:
        return self.relay is not None and self.relay.emitted

    @property
    def _may_fall_back(self) -> bool:
        return self.route.fallback and self.context.allowed.fallback

    def _can_pick(
        self,
        now: float,
        tried: Tried,
        only: Callable[[Endpoint], bool],
        *,
        fallback: bool,
        drained: bool = False,
    ) -> bool:
        context = self.context
        return context.picker.can_pick(
            self.route, context.demand, now, tried, only, fallback=fallback, drained=drained
        )

    def _pays(self, now: float, *, peek: bool) -> bool:
        """Whether the budget has an attempt left; takes it unless ``peek``."""
        budget = self.context.retry_budget
        return budget.left(now) >= 1.0 if peek else budget.take(now)

    def may_leave(self, now: float, endpoint: Endpoint) -> bool:
        """Whether another engine could take a request that ``endpoint``'s engine has not begun to
        answer."""
        elsewhere: Tried = {*self._tried, endpoint.upstream.name}
        return self.may_retry(now, free=not self._has_lost, peek=True, tried=elsewhere)

    def may_retry(
        self, now: float, *, free: bool = False, peek: bool = False, tried: Tried | None = None
    ) -> bool:
        """Whether one more attempt is allowed. ``free``: it does not draw from the budget;
        ``peek``: it is not taken yet; ``tried``: endpoints to count as tried."""
        tried = self._tried if tried is None else tried
        return (
            self.context.allowed.retry
            and self._num_counted < self.context.config.max_attempts
            and self._can_pick(now, tried, self._is_long_enough, fallback=self._may_fall_back)
            and (free or self._pays(now, peek=peek))
        )

    def may_hedge(self, now: float, *, peek: bool = False) -> bool:
        """Whether a second engine may be asked while the first has not answered. Pays for it unless
        ``peek``."""
        return (
            self.context.allowed.hedge
            and self._num_counted < self.context.config.max_attempts
            and not self._goes_on
            and self._pays(now, peek=peek)
        )

    def may_resume(self, now: float, last: Endpoint, *, free: bool) -> bool:
        """Whether a stream that broke at ``last`` may resume elsewhere; if so, count and pay it."""
        relay, config = self.relay, self.context.config
        if (
            relay is None
            or not self.context.allowed.resume
            or self.num_resumes >= config.max_resumes
            or self._num_counted >= config.max_attempts
            or (relay.resume_ids() is None and relay.partial_text() is None)
            or not self._can_pick(
                now,
                self._tried,
                lambda each: self.can_resume(each, last),
                fallback=True,
                drained=True,
            )
            or not (free or self.context.retry_budget.take(now, overdraw=True))
        ):
            return False
        self.num_resumes += 1
        self.is_resumed = True
        return True

    def may_move(self, now: float, endpoint: Endpoint) -> bool:
        """Whether a request may leave ``endpoint``, whose engine is well, for another one. A stream
        that has begun leaves for an engine that resumes it exactly."""
        elsewhere: Tried = {*self._tried, endpoint.upstream.name}
        if not self._goes_on:
            return self.context.allowed.retry and self._can_pick(
                now, elsewhere, self._is_long_enough, fallback=self._may_fall_back
            )

        def goes_on_at(other: Endpoint) -> bool:
            return self.can_resume(other, endpoint) and self.resumes_exactly(other)

        return self.context.allowed.resume and self._can_pick(
            now, elsewhere, goes_on_at, fallback=True
        )

    def may_go_to_a_longer(self, now: float, endpoint: Endpoint) -> bool:
        """Whether an endpoint has a longer context than ``endpoint``'s, which was too short.
        Endpoints of unknown or shorter context do not count."""
        most = math.inf if endpoint.max_model_len is None else endpoint.max_model_len
        self._needs_more = max(self._needs_more or 0.0, most)
        if self.may_retry(now, peek=True):
            return True
        longer = self.route.longer
        if longer is None or not self.context.allowed.fallback:
            return False
        # the configuration names this route for long prompts, so its context need not be known
        self.route, self._needs_more = longer, None
        self._tried.clear()
        return self.may_retry(now, peek=True)

    def _is_long_enough(self, endpoint: Endpoint) -> bool:
        return self._needs_more is None or (endpoint.max_model_len or 0) > self._needs_more

    def can_resume(self, endpoint: Endpoint, before: Endpoint) -> bool:
        """Whether a stream that broke at ``before`` can be resumed at ``endpoint``: the same model,
        at an engine that resumes behind token ids, or behind text if that is allowed."""
        context, body, relay = self.context, self.context.body, self.relay
        if (
            context.path not in RESUMABLE
            or relay is None
            or body.num_prompts != 1
            or body.resumed
            or body.fields.get("echo") == b"true"
            or endpoint.model != before.model
            or endpoint.tier != before.tier
        ):
            return False
        if self.resumes_exactly(endpoint):
            return True
        return (
            endpoint.upstream.facts.continues
            and body.fields.get("messages", b"").startswith(b"[")
            and relay.partial_text() is not None
            and not any(
                body.fields.get(name, b"null") not in (b"null", b"false")
                for name in _BOUND_TO_TOKENS
            )
        )

    def resumes_exactly(self, endpoint: Endpoint) -> bool:
        """Whether it would be resumed there token for token."""
        relay = self.relay
        return takes_ids(endpoint) and relay is not None and relay.resume_ids() is not None
