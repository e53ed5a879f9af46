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
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from paceline.gateway.bodies import Body
from paceline.gateway.caller import Caller, broken_event
from paceline.gateway.config import GatewayConfig
from paceline.gateway.counts import Counts
from paceline.gateway.leg import Leg
from paceline.gateway.pick import Pick, Picker
from paceline.gateway.routes import Route, Site
from paceline.gateway.sending import CHAT, RESUMABLE, Sending
from paceline.gateway.slot_queue import Queued
from paceline.gateway.splice import DONE, Splice, make_splice
from paceline.gateway.turns import Turns
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.shortcut import BODY_WRITER, BodyWriter
from paceline.http.sse import KEEP_ALIVE, SSE
from paceline.http.upstream import Headers
from paceline.routing import Demand, Dispatch, RetryBudget

__all__ = ["RELAYED", "Exchange"]

_log = logging.getLogger("paceline.gateway")

# endpoints that are relayed
RELAYED: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"}
)
_RETRYABLE: Final = frozenset({404, 408, 409, 425, 429, 500, 502, 503, 504, 529})
_COMPLETION_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens":\s*([0-9]{1,9})')
# of a body that is read without the connection being held back on the way
_READ_AT_ONCE: Final = 60_000
# between two looks at whether the caller of a waiting request is still there
_LOOK_SECONDS: Final = 0.1
# waiting for the caller to read before the engine is read no further
_MAX_BACKLOG: Final = 64 * 1024
# of engines that callers get
_ANSWER_HEADERS: Final = frozenset(
    {
        b"content-type",
        b"retry-after",
        b"x-should-retry",
        b"x-paceline-ignored-fields",
        b"x-llm-d-request-dropped-reason",
    }
)


class Exchange:
    """One request of one caller."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        picker: Picker,
        turns: Turns,
        budget: RetryBudget,
        counts: Counts,
        now: Callable[[], float],
        path: str,
        body: Body,
        route: Route,
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
        self._demand, self._caller = demand, caller
        self._receive, self._send = receive, send
        self._writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
        self._arrived = now()
        self._backlog = bytearray()
        self._started = False
        self._gone = False
        self._again: Leg | None = None
        self._attempts = 0
        self._resumes = 0
        # legs that were lost
        self._lost = 0
        # ticks since something was written, and when the first of them was
        self._quiet_for = 0
        self._quiet_since = self._arrived
        # what was done to the answer, for its last chunk and its headers
        self._note: dict[str, Any] = {}
        self._tried: set[str] = set()
        self._failures: list[str] = []
        self._retry_after: float | None = None
        if body.stream:
            self.splice = make_splice(
                path,
                num_choices=body.num_choices,
                model=route.model,
                hide_ids=not body.return_token_ids,
                hide_usage=not body.include_usage,
                note=self._note,
                keep_text=config.resume_by_text and path == CHAT,
            )
        self._sending = Sending(path, body, caller, self.splice)

    @property
    def num_output_tokens(self) -> int:
        """Of an answer that has ended, as far as anything was counted."""
        if self.splice is not None:
            return self.splice.num_output_tokens
        if not self._attempts:
            return 0
        found = _COMPLETION_TOKENS.search(self._leg.body)
        return int(found[1]) if found else 0

    # ---------------------------------------------------------------- of the legs

    def write(self, data: bytes) -> None:
        """To the caller, now or when its connection takes it."""
        writer = self._writer
        if self._started and not self._backlog and writer is not None and writer.is_ready:
            writer.write(data)
            self._quiet_for = 0
            return
        self._backlog += data
        if len(self._backlog) > _MAX_BACKLOG and self._leg.connection is not None:
            self._leg.connection.pause()
        self.wake.set()

    def first_token(self, now: float) -> None:
        if not self._resumes:
            self._counts.first_token(self._leg.site, now - self._arrived)

    def tick(self, now: float) -> None:
        """A comment where nothing else is said: no proxy on the way is to think it dead."""
        self._look()
        if not self._quiet_for:
            self._quiet_since = now
        self._quiet_for += 1
        every = self.config.sse_keep_alive
        if self._body.stream and every and now - self._quiet_since >= every:
            self._quiet_since = now
            self.write(KEEP_ALIVE)

    def _look(self) -> None:
        if self._writer is not None and self._writer.is_gone:
            self._gone = True
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
        looks = self._writer is not None and self._body.num_bytes < _READ_AT_ONCE
        watch = None if looks else asyncio.ensure_future(self._disconnected())
        try:
            self._budget.deposit(self._arrived)
            await self._attempt_all()
        except ClientDisconnectedError:
            self._ended("gone")
            raise
        except HttpError as error:
            if self._started:
                # no status can be told any more
                await self._break_off(str(error))
                return
            if not self._attempts:
                self._ended("failed")
            raise
        finally:
            if watch is not None:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    async def _attempt_all(self) -> None:
        while True:
            leg = await self._attempt(*(await self._begin()))
            verdict = leg.verdict
            assert verdict is not None, "the leg is over"
            if verdict.kind == "done":
                await self._finish(leg)
                return
            engine = leg.site.engine
            self._failures.append(f"{engine.name}: {verdict.why}")
            _log.warning(
                "attempt_failed id=%s engine=%s attempt=%d reason=%r emitted=%s",
                self._caller.request_id, engine.name, self._attempts, verdict.why,
                self.splice.emitted if self.splice else False,
            )  # fmt: skip
            self._counts.failed(leg.site, verdict.kind)
            self._tried.add(engine.name)
            if verdict.kind == "refused" and not await self._may_pass_on(leg):
                return
            # an engine that dies leaves many requests at once, each through no fault of its own:
            # the first move away is free, and the budget is for what keeps failing
            free = verdict.kind == "lost" and not self._lost
            self._lost += verdict.kind == "lost"
            if self.splice is not None and self.splice.emitted:
                if not self._may_resume(free):
                    await self._break_off(verdict.why)
                    return
                self._resumes += 1
            elif not self._may_retry(free):
                await self._give_up(leg)
                return

    def _pick(self) -> Pick:
        only = None
        if self.splice is not None and self.splice.emitted:
            exact = self._picker.can_pick(
                self._route, self._demand, self.now(), self._tried, self._goes_on_exactly_at
            )
            only = self._goes_on_exactly_at if exact else self._can_go_on_at
        return self._picker.pick(
            self._route,
            self._demand,
            self.now(),
            tried=self._tried,
            fallback=self._route.fallback and self._caller.allowed.fallback,
            only=only,
        )

    async def _begin(self) -> tuple[Pick, Dispatch]:
        """Choose an engine, and count the request there, once it is its turn."""
        if self._attempts or not self._turns.must_wait(self._route, self._demand):
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
        waiting = asyncio.ensure_future(self._turn(queued))
        while not waiting.done() and not self._gone:
            waking = asyncio.ensure_future(self.wake.wait())
            await asyncio.wait(
                (waiting, waking), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            waking.cancel()
            self.wake.clear()
            self._look()
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            raise ClientDisconnectedError
        return waiting.result()

    async def _turn(self, queued: Queued) -> tuple[Pick, Dispatch]:
        async with self._turns.turn(self._route, self._demand, queued):
            return self._dispatched()

    def _dispatched(self) -> tuple[Pick, Dispatch]:
        pick = self._pick()
        return pick, pick.site.engine.load.dispatch(self._demand, pick.view, self.now())

    async def _attempt(self, pick: Pick, dispatch: Dispatch) -> Leg:
        site, engine = pick.site, pick.site.engine
        try:
            headers = self._sending.headers(site)
            body = self._sending.body(site, resumed=bool(self._resumes))
        except BaseException:
            dispatch.end(self.now())
            raise
        self._attempts += 1
        if site.tier:
            self._note["fallback"] = site.model
        if self._attempts > 1 or self._note:
            self._note |= {"engine": engine.name, "attempts": self._attempts}
        if self._resumes:
            self._note["resumed"] = self._resumes
        leg = self._leg = Leg(self, site, dispatch)
        self._counts.attempt(site, resumed=bool(self._resumes), fallback=bool(site.tier))
        by_text = bool(self._resumes) and not self._sending.exactly(site)
        if self.splice is not None:
            self.splice.begin_leg(by_text=by_text)
        if by_text:
            self._note["exact"] = False
        try:
            await leg.send(self._path, headers, body)
            if leg.connection is not None:
                engine.load.prefixes.add(self._demand.prefix)
            await self._pump(leg)
        finally:
            leg.abandon()
            self._turns.pump()
        return leg

    async def _pump(self, leg: Leg) -> None:
        """Until the leg is over, and what it brought is with the caller."""
        while True:
            if self._gone:
                raise ClientDisconnectedError
            if self._again is not None:
                again, self._again = self._again, None
                await again.resend()
            if self._backlog:
                await self._flush(leg)
            elif leg.verdict is not None:
                return
            else:
                await self.wake.wait()
                self.wake.clear()

    async def _flush(self, leg: Leg) -> None:
        if not self._started:
            await self._start(200, leg.headers or [(b"content-type", SSE.encode())])
        data, self._backlog = bytes(self._backlog), bytearray()
        self._quiet_for = 0
        # waits for a caller who reads slowly; hanging up ends the wait
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if leg.connection is not None and leg.verdict is None:
            leg.connection.resume()

    async def _start(self, status: int, headers: Headers, *more: tuple[bytes, bytes]) -> None:
        self._started = True
        kept = [header for header in headers if header[0] in _ANSWER_HEADERS]
        kept += more
        if self._body.stream and status == 200:
            kept += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        kept += self._told()
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    def _told(self) -> Headers:
        """What callers may want to know, in headers."""
        found = [(b"x-paceline-attempts", b"%d" % self._attempts)]
        if self._attempts:
            found.append((b"x-paceline-engine", self._leg.site.engine.name.encode()))
            if self._leg.site.tier:
                name = self._leg.site.model.encode("ascii", "backslashreplace")
                found.append((b"x-paceline-fallback", name))
        return found

    # ---------------------------------------------------------------- ends

    def _ended(self, result: str) -> None:
        engine = self._leg.site.engine.name if self._attempts else ""
        self._counts.ended(engine, result, self.now() - self._arrived)

    async def _finish(self, leg: Leg) -> None:
        if leg.streams:
            # an engine that said nothing but the end, too, has answered
            if not self._started:
                await self._start(200, leg.headers)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._whole(leg)
        self._ended("ok")

    async def _whole(self, leg: Leg) -> None:
        """An answer that is no stream."""
        body = bytes(leg.body)
        if leg.status == 200:
            body = self._renamed(body, leg)
        if self._started:
            # comments went out while this was waited for
            error = b"data: " + body.replace(b"\n", b" ") + b"\n\n" + DONE
            await self._send({"type": "http.response.body", "body": error, "more_body": False})
            return
        await self._start(leg.status, leg.headers, (b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _renamed(self, body: bytes, leg: Leg) -> bytes:
        """With the model's name as the caller knows it, and what was done."""
        if leg.site.model == self._route.model and not self._note:
            return body
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except msgspec.MsgspecError:
            return body
        if "model" in fields:
            fields["model"] = msgspec.Raw(msgspec.json.encode(self._route.model))
        if self._note:
            fields["paceline"] = msgspec.Raw(msgspec.json.encode(self._note))
        return msgspec.json.encode(fields)

    async def _may_pass_on(self, leg: Leg) -> bool:
        """Whether a refused request goes to another engine; otherwise the caller has the answer."""
        should = next((v for n, v in leg.headers if n == b"x-should-retry"), b"true")
        wait = next((v for n, v in leg.headers if n == b"retry-after"), b"")
        if wait.isdigit():
            seconds = float(wait[:9])
            self._retry_after = min(seconds, self._retry_after or seconds)
        if leg.status in _RETRYABLE and should != b"false" and self._may_retry(peek=True):
            return True
        await self._refuse(leg)
        return False

    async def _refuse(self, leg: Leg) -> None:
        if self._started:
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
        if not self._started:
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
        event = splice.failure_event
        if not event or self._path in RESUMABLE:
            resumable = self._sending.can_go_on(self._leg.site, self._leg.site)
            event = broken_event(
                self._path,
                f"{why}, and the answer cannot go on elsewhere",
                splice.num_output_tokens,
                "no other engine of this model" if resumable else "this engine's kind cannot",
            )
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    # ---------------------------------------------------------------- what may be done

    def _may_retry(self, free: bool = False, *, peek: bool = False) -> bool:
        """Whether one more attempt is left; ``free``: not from the budget; ``peek``: it is not
        taken yet."""
        if not self._caller.allowed.retry or self._attempts >= self.config.max_attempts:
            return False
        if not self._picker.has_another(
            self._route, self._demand, self.now(), self._tried | {self._leg.site.engine.name}
        ):
            return False
        if free:
            return True
        return self._budget.left(self.now()) >= 1.0 if peek else self._budget.take(self.now())

    def _may_resume(self, free: bool) -> bool:
        splice = self.splice
        if (
            splice is None
            or not self._caller.allowed.resume
            or self._resumes >= self.config.max_resumes
            or (splice.resume_ids() is None and splice.partial_text() is None)
        ):
            return False
        others = self._picker.can_pick(
            self._route, self._demand, self.now(), self._tried, self._can_go_on_at
        )
        return others and (free or self._budget.take(self.now(), overdraw=True))

    def _can_go_on_at(self, site: Site) -> bool:
        return self._sending.can_go_on(site, self._leg.site)

    def _goes_on_exactly_at(self, site: Site) -> bool:
        return self._can_go_on_at(site) and self._sending.exactly(site)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.wake.set()
