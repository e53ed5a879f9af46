"""One request from arrival to end: sent to an engine, retried elsewhere, answered.

::

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
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.types import Receive

from paceline.errors import RequestError
from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.caller import Caller
from paceline.gateway.proxy.downstream import DownstreamRequest
from paceline.gateway.proxy.hedging import Hedge
from paceline.gateway.proxy.placement import Placement
from paceline.gateway.proxy.response import Response
from paceline.gateway.proxy.retry_state import RetryState
from paceline.gateway.proxy.upstream_request import CHAT, UpstreamRequest
from paceline.gateway.proxy.usage_split import UsageSplit
from paceline.gateway.requests.body import Body
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.picker import Pick, Picker
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.config import GatewayConfig
from paceline.gateway.settings.engine_types import VECTOR_PATHS
from paceline.gateway.settings.prices import Used
from paceline.gateway.streams.openai_stream import StreamRelay, make_relay
from paceline.gateway.upstreams.refusals import is_too_long
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.routing import Demand, Dispatch, HedgeBudget, RetryBudget

__all__ = ["RELAYED", "ProxiedRequest"]

_log = logging.getLogger("paceline.gateway")

# paths whose requests are relayed
RELAYED: Final = VECTOR_PATHS | {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
}  # fmt: skip
# size of a body, in bytes, that is read without the connection ever being paused
_READ_AT_ONCE: Final = 60_000


class ProxiedRequest:
    """One request of one caller; the owner of its attempts."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        picker: Picker,
        flow_control: FlowControl,
        budget: RetryBudget,
        hedges: HedgeBudget,
        metrics: GatewayMetrics,
        now: Callable[[], float],
        path: str,
        body: Body,
        route: Route,
        asked: str,
        demand: Demand,
        caller: Caller,
        incoming: DownstreamRequest,
        receive: Receive,
    ) -> None:
        self.config = config
        self.now = now
        self.wake = asyncio.Event()
        self._flow_control, self._budget, self._metrics = flow_control, budget, metrics
        self._path, self._body, self._route = path, body, route
        # the model's name as the caller knows it
        self._asked = asked
        self._demand, self._caller, self.trace = demand, caller, caller.trace
        self.names_stored = body.fields.get("previous_response_id", b"null") != b"null"
        self._receive = receive
        self._arrived = now()
        # notes on the answer, for its last chunk and its headers
        self._note: dict[str, Any] = {}
        if asked != route.shown:
            # the key's budget does not cover the model that was asked for
            self._note["fallback"] = route.model
        self.relay: StreamRelay | None = self._new_relay() if body.stream else None
        self._upstream_request = UpstreamRequest(path, body, caller, self.relay)
        self._retries = RetryState(
            config,
            picker,
            budget,
            route,
            demand,
            caller.allowed,
            self._upstream_request,
            self.relay,
        )
        self._response = Response(
            path, body, asked, incoming, self.relay, self._upstream_request, self._retries,
            self._note, metrics, self.trace, now, self._arrived, self.wake,
        )  # fmt: skip
        self.downstream = self._response.downstream
        # called by the attempts for every part
        self.write: Callable[[bytes], None] = self.downstream.write
        self.write_last: Callable[[bytes], None] = self.downstream.write_last
        self._placement = Placement(
            config, flow_control, self._retries, demand, body, caller, self._response, now,
            self.wake, self._arrived,
        )  # fmt: skip
        self._hedge = Hedge(
            config, hedges, picker, self._retries, demand, body, self._upstream_request, metrics
        )
        # called with a complete answer before it is sent to the caller
        self.on_answer: Callable[[Attempt], None] | None = None
        self._usage_split = UsageSplit(
            path, demand.prompt_tokens, self.relay, body.most_deferred(path)
        )

    def _new_relay(self) -> StreamRelay:
        body = self._body
        return make_relay(
            self._path,
            num_choices=body.num_choices,
            model=self._asked,
            hide_ids=not body.return_token_ids,
            hide_usage=not body.include_usage,
            note=self._note,
            keep_text=self.config.resume_by_text and self._path == CHAT,
        )

    @property
    def _attempt(self) -> Attempt:
        """The attempt that answers, once an engine is asked."""
        attempt = self._response.attempt
        assert attempt is not None, "an engine is asked"
        return attempt

    @property
    def route(self) -> Route:
        """Route of the model that the request was sent to first."""
        return self._route

    @property
    def is_over(self) -> bool:
        """Whether the answering engine, if there is one, has sent all of the answer."""
        attempt = self._response.attempt
        return attempt is None or attempt.verdict is not None

    @property
    def upstream(self) -> Upstream:
        """The answering engine, once one is asked."""
        return self._attempt.endpoint.upstream

    @property
    def used(self) -> Used:
        """Usage of an answer that has ended, as far as it was counted."""
        return self._usage_split.used(self._response.attempt)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of an answer that has ended."""
        return self.used.output

    @property
    def counted(self) -> Used | None:
        """Usage as the engine counted it; None: it did not, or it truncates prompts."""
        attempt = self._response.attempt
        if attempt is None or attempt.endpoint.upstream.facts.truncates or not self.used.prompt:
            return None
        return self._usage_split.counted

    def usage_by_endpoint(self) -> Sequence[tuple[Endpoint, Used]]:
        """Usage by engine of an answer that has ended; see ``UsageSplit.usage_by_endpoint``."""
        return self._usage_split.usage_by_endpoint(self._response.attempt)

    def close(self) -> None:
        """Drop references after the last use: garbage collection of these reference cycles would
        cost more than a tenth of a request's time."""
        self._response.close()

    # ---------------------------------------------------------------- AttemptOwner

    def sent(self, attempt: Attempt) -> None:
        # the engine that was asked, also if it was a hedge
        attempt.endpoint.upstream.load.prefixes.add(self._demand.prefix)

    def again(
        self, attempt: Attempt, left_out: frozenset[str]
    ) -> tuple[bytes, frozenset[str]] | None:
        """Return the request without fields that the engine refused; see ``AttemptOwner``."""
        resumed = bool(self._retries.num_resumes)
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
        self._hedge.first_spoke()
        if not self._retries.num_resumes:
            self._metrics.first_token(self._attempt.endpoint, now - self._arrived)

    def spare_spoke(self, attempt: Attempt) -> None:
        assert attempt is self._hedge.spare, "the other one was dropped"
        # before the hedge is adopted, or its output would count as the first engine's
        self._attempt.abandon()
        self._go_on_with(self._hedge.take(won=True))

    def _go_on_with(self, spare: Attempt) -> None:
        """Let the hedge answer from now on."""
        self._response.comes_from(spare)
        self._response.note(engine=spare.endpoint.upstream.name, attempts=self._retries.num)
        spare.adopt()

    def may_leave(self, attempt: Attempt) -> bool:
        begun = self.relay is not None and self.relay.emitted
        spare = attempt is self._hedge.spare
        return begun or spare or self._retries.may_leave(self.now(), attempt.endpoint)

    def tick(self, now: float) -> None:
        self.downstream.tick(now, self.config.sse_keep_alive)
        if self._hedge.is_due(now):
            self.wake.set()

    # ---------------------------------------------------------------- the task

    async def run(self) -> None:
        """Run the request to the last byte of its answer.

        Raises:
            HttpError: there is no answer, and nothing was sent yet.
            ClientDisconnectedError: the caller hung up.
        """
        # checking the connection now and then is cheaper than a task per request; but while a long
        # body is read, the connection may be paused
        looks = self.downstream.sees_hang_ups and self._body.num_bytes < _READ_AT_ONCE
        watch = None if looks else asyncio.ensure_future(self._disconnected())
        try:
            if self._caller.tries_again:
                # the client's retry costs an attempt like the gateway's own, and deposits nothing
                self._budget.take(self._arrived)
            else:
                self._budget.deposit(self._arrived)
            await self._try_all()
        except ClientDisconnectedError:
            self._response.ended("gone")
            raise
        except RequestError:
            # no engine was asked: the request cannot be expressed in that engine's API
            self._response.ended("refused")
            raise
        except HttpError as error:
            if self.downstream.started:
                # the status was already sent
                await self._response.break_off(str(error))
                return
            if not self._retries.num:
                self._response.ended("failed")
            raise
        finally:
            if watch is not None:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _try_all(self) -> None:
        last = None
        while True:
            since = self.now()
            begun = await self._placement.place(last)
            self.trace.waited(since, self.now())
            attempt = await self._try_one(*begun)
            verdict, last = attempt.verdict, attempt.endpoint
            assert verdict is not None, "the attempt is over"
            if verdict.kind == "done":
                if self.on_answer is not None:
                    self.on_answer(attempt)
                await self._response.finish(attempt)
                return
            self._note_failure(attempt)
            if verdict.kind == "refused" and not self._may_pass_on(attempt):
                await self._response.refuse(attempt)
                return
            # a dying engine loses many requests at once through no fault of their own: the first
            # retry is free, and the budget is for repeated failures
            free = verdict.kind == "lost" and not self._retries.num_lost
            self._retries.num_lost += verdict.kind == "lost"
            if self.relay is not None and self.relay.emitted:
                if not self._retries.may_resume(self.now(), attempt.endpoint, free=free):
                    await self._response.break_off(verdict.why)
                    return
                self._usage_split.resumes_after(attempt.endpoint)
            elif not self._retries.may_retry(self.now(), free=free):
                await self._response.give_up()
                return

    async def _try_one(self, pick: Pick, dispatch: Dispatch) -> Attempt:
        endpoint = pick.endpoint
        retries, resumed = self._retries, bool(self._retries.num_resumes)
        try:
            request = self._upstream_request.encode(endpoint, resumed=resumed)
        except BaseException:
            dispatch.end(self.now())
            raise
        retries.num += 1
        if endpoint.tier or retries.route is not self._route:
            self._note["fallback"] = endpoint.model
        if retries.num > 1 or self._note:
            self._response.note(engine=endpoint.upstream.name, attempts=retries.num)
        if resumed:
            self._response.note(resumed=retries.num_resumes)
        attempt = Attempt(self, endpoint, dispatch)
        self._response.comes_from(attempt)
        self._metrics.attempt(endpoint, resumed=resumed, fallback=bool(endpoint.tier))
        by_text = resumed and not self._upstream_request.resumes_exactly(endpoint)
        if self.relay is not None:
            self.relay.begin_attempt(by_text=by_text)
            if retries.num == 1:
                self._hedge.arm(pick, self.now())
        if by_text:
            self._response.note(exact=False)
        try:
            attempt.send(self._path, request)
            await self._pump()
        finally:
            attempt.abandon()
            if self._hedge.is_wanted:
                self._attempt.abandon()
                self._hedge.end()
            self._flow_control.pump()
        return self._attempt

    async def _pump(self) -> None:
        """Wait until the answer is over and the caller has all of it."""
        while True:
            if self.downstream.gone:
                raise ClientDisconnectedError
            if self._hedge.is_wanted:
                self._look_after_hedge()
            if self.downstream.num_waiting:
                await self._response.flush()
            elif self._attempt.verdict is not None:
                return
            else:
                await self.wake.wait()
                self.wake.clear()

    def _look_after_hedge(self) -> None:
        """Send a hedge that is due; or, if one of two engines failed or the hedge answered in one
        piece, continue with the other or the hedge."""
        if self._hedge.is_due(self.now()) and self._hedge.send(
            self._attempt.endpoint, self, self._path, self._new_relay
        ):
            self._response.note(hedged=True)
        attempt, failed = self._attempt, self._hedge.second_failed()
        if failed is not None:
            self._note_failure(failed)
            return
        first_failed = (
            attempt.verdict is not None and attempt.verdict.kind != "done" and not attempt.is_final
        )
        answered = self._hedge.second_answered
        if self._hedge.spare is None or not (
            first_failed or (answered and attempt.verdict is None)
        ):
            return
        if first_failed:
            self._note_failure(attempt)
        else:
            attempt.abandon()
        self._go_on_with(self._hedge.take(won=answered))

    def _note_failure(self, attempt: Attempt) -> None:
        assert attempt.verdict is not None, "the attempt is over"
        upstream = attempt.endpoint.upstream
        _log.warning(
            "attempt_failed id=%s engine=%s attempt=%d reason=%r emitted=%s",
            self._caller.request_id, upstream.name, self._retries.num, attempt.verdict.why,
            self.relay.emitted if self.relay else False,
        )  # fmt: skip
        self._response.failed(attempt)
        self._metrics.failed(attempt.endpoint, attempt.verdict.kind)
        # a refusal concerns one of the engine's models
        lost = attempt.verdict.kind == "lost"
        self._retries.tried.add(upstream.name if lost else attempt.endpoint.key)

    def _may_pass_on(self, attempt: Attempt) -> bool:
        """Whether a refused request may be retried, on another engine or on this one in another
        form; otherwise the caller gets the refusal."""
        now = self.now()
        body = bytes(attempt.body)
        if self._upstream_request.eases(attempt.endpoint, attempt.status, body):
            self._retries.tried.discard(attempt.endpoint.key)
            return self._retries.may_retry(now, peek=True)
        if is_too_long(attempt.status, body) and self._retries.may_go_to_a_longer(
            now, attempt.endpoint
        ):
            return True
        return not attempt.is_final and self._retries.may_retry(now, peek=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.downstream.hung_up()
