"""One request from arrival to end: sent to an engine, retried elsewhere, answered.

::

    RequestContext   (frozen)             what is given of the request
    ProxiedRequest   (task per request)   Placement -> Attempt -> done | retry -> Response
    Attempt          (callbacks)          engine's bytes -> StreamRelay -> caller's connection

What an engine sends reaches the caller in the callback that read it. The task only wakes for the
head, for a slow caller, and for the end.

Until the caller has seen a part of the answer, a request whose engine refuses or fails is retried
on another engine. After that it is resumed behind what was seen, if the engine's kind can do that
exactly; if not, the stream ends in an error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.errors import RequestError
from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.handing import ONE_TOKEN, PromptLeg, bootstrap_of
from paceline.gateway.proxy.hedging import Hedge
from paceline.gateway.proxy.placement import Placement
from paceline.gateway.proxy.response import Response
from paceline.gateway.proxy.upstream_request import CHAT, NO_FIELDS, UpstreamRequest
from paceline.gateway.proxy.usage_split import UsageSplit
from paceline.gateway.routing.picker import Pick
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.engine_types import VECTOR_PATHS
from paceline.gateway.settings.prices import Used
from paceline.gateway.streams.openai_stream import OpenAIStreamRelay, StreamRelay
from paceline.gateway.streams.passthrough_stream import PASSTHROUGH
from paceline.gateway.upstreams.refusals import is_too_long
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.routing import Dispatch

__all__ = ["RELAYED", "ProxiedRequest"]

_log = logging.getLogger("paceline.gateway")

# paths whose requests are relayed
RELAYED: Final = VECTOR_PATHS | {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
}  # fmt: skip
# size of a body, in bytes, that is read without the connection ever being paused
_READ_AT_ONCE: Final = 60_000


class ProxiedRequest:
    """One request of one caller: the owner of its state and of its attempts."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.relay: StreamRelay | None = self._new_relay() if context.body.stream else None
        self._upstream_request = UpstreamRequest(context, self.relay)
        self._placement = Placement(context, self.relay)
        self._response = Response(context, self.relay, self._placement)
        self._usage_split = UsageSplit(context, self.relay)
        # None: the request may not be hedged
        self._hedge: Hedge | None = None
        if self.relay is not None and context.may_hedge:
            self._hedge = Hedge(context, self._placement, self._upstream_request)
        # request to the engine that computes the running attempt's prompt; None: there is none
        self._leg: PromptLeg | None = None
        # called by the attempts for every part
        self.write: Callable[[bytes], None] = self._response.write
        self.write_last: Callable[[bytes], None] = self._response.write_last
        if context.watch is not None:
            self.write, self.write_last = self._write_watched, self._write_last_watched
        if context.model != context.route.shown:
            # the key's budget does not cover the model that was asked for
            self._response.note(fallback=context.route.model)
        if context.note:
            self._response.note(**context.note)

    def _new_relay(self) -> StreamRelay:
        context, body = self.context, self.context.body
        passthrough = PASSTHROUGH.get(context.path)
        if passthrough is not None:
            return passthrough()
        return OpenAIStreamRelay(
            num_choices=body.num_choices,
            model=context.model,
            hide_ids=not body.return_token_ids,
            hide_usage=not body.include_usage,
            keep_text=context.config.resume_by_text and context.path == CHAT,
        )

    @property
    def _attempt(self) -> Attempt:
        """The attempt that answers, once an engine is asked."""
        attempt = self._response.attempt
        assert attempt is not None, "an engine is asked"
        return attempt

    @property
    def is_over(self) -> bool:
        """Whether the answering engine, if there is one, has sent all of the answer."""
        attempt = self._response.attempt
        return attempt is None or attempt.verdict is not None

    @property
    def used(self) -> Used:
        """Usage of an answer that has ended, as far as it was counted."""
        return self._usage_split.used(self._response.attempt)

    @property
    def counted(self) -> Used | None:
        """Usage as the engine counted it, after ``used``; None: it did not, or it truncates
        prompts."""
        attempt = self._response.attempt
        counted = self._usage_split.counted
        if attempt is None or attempt.endpoint.upstream.facts.truncates:
            return None
        return counted if counted is not None and counted.prompt else None

    def usage_by_endpoint(self) -> Sequence[tuple[Endpoint, Used]]:
        """Usage by engine of an answer that has ended; see ``UsageSplit.usage_by_endpoint``."""
        return self._usage_split.usage_by_endpoint(self._response.attempt)

    def close(self) -> None:
        """Drop references after the last use: garbage collection of these reference cycles would
        cost more than a tenth of a request's time."""
        self._response.close()

    # ---------------------------------------------------------------- AttemptOwner

    def again(
        self, attempt: Attempt, left_out: frozenset[str]
    ) -> tuple[bytes, frozenset[str]] | None:
        """Return the request without fields that the engine refused; see ``AttemptOwner``."""
        resumed = self._placement.is_resumed
        names = self._upstream_request.refused(
            attempt.endpoint, attempt.status, bytes(attempt.body), resumed=resumed
        )
        if names <= left_out:
            return None
        left_out |= names
        return self._upstream_request.encode(
            attempt.endpoint, resumed=resumed, left_out=left_out
        ), left_out

    def first_token(self, now: float) -> None:
        if self._hedge is not None:
            self._hedge.first_spoke()
        context, placement = self.context, self._placement
        if not placement.is_resumed:
            context.metrics.first_token(self._attempt.endpoint, now - context.arrived)
        elif placement.handed_by is not None and placement.num_moves == 1:
            tokens = context.demand.prompt_tokens
            context.picker.hand_overs.saw(tokens, now - placement.handed_at)
        if placement.hands_over:
            # not in the middle of its data
            context.wake.set()

    def spare_spoke(self, attempt: Attempt) -> None:
        hedge = self._hedge
        assert hedge is not None and attempt is hedge.spare, "the other one was dropped"
        # before the hedge is adopted, or its output would count as the first engine's
        self._attempt.abandon()
        self._go_on_with(hedge.take(won=True))

    def _go_on_with(self, spare: Attempt) -> None:
        """Let the hedge answer from now on."""
        self._response.comes_from(spare)
        self._response.note(engine=spare.endpoint.upstream.name, attempts=self._placement.num)
        spare.adopt()

    def may_leave(self, attempt: Attempt) -> bool:
        begun = self.relay is not None and self.relay.emitted
        spare = self._hedge is not None and attempt is self._hedge.spare
        return begun or spare or self._placement.may_leave(self.context.now(), attempt.endpoint)

    def may_move(self, attempt: Attempt) -> bool:
        # a hedge is only dropped, and no third engine is asked
        return attempt is self._response.attempt and self._placement.may_move(
            self.context.now(), attempt.endpoint
        )

    def tick(self, now: float) -> None:
        self._response.tick(now, self.context.config.sse_keep_alive)
        if self._hedge is not None and self._hedge.is_due(now):
            self.context.wake.set()

    def _write_watched(self, data: bytes) -> None:
        """Write the first part of a stream that is watched."""
        self._watch_stream(data)
        self.write(data)

    def _write_last_watched(self, data: bytes) -> None:
        """Write the only part of a stream that is watched."""
        self._watch_stream(data)
        self.write_last(data)

    def _watch_stream(self, data: bytes) -> None:
        self.write, self.write_last = self._response.write, self._response.write_last
        if self.context.watch is not None:
            self.context.watch(self._attempt.endpoint.upstream, data, False)

    # ---------------------------------------------------------------- the task

    async def run(self) -> None:
        """Run the request to the last byte of its answer.

        Raises:
            HttpError: there is no answer, and nothing was sent yet.
            ClientDisconnectedError: the caller hung up.
        """
        context, response = self.context, self._response
        # checking the connection now and then is cheaper than a task per request; but while a long
        # body is read, the connection may be paused
        looks = response.sees_hang_ups and context.body.num_bytes < _READ_AT_ONCE
        watch = None if looks else asyncio.ensure_future(self._disconnected())
        try:
            if context.tries_again:
                # the client's retry costs an attempt like the gateway's own, and deposits nothing
                context.retry_budget.take(context.arrived)
            else:
                context.retry_budget.deposit(context.arrived)
            await self._try_all()
        except ClientDisconnectedError:
            response.record_end("gone")
            raise
        except RequestError:
            # no engine was asked: the request cannot be expressed in that engine's API
            response.record_end("refused")
            raise
        except HttpError as error:
            if response.started:
                # the status was already sent
                await response.break_off(str(error))
                return
            if not self._placement.num:
                response.record_end("failed")
            raise
        finally:
            if watch is not None:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _try_all(self) -> None:
        context, placement, response = self.context, self._placement, self._response
        last = None
        while True:
            since = context.now()
            placed = placement.place(last, since)
            if placed is None:
                placed = await response.unless_gone(placement.wait(last), placement.leave)
                context.trace.waited(since, context.now())
            attempt = await self._try_one(*placed)
            verdict, last = attempt.verdict, attempt.endpoint
            assert verdict is not None, "the attempt is over"
            if verdict.kind == "done":
                if context.watch is not None and not attempt.streams:
                    context.watch(last.upstream, bytes(attempt.body), True)
                await response.finish(attempt)
                return
            if verdict.kind == "moved":
                begun = self.relay is not None and self.relay.emitted
                placement.note_moved(begun=begun)
                lost_prompt = self._leg is not None and self._leg.failure is not None
                if placement.handed_by is not last and not lost_prompt:
                    # its pool's controller asked
                    context.metrics.moved(last)
                if begun:
                    self._usage_split.resumes_after(last)
                continue
            self._note_failure(attempt)
            if verdict.kind == "refused" and not self._may_pass_on(attempt):
                await response.refuse(attempt)
                return
            free = placement.is_free_retry(lost=verdict.kind == "lost")
            if self.relay is not None and self.relay.emitted:
                if not placement.may_resume(context.now(), last, free=free):
                    await response.break_off(verdict.why)
                    return
                self._usage_split.resumes_after(last)
            elif not placement.may_retry(context.now(), free=free):
                await response.give_up()
                return

    async def _try_one(self, pick: Pick, dispatch: Dispatch) -> Attempt:
        context, placement, endpoint = self.context, self._placement, pick.endpoint
        resumed = placement.is_resumed
        try:
            added = await self._with_prompt(endpoint, resumed=resumed)
            request = self._upstream_request.encode(endpoint, resumed=resumed, added=added)
            attempt = Attempt(self, endpoint, dispatch)
        except BaseException:
            self._end_leg()
            if self._leg is not None:
                # what its engine computed for a caller that hung up is charged
                self._response.comes_from(self._leg.attempt)
            dispatch.end(context.now())
            raise
        self._response.comes_from(attempt)
        try:
            placement.note_sent()
            self._response.note_attempt(endpoint)
            context.metrics.attempt(endpoint, resumed=resumed, fallback=bool(endpoint.tier))
            by_text = resumed and not placement.resumes_exactly(endpoint)
            if self.relay is not None:
                self.relay.begin_attempt(by_text=by_text)
                if self._hedge is not None and placement.num == 1:
                    self._hedge.arm(pick, context.now())
            if by_text:
                self._response.note(exact=False)
            attempt.send(request)
            await self._pump()
        finally:
            attempt.abandon()
            if self._hedge is not None:
                self._attempt.abandon()
                self._hedge.end()
            self._end_leg()
            context.flow_control.pump()
        return self._attempt

    async def _with_prompt(self, endpoint: Endpoint, *, resumed: bool) -> Mapping[str, Any]:
        """Have the prompt computed elsewhere, if that was decided; return the fields by which
        ``endpoint`` finds it."""
        context, self._leg = self.context, None
        pick = self._placement.prompt_pick
        if pick is None:
            return NO_FIELDS
        leg = self._leg = PromptLeg(context, pick, self._response_tick)
        context.metrics.attempt(pick.endpoint, resumed=False, fallback=bool(pick.endpoint.tier))
        if pick.endpoint.upstream.kind == "sglang":
            added = bootstrap_of(pick.endpoint)
            leg.attempt.send(
                self._upstream_request.encode_prompt(leg.endpoint, added, resumed=resumed)
            )
            self._response.note(prompt_engine=pick.endpoint.upstream.name)
            return added
        fields = {**ONE_TOKEN, **leg.fields}
        leg.attempt.send(self._upstream_request.encode_prompt(leg.endpoint, fields, resumed=False))

        async def over() -> None:
            await leg.attempt.over

        await self._response.unless_gone(over(), lambda _: None)
        added = dict(leg.found())
        self._note_prompt(leg, "handed" if added else "failed")
        if added:
            used = leg.used()
            self._usage_split.prompt_from(pick.view.cached_tokens if used is None else used.cached)
        self._leg = None
        return added

    def _response_tick(self, now: float) -> None:
        self._response.tick(now, self.context.config.sse_keep_alive)

    def _note_prompt(self, leg: PromptLeg, result: str) -> None:
        """Record what became of a prompt that was to be computed elsewhere."""
        self.context.metrics.handed(leg.endpoint, result)
        if result == "handed":
            self._response.note(prompt_engine=leg.endpoint.upstream.name)
            return
        why = leg.failure or "its answer does not say where the prompt is"
        _log.warning(
            "prompt_failed id=%s engine=%s reason=%r", self.context.incoming.request_id,
            leg.endpoint.upstream.name, why,
        )  # fmt: skip
        self._placement.note_prompt_failure(leg.endpoint)

    def _end_leg(self) -> None:
        if self._leg is not None:
            self._leg.attempt.abandon()

    def _look_after_prompt(self, leg: PromptLeg) -> None:
        """Leave an engine that waits for a prompt which does not come; note one that came."""
        attempt = self._attempt
        begun = self.relay is not None and self.relay.num_output_tokens > 0
        if leg.failure is None and not (begun or attempt.verdict is not None):
            return
        leg.is_noted = True
        if leg.failure is None or begun or attempt.is_answer:
            self._note_prompt(leg, "handed")
            return
        if not leg.attempt.is_final:
            self._note_prompt(leg, "failed")
            attempt.leave(f"its prompt was lost: {leg.failure}")
            return
        self.context.metrics.handed(leg.endpoint, "failed")
        if attempt.verdict is None:
            # the request itself is refused; the other engine might wait for its prompt for minutes
            attempt.abandon()
            self._response.comes_from(leg.attempt)

    def _hand_over(self) -> None:
        """Let the stream go on at an engine for outputs, now that its prompt is computed."""
        placement, attempt, now = self._placement, self._attempt, self.context.now()
        if attempt.endpoint.upstream.role != "prompts":
            # the engine of a hedge answers
            placement.hands_over = False
            return
        has_room = attempt.verdict is None and placement.may_hand_over(now, attempt.endpoint)
        placement.hands_over = False
        if has_room:
            attempt.move_on("its prompt is computed")
        verdict = attempt.verdict
        if verdict is not None and verdict.kind == "moved":
            placement.note_handed(attempt.endpoint, now)
            self.context.metrics.handed(attempt.endpoint, "handed")
            self._response.note(prompt_engine=attempt.endpoint.upstream.name)
            # its engine has not counted them yet
            self._usage_split.prompt_from(attempt.cached_tokens)
        elif verdict is None:
            self.context.metrics.handed(attempt.endpoint, "stayed")

    async def _pump(self) -> None:
        """Wait until the answer is over and the caller has all of it."""
        response, wake = self._response, self.context.wake
        while True:
            if response.gone:
                raise ClientDisconnectedError
            if self._hedge is not None:
                self._look_after(self._hedge)
            if self._leg is not None and not self._leg.is_noted:
                self._look_after_prompt(self._leg)
            if self._placement.hands_over and self.relay is not None and self.relay.emitted:
                self._hand_over()
            if response.num_waiting:
                await response.flush()
            elif response.attempt is None or response.attempt.verdict is not None:
                return
            else:
                await wake.wait()

    def _look_after(self, hedge: Hedge) -> None:
        """Send a hedge that is due, and continue with it if the first engine has failed."""
        change = hedge.check(self._attempt, self, self._new_relay)
        if change.sent:
            self._response.note(hedged=True)
        if change.failed is not None:
            self._note_failure(change.failed)
        if change.answers is not None:
            self._go_on_with(change.answers)

    def _note_failure(self, attempt: Attempt) -> None:
        assert attempt.verdict is not None, "the attempt is over"
        context, endpoint = self.context, attempt.endpoint
        _log.warning(
            "attempt_failed id=%s engine=%s attempt=%d reason=%r emitted=%s",
            context.incoming.request_id, endpoint.upstream.name, self._placement.num,
            attempt.verdict.why, self.relay.emitted if self.relay else False,
        )  # fmt: skip
        self._response.failed(attempt)
        context.metrics.failed(endpoint, attempt.verdict.kind)
        self._placement.note_failure(endpoint, lost=attempt.verdict.kind == "lost")

    def _may_pass_on(self, attempt: Attempt) -> bool:
        """Whether a refused request may be retried, on another engine or on this one in another
        form; otherwise the caller gets the refusal."""
        placement, now = self._placement, self.context.now()
        endpoint, body = attempt.endpoint, bytes(attempt.body)
        if self._upstream_request.eases(endpoint, attempt.status, body):
            placement.forgive(endpoint)
            return placement.may_retry(now, peek=True)
        if is_too_long(attempt.status, body) and placement.may_go_to_a_longer(now, endpoint):
            return True
        return not attempt.is_final and placement.may_retry(now, peek=True)

    async def _disconnected(self) -> None:
        receive = self.context.incoming.receive
        while (await receive())["type"] != "http.disconnect":
            pass
        self._response.hung_up()
