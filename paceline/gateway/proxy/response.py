"""Response to the caller of one request: head with notes, flushing of what waits, and every way in
which a request can end.

This module does not know which engines are asked, or when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec

from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.downstream import Downstream
from paceline.gateway.proxy.placement import Placement
from paceline.gateway.proxy.upstream_request import RESUMABLE
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.streams.openai_stream import DONE, StreamRelay
from paceline.gateway.upstreams.dialects import map_status, read_words
from paceline.gateway.upstreams.refusals import redacted, redacted_error, retry_after
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.sse import SSE
from paceline.http.upstream import Headers
from paceline.statuses import meaning_of

__all__ = ["Response", "cascade_header"]

# headers of a stream before its engine has sent any
_EVENTS: Final = [(b"content-type", SSE.encode())]
# interval of checks whether the waiting caller is still there, s
_LOOK_SECONDS: Final = 0.1

_T = TypeVar("_T")


class Response(Downstream):
    """Response to one request, over its caller's connection. Its owner names the attempt with
    ``comes_from``, then calls exactly one of ``finish``, ``refuse``, ``give_up`` and ``break_off``.

    Args:
        relay: relay of the streamed answer; None: it is not streamed.
    """

    def __init__(
        self, context: RequestContext, relay: StreamRelay | None, placement: Placement
    ) -> None:
        super().__init__(
            context.incoming, stream=context.body.stream, wake=context.wake, now=context.arrived
        )
        self._context, self._relay, self._placement = context, relay, placement
        # the attempt that answers; None: no engine was asked
        self.attempt: Attempt | None = None
        # what was done to the answer, for its headers and, by the relay, its last chunk
        self._notes: Mapping[str, Any] = {}
        self._failures: list[str] = []
        self._retry_after: float | None = None

    def comes_from(self, attempt: Attempt) -> None:
        """Take the answer from ``attempt`` from now on."""
        self.attempt = attempt

    def close(self) -> None:
        """Drop references once the request is over. See ``ProxiedRequest.close``."""
        self.attempt = None

    def note(self, **what: Any) -> None:
        """Record something done to the answer that the caller may want to know."""
        self._notes = {**self._notes, **what}
        if self._relay is not None:
            self._relay.annotate(self._notes)

    def note_attempt(self, endpoint: Endpoint) -> None:
        """Record what an attempt at ``endpoint`` makes of the answer."""
        placement = self._placement
        if endpoint.tier or placement.route is not self._context.route:
            self.note(fallback=endpoint.model)
        if placement.num > 1 or self._notes:
            self.note(engine=endpoint.upstream.name, attempts=placement.num)
        if placement.num_resumes:
            self.note(resumed=placement.num_resumes)

    def failed(self, attempt: Attempt) -> None:
        """Record a failed attempt; the caller hears of it only if no other attempt succeeds."""
        assert attempt.verdict is not None, "the attempt is over"
        self._failures.append(f"{attempt.endpoint.upstream.name}: {attempt.verdict.why}")
        if attempt.verdict.kind == "refused":
            wait = retry_after(attempt.headers)
            if wait is not None:
                self._retry_after = min(wait, self._retry_after or wait)

    def stream_head(self) -> tuple[Headers, Headers] | None:
        """Return the headers of a stream that starts now; None: no engine is answering."""
        attempt = self.attempt
        return None if attempt is None else (_headers_of(attempt), self._note_headers())

    def hold_back(self) -> None:
        """Pause the engine's connection: too much waits for the caller."""
        if self.attempt is not None and self.attempt.connection is not None:
            self.attempt.connection.pause()

    def _note_headers(self) -> Headers:
        """Build the headers that tell the caller about attempts, engine and fallback."""
        attempt, context, notes = self.attempt, self._context, self._notes
        found = [(b"x-paceline-attempts", b"%d" % self._placement.num)]
        if attempt is None:
            return found
        upstream = attempt.endpoint.upstream
        found.append((b"x-paceline-engine", upstream.name.encode()))
        if ignored := upstream.dialect.ignored(context.path, context.body):
            found.append((b"x-paceline-ignored-fields", ignored.encode("ascii", "replace")))
        if "hedged" in notes:
            found.append((b"x-paceline-hedged", b"true"))
        if "prompt_engine" in notes:
            found.append((b"x-paceline-prompt-engine", notes["prompt_engine"].encode()))
        if "fallback" in notes:
            name = attempt.endpoint.model.encode("ascii", "backslashreplace")
            found.append((b"x-paceline-fallback", name))
        if "cascade" in notes:
            found.append((b"x-paceline-cascade", cascade_header(notes["cascade"])))
        return found

    async def flush(self, *, comments: bool = False) -> None:
        """Send what waits for the caller; returns once a slow caller has read enough.

        Args:
            comments: only comments wait to be sent; no engine is answering.
        """
        attempt = None if comments else self.attempt
        if not self.started:
            await self._start(200, _EVENTS if attempt is None else _headers_of(attempt))
        await self.send_waiting()
        if attempt is not None and attempt.connection is not None and attempt.verdict is None:
            attempt.connection.resume()

    async def _start(self, status: int, headers: Headers) -> None:
        await self.send_head(status, headers, self._note_headers())

    # ---------------------------------------------------------------- the wait for an engine

    async def unless_gone(self, what: Coroutine[Any, Any, _T], undo: Callable[[_T], None]) -> _T:
        """Await ``what`` unless the caller hangs up, which raises ClientDisconnectedError. On any
        error ``what`` is cancelled, and ``undo`` is called with a result that it had by then."""
        waiting = asyncio.ensure_future(what)
        try:
            await self._while_there(waiting)
        except BaseException:
            waiting.cancel()
            await asyncio.wait((waiting,))
            if not waiting.cancelled() and waiting.exception() is None:
                undo(waiting.result())
            raise
        return waiting.result()

    async def _while_there(self, waiting: asyncio.Future[Any]) -> None:
        context = self._context
        while not waiting.done():
            if self.gone:
                raise ClientDisconnectedError
            waking = asyncio.ensure_future(context.wake.wait())
            try:
                await asyncio.wait(
                    (waiting, waking), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waking.cancel()
            self.tick(context.now(), context.config.sse_keep_alive)
            if self.num_waiting:
                await self.flush(comments=True)

    # ---------------------------------------------------------------- ends

    def record_end(self, result: str) -> None:
        """Count and trace the end of the request; see ``GatewayMetrics.ended``."""
        context, attempt = self._context, self.attempt
        engine, status = (
            ("", 0) if attempt is None else (attempt.endpoint.upstream.name, attempt.status)
        )
        context.metrics.ended(engine, result, context.now() - context.arrived)
        context.trace.ended(result, status, self._notes)

    async def finish(self, attempt: Attempt) -> None:
        """Complete an answer that has arrived in full."""
        if attempt.streams:
            # an empty stream that ends in order is an answer, too
            if not self.started:
                await self._start(200, attempt.headers)
            await self.end()
        else:
            await self._whole(attempt)
        self.record_end("ok")

    async def _whole(self, attempt: Attempt) -> None:
        """Send an answer that is not a stream, in the API of the path."""
        path, status, headers, body = self._context.path, 200, attempt.headers, bytes(attempt.body)
        if attempt.status != 200:
            # an engine that lacks a field (501) is there
            is_down = attempt.status >= 500 and attempt.status != 501 and self._is_local
            told = 503 if is_down else attempt.status
            status = map_status(path, told)
            body = redacted_error(path, told, body, attempt.endpoint.upstream.key)
            headers = [header for header in headers if header[0] != b"content-type"]
            if is_down and not any(name == b"retry-after" for name, _ in headers):
                headers.append((b"retry-after", b"1"))
            headers.append((b"content-type", b"application/json"))
        elif self._notes or attempt.endpoint.model != self._context.model:
            body = _noted(body, self._context.model, self._notes)
        if self.started:
            # comments were sent meanwhile, so the body goes out as an event
            await self.end(b"data: " + body.replace(b"\n", b" ") + b"\n\n" + DONE)
            return
        await self.send_whole(status, headers, self._note_headers(), body)

    async def refuse(self, attempt: Attempt) -> None:
        """Pass the engine's refusal on. Raises HttpError if the gateway caused it."""
        name, status = attempt.endpoint.upstream.name, attempt.status
        if self.started:
            words = read_words(
                status, redacted(bytes(attempt.body), attempt.endpoint.upstream.key)
            ).message
            await self.break_off(f"engine {name} refused ({status})" + (words and f": {words}"))
            return
        self.record_end("refused")
        if meaning_of(status) == "account":
            # the engine refused the gateway's key or its credit, not the caller's
            what = "credit" if status == 402 else "credentials"
            raise self._unusable(f"engine {name} refused the gateway's {what}")
        if status < 400:
            raise self._unusable(f"engine {name} answered with status {status}")
        await self._whole(attempt)

    @property
    def _is_local(self) -> bool:
        """Whether the request may go to no cloud: without a local engine there is none for it."""
        return self._context.route.local_only

    def _unusable(self, why: str) -> HttpError:
        return HttpError(503, why, retry_after=1.0) if self._is_local else HttpError(502, why)

    async def give_up(self) -> None:
        """Report that no engine answered. Raises HttpError while a status can still be sent."""
        self.record_end("failed")
        tried = "; ".join(self._failures[-3:])
        failure = HttpError(
            503, f"no engine answered: {tried}", retry_after=self._retry_after or 1.0
        )
        if not self.started:
            raise failure
        await self._break(str(failure))

    async def break_off(self, why: str) -> None:
        """Send an error event and end the stream, which cannot go on."""
        self.record_end("broken")
        await self._break(why)

    async def _break(self, why: str) -> None:
        path, relay = self._context.path, self._relay
        assert relay is not None, "a stream was asked for"
        resumable, secret = False, ""
        if self.attempt is not None:
            endpoint = self.attempt.endpoint
            resumable = self._placement.can_resume(endpoint, endpoint)
            secret = endpoint.upstream.key
        event = redacted(relay.failure_event, secret)
        if not event or path in RESUMABLE:
            event = _broken_event(
                path,
                f"{why}, and the answer cannot be resumed",
                relay.num_output_tokens,
                "no other engine of this model" if resumable else "this engine cannot resume",
            )
        await self.end(event)


def cascade_header(note: Mapping[str, Any]) -> bytes:
    """Return a cascade's note as its header has it: ``small; model="s"; why="score"``."""
    told = [str(note["by"])]
    for name, value in note.items():
        if isinstance(value, str) and name != "by":
            bare = value.replace("\\", "").replace('"', "")
            told.append(f'{name}="{bare}"')
        elif name != "by":
            told.append(f"{name}={value}")
    return "; ".join(told).encode("ascii", "backslashreplace")


def _headers_of(attempt: Attempt) -> Headers:
    """Headers of a stream from ``attempt``; comments may start it before the engine has
    answered."""
    return attempt.headers if attempt.streams else _EVENTS


def _noted(body: bytes, model: str, note: Mapping[str, Any]) -> bytes:
    """Return a whole answer with the model's name as the caller knows it, and ``note``."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return body
    if "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    if note:
        fields["paceline"] = msgspec.Raw(msgspec.json.encode(note))
    return msgspec.json.encode(fields)


def _broken_event(path: str, why: str, num_tokens: int, resume: str) -> bytes:
    """Build the last events of a stream that breaks, in the API of the path."""
    if path == "/v1/messages":
        error: Mapping[str, Any] = {"type": "error", "error": {"type": "api_error", "message": why}}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    if path == "/v1/responses":
        error = {"type": "error", "code": "engine_failed", "message": why, "param": None}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    error = {
        "error": {
            "message": why,
            "type": "EngineLost",
            "param": None,
            "code": "engine_failed",
            "retryable": True,
            "emitted_tokens": num_tokens,
            "resume": {"possible": False, "why": resume},
        }
    }
    return b"data: " + msgspec.json.encode(error) + b"\n\n" + DONE
