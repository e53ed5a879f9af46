"""One request on its way: to an engine, to another where that fails, and its answer back.

::

    Exchange   (a task a request)   choose -> Leg -> wait -> done | choose again
    Leg        (callbacks)          engine's bytes -> Splice -> caller's connection

What an engine sends reaches the caller in the callback that read it. The task wakes for the head,
for a caller who reads slowly, and for the end.

Before its caller has seen anything of the answer, a request whose engine refuses or fails begins
anew at another one. Later it goes on behind what was seen, where the engine's kind can do that
exactly, and ends in an error that says so where it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope, Send

from paceline.core.errors import RequestError
from paceline.gateway.answers import note_headers, whole_answer
from paceline.gateway.attempts import Attempts
from paceline.gateway.bodies import Body
from paceline.gateway.caller import Caller, broken_event
from paceline.gateway.config import GatewayConfig
from paceline.gateway.counts import Counts
from paceline.gateway.hedge import Hedge
from paceline.gateway.kinds import VECTOR_PATHS
from paceline.gateway.leg import Leg
from paceline.gateway.money import Used
from paceline.gateway.outgoing import Outgoing
from paceline.gateway.pick import AllRestError, Pick, Picker
from paceline.gateway.refusals import is_too_long, rest_of, retry_after, told
from paceline.gateway.routes import Route, Site
from paceline.gateway.sending import CHAT, RESUMABLE, Sending
from paceline.gateway.slot_queue import Queued
from paceline.gateway.splice import DONE, Splice, make_splice
from paceline.gateway.turns import Turns
from paceline.gateway.usage import used_by
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.sse import SSE
from paceline.http.upstream import Headers
from paceline.routing import Demand, Dispatch, HedgeBudget, RetryBudget

__all__ = ["RELAYED", "Exchange"]

_log = logging.getLogger("paceline.gateway")
_T = TypeVar("_T")

# endpoints that are relayed
RELAYED: Final = VECTOR_PATHS | {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
}  # fmt: skip
_RETRYABLE: Final = frozenset({404, 408, 409, 425, 429, 500, 502, 503, 504, 529})
# of a body that is read without the connection being held back on the way
_READ_AT_ONCE: Final = 60_000
# between two looks at whether the caller of a waiting request is still there
_LOOK_SECONDS: Final = 0.1


class Exchange:
    """One request of one caller."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        picker: Picker,
        turns: Turns,
        budget: RetryBudget,
        hedges: HedgeBudget,
        counts: Counts,
        now: Callable[[], float],
        path: str,
        body: Body,
        route: Route,
        asked: str,
        demand: Demand,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.config = config
        self.now = now
        self.wake = asyncio.Event()
        self.splice: Splice | None = None
        self._picker, self._turns, self._budget, self._counts = picker, turns, budget, counts
        self._path, self._body, self._route = path, body, route
        # the model's name as the caller knows it
        self._asked = asked
        self._demand, self._caller, self.trace = demand, caller, caller.trace
        self._receive = receive
        self._arrived = now()
        self.out = Outgoing(
            scope,
            send,
            stream=body.stream,
            wake=self.wake,
            hold_back=self._hold_back,
            now=self._arrived,
        )
        self._again: Leg | None = None
        # what was done to the answer, for its last chunk and its headers
        self._note: dict[str, Any] = {}
        if asked != route.model:
            # its key's budget does not reach for what it asked for
            self._note["fallback"] = route.model
        self._failures: list[str] = []
        # of a whole answer
        self._used: Used | None = None
        self._retry_after: float | None = None
        if body.stream:
            self.splice = self._new_splice()
        self._sending = Sending(path, body, caller, self.splice)
        self._attempts = Attempts(
            config, picker, budget, route, demand, caller.allowed, self._sending, self.splice
        )
        self._hedge = Hedge(config, hedges, picker, self._attempts, demand, body)
        self._connecting: asyncio.Future[None] | None = None

    def _new_splice(self) -> Splice:
        body = self._body
        return make_splice(
            self._path,
            num_choices=body.num_choices,
            model=self._asked,
            hide_ids=not body.return_token_ids,
            hide_usage=not body.include_usage,
            note=self._note,
            keep_text=self.config.resume_by_text and self._path == CHAT,
        )

    @property
    def num_output_tokens(self) -> int:
        """Of an answer that has ended, as far as anything was counted."""
        return self.used().output

    @property
    def served_by(self) -> Site | None:
        """Where the answer came from, or as much of it as there was; None: nowhere was one."""
        if not self._attempts.num:
            return None
        site, used = self._leg.site, self.used()
        return site if used.output or self._leg.is_answer else None

    def used(self) -> Used:
        """Tokens of an answer that has ended, and of its prompt, as far as anything was counted:
        once, whatever was tried for it."""
        if not self._attempts.num:
            return Used()
        splice = self.splice
        if splice is None:
            if self._used is None and self._leg.is_answer:
                self._used = used_by(self._path, bytes(self._leg.body))
            return self._used or Used()
        output, prompt = splice.num_output_tokens, splice.prompt_tokens
        if prompt is None:
            # the engine did not live to count it, or counts nothing
            prompt = round(self._demand.prompt_tokens) if output else 0
        return Used(prompt, splice.cached_tokens, output)

    # ---------------------------------------------------------------- of the legs

    def write(self, data: bytes) -> None:
        self.out.write(data)

    def _hold_back(self) -> None:
        if self._leg.connection is not None:
            self._leg.connection.pause()

    def first_token(self, now: float) -> None:
        self._hedge.disarm()
        spare, self._hedge.spare = self._hedge.spare, None
        if spare is not None:
            self._counts.hedged(spare.site, "lost")
            spare.abandon()
        if not self._attempts.num_resumes:
            self._counts.first_token(self._leg.site, now - self._arrived)

    def spare_spoke(self, leg: Leg) -> None:
        assert leg is self._hedge.spare, "the other one was dropped"
        first = self._leg
        # before anything is told, or it would count as what the first one said
        first.abandon()
        self._take_spare(leg)
        self._counts.hedged(leg.site, "won")

    def _take_spare(self, leg: Leg) -> None:
        """The answer is the second engine's from here on."""
        self._hedge.spare = None
        self._leg = leg
        self._note |= {"engine": leg.site.engine.name, "attempts": self._attempts.num}
        leg.adopt()

    def tick(self, now: float) -> None:
        self.out.tick(now, self.config.sse_keep_alive)
        if self._hedge.is_due(now):
            self.wake.set()

    def again(self, leg: Leg) -> None:
        self._again = leg
        self.wake.set()

    # ---------------------------------------------------------------- the task

    async def run(self) -> None:
        """To the last byte of the answer.

        Raises:
            HttpError: there is none, and nothing was sent yet.
            ClientDisconnectedError: the caller hung up.
        """
        # a task for each request costs more than a look at its connection now and then; of a long
        # body the connection may have stopped reading
        looks = self.out.sees_hang_ups and self._body.num_bytes < _READ_AT_ONCE
        watch = None if looks else asyncio.ensure_future(self._disconnected())
        try:
            if self._caller.tries_again:
                # it costs an attempt as the gateway's own would, and pays for none
                self._budget.take(self._arrived)
            else:
                self._budget.deposit(self._arrived)
            await self._attempt_all()
        except ClientDisconnectedError:
            self._ended("gone")
            raise
        except RequestError:
            # what no engine was asked, as it cannot be said in that engine's API
            self._ended("refused")
            raise
        except HttpError as error:
            if self.out.started:
                # no status can be told any more
                await self._break_off(str(error))
                return
            if not self._attempts.num:
                self._ended("failed")
            raise
        finally:
            if watch is not None:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _attempt_all(self) -> None:
        while True:
            since = self.now()
            begun = await self._begin()
            self.trace.waited(since, self.now())
            leg = await self._attempt(*begun)
            verdict = leg.verdict
            assert verdict is not None, "the leg is over"
            if verdict.kind == "done":
                await self._finish(leg)
                return
            self._note_failure(leg)
            if verdict.kind == "refused" and not await self._may_pass_on(leg):
                return
            # an engine that dies leaves many requests at once, each through no fault of its own:
            # the first move away is free, and the budget is for what keeps failing
            free = verdict.kind == "lost" and not self._attempts.num_lost
            self._attempts.num_lost += verdict.kind == "lost"
            if self.splice is not None and self.splice.emitted:
                if not self._attempts.may_resume(self.now(), leg.site, free=free):
                    await self._break_off(verdict.why)
                    return
            elif not self._attempts.may_retry(self.now(), free=free):
                await self._give_up(leg)
                return

    async def _begin(self) -> tuple[Pick, Dispatch]:
        """Choose an engine, and count the request there, once one may be asked."""
        while True:
            try:
                return await self._begin_now()
            except AllRestError as error:
                seconds = error.seconds
                if seconds > self.config.max_rest_wait - (self.now() - self._arrived):
                    raise
            await self._unless_gone(asyncio.sleep(seconds))

    async def _begin_now(self) -> tuple[Pick, Dispatch]:
        """Once it is its turn."""
        if self._attempts.num or not self._turns.must_wait(self._attempts.route, self._demand):
            return self._dispatched()
        queued = Queued(
            # callers may use one id of theirs for several requests
            f"{self._caller.request_id} {id(self)}",
            self._arrived,
            round(self._demand.output_tokens),
            self._body.priority,
            self._caller.tenant,
            self._body.slo,
        )
        return await self._unless_gone(self._turn(queued))

    async def _unless_gone(self, what: Coroutine[Any, Any, _T]) -> _T:
        """Raises ClientDisconnectedError where the caller hangs up meanwhile."""
        waiting = asyncio.ensure_future(what)
        while not waiting.done() and not self.out.gone:
            waking = asyncio.ensure_future(self.wake.wait())
            await asyncio.wait(
                (waiting, waking), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            waking.cancel()
            self.wake.clear()
            self.out.tick(self.now(), self.config.sse_keep_alive)
            if self.out.num_waiting:
                await self._flush(None)
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            raise ClientDisconnectedError
        return waiting.result()

    async def _turn(self, queued: Queued) -> tuple[Pick, Dispatch]:
        async with self._turns.turn(self._attempts.route, self._demand, queued):
            return self._dispatched()

    def _dispatched(self) -> tuple[Pick, Dispatch]:
        last = self._leg.site if self._attempts.num else None
        pick = self._attempts.pick(self.now(), last)
        return pick, pick.site.engine.load.dispatch(self._demand, pick.view, self.now())

    async def _attempt(self, pick: Pick, dispatch: Dispatch) -> Leg:
        site, engine = pick.site, pick.site.engine
        try:
            headers = self._sending.headers(site)
            body = self._sending.body(site, resumed=bool(self._attempts.num_resumes))
        except BaseException:
            dispatch.end(self.now())
            raise
        self._attempts.num += 1
        if site.tier or self._attempts.route is not self._route:
            self._note["fallback"] = site.model
        if self._attempts.num > 1 or self._note:
            self._note |= {"engine": engine.name, "attempts": self._attempts.num}
        resumed = bool(self._attempts.num_resumes)
        if resumed:
            self._note["resumed"] = self._attempts.num_resumes
        leg = self._leg = Leg(self, site, dispatch)
        self._counts.attempt(site, resumed=resumed, fallback=bool(site.tier))
        by_text = resumed and not self._sending.exactly(site)
        if self.splice is not None:
            self.splice.begin_leg(by_text=by_text)
            if self._attempts.num == 1:
                self._hedge.arm(pick, self.now())
        if by_text:
            self._note["exact"] = False
        try:
            await leg.send(self._path, headers, body)
            if leg.connection is not None:
                engine.load.prefixes.add(self._demand.prefix)
            await self._pump()
        finally:
            self._hedge.disarm()
            for each in (leg, self._leg, self._hedge.spare):
                if each is not None:
                    each.abandon()
            self._hedge.spare = None
            if self._connecting is not None:
                self._connecting.cancel()
            self._turns.pump()
        return self._leg

    async def _pump(self) -> None:
        """Until the answer is over, and what it brought is with the caller."""
        while True:
            if self.out.gone:
                raise ClientDisconnectedError
            if self._again is not None:
                again, self._again = self._again, None
                await again.resend()
            if self._hedge.is_due(self.now()):
                self._ask_another()
            self._look_after_spare()
            leg = self._leg
            if self.out.num_waiting:
                await self._flush(leg)
            elif leg.verdict is not None:
                return
            else:
                await self.wake.wait()
                self.wake.clear()

    def _ask_another(self) -> None:
        """A second engine, while the first one says nothing."""
        pick = self._hedge.pick(self._leg.site, self.now())
        if pick is None:
            return
        site, load = pick.site, pick.site.engine.load
        try:
            headers, body = self._sending.headers(site), self._sending.body(site, resumed=False)
        except RequestError:
            # what cannot be said in the second engine's API is no trouble of the first one's
            return
        self._attempts.num += 1
        self._note["hedged"] = True
        dispatch = load.dispatch(self._demand, pick.view, self.now())
        spare = self._hedge.spare = Leg(self, site, dispatch, probe=self._new_splice())
        self._counts.attempt(site, resumed=False, fallback=False)
        self._connecting = asyncio.ensure_future(spare.send(self._path, headers, body))

    def _look_after_spare(self) -> None:
        """One of two engines has failed: the other one is all there is."""
        spare, verdict = self._hedge.spare, self._leg.verdict
        if spare is None:
            return
        if spare.verdict is not None:
            self._hedge.spare = None
            self._counts.hedged(spare.site, "failed")
            self._note_failure(spare)
        elif verdict is not None and (verdict.kind == "lost" or verdict.status in _RETRYABLE):
            self._note_failure(self._leg)
            self._take_spare(spare)

    def _note_failure(self, leg: Leg) -> None:
        assert leg.verdict is not None, "the leg is over"
        engine = leg.site.engine
        self._failures.append(f"{engine.name}: {leg.verdict.why}")
        _log.warning(
            "attempt_failed id=%s engine=%s attempt=%d reason=%r emitted=%s",
            self._caller.request_id, engine.name, self._attempts.num, leg.verdict.why,
            self.splice.emitted if self.splice else False,
        )  # fmt: skip
        if leg.verdict.kind == "refused":
            wait = retry_after(leg.headers)
            if wait is not None:
                self._retry_after = min(wait, self._retry_after or wait)
            engine.rest(self.now() + rest_of(leg.status, leg.headers))
        self._counts.failed(leg.site, leg.verdict.kind)
        self._attempts.tried.add(engine.name)

    async def _flush(self, leg: Leg | None) -> None:
        """What waits for the caller; ``leg``: what it comes from, None: comments alone."""
        if not self.out.started:
            headers = [] if leg is None else leg.headers
            await self._start(200, headers or [(b"content-type", SSE.encode())])
        await self.out.flush()
        if leg is not None and leg.connection is not None and leg.verdict is None:
            leg.connection.resume()

    async def _start(self, status: int, headers: Headers, *more: tuple[bytes, bytes]) -> None:
        leg = self._leg if self._attempts.num else None
        notes = note_headers(leg, self._path, self._body, self._attempts.num, self._note)
        await self.out.start(status, headers, [*more, *notes])

    # ---------------------------------------------------------------- ends

    def _ended(self, result: str) -> None:
        engine = self._leg.site.engine.name if self._attempts.num else ""
        self._counts.ended(engine, result, self.now() - self._arrived)
        self.trace.ended(result, self._note)

    async def _finish(self, leg: Leg) -> None:
        if leg.streams:
            # an engine that said nothing but the end, too, has answered
            if not self.out.started:
                await self._start(200, leg.headers)
            await self.out.end()
        else:
            await self._whole(leg)
        self._ended("ok")

    async def _whole(self, leg: Leg) -> None:
        """An answer that is no stream."""
        status, headers, body = whole_answer(leg, self._path, self._asked, self._note)
        if self.out.started:
            # comments went out while this was waited for
            await self.out.end(b"data: " + body.replace(b"\n", b" ") + b"\n\n" + DONE)
            return
        await self._start(status, headers, (b"content-length", b"%d" % len(body)))
        await self.out.end(body)

    async def _may_pass_on(self, leg: Leg) -> bool:
        """Whether a refused request goes to another engine; otherwise the caller has the answer."""
        headers = leg.headers
        if is_too_long(leg.status, bytes(leg.body[:8192])) and self._attempts.may_go_to_a_longer(
            self.now(), leg.site
        ):
            return True
        should = dict(headers).get(b"x-should-retry", b"true")
        retryable = leg.status in _RETRYABLE and should != b"false"
        if retryable and self._attempts.may_retry(self.now(), peek=True):
            return True
        await self._refuse(leg)
        return False

    async def _refuse(self, leg: Leg) -> None:
        if self.out.started:
            await self._break_off(f"engine {leg.site.engine.name} refused it ({leg.status})")
            return
        self._ended("refused")
        if leg.status in (401, 403):
            # it is the gateway's key that was refused, not the caller's
            raise HttpError(502, f"engine {leg.site.engine.name} refused the gateway's credentials")
        if leg.status < 400:
            raise HttpError(502, f"engine {leg.site.engine.name} answered with status {leg.status}")
        await self._whole(leg)

    async def _give_up(self, leg: Leg) -> None:
        self._ended("failed")
        failure = self._failed("no engine answered")
        if not self.out.started:
            raise failure
        await self._break_off(str(failure))

    def _failed(self, what: str) -> HttpError:
        tried = "; ".join(self._failures[-3:])
        return HttpError(503, f"{what}: {tried}", retry_after=self._retry_after or 1.0)

    async def _break_off(self, why: str) -> None:
        """The end of a stream that cannot go on."""
        splice = self.splice
        assert splice is not None, "a stream was asked for"
        self._ended("broken")
        resumable, secret = False, ""
        if self._attempts.num:
            site = self._leg.site
            resumable, secret = self._sending.can_go_on(site, site), site.engine.key
        event = told(self._path, 200, splice.failure_event, secret)
        if not event or self._path in RESUMABLE:
            event = broken_event(
                self._path,
                f"{why}, and the answer cannot go on elsewhere",
                splice.num_output_tokens,
                "no other engine of this model" if resumable else "this engine's kind cannot",
            )
        await self.out.end(event)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.out.hung_up()
