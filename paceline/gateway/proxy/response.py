"""Response to the caller of one request: head with notes, flushing of what waits, and every way in
which a request can end.

This module does not know which engines are asked, or when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from paceline.gateway.observability.metrics import GatewayMetrics
from paceline.gateway.observability.tracing import Trace
from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.caller import broken_event
from paceline.gateway.proxy.downstream import Downstream, DownstreamRequest
from paceline.gateway.proxy.retry_state import RetryState
from paceline.gateway.proxy.upstream_request import RESUMABLE, UpstreamRequest
from paceline.gateway.requests.body import Body
from paceline.gateway.streams.openai_stream import DONE, StreamRelay
from paceline.gateway.upstreams.dialects import map_status, read_words
from paceline.gateway.upstreams.refusals import redacted, redacted_error, retry_after
from paceline.http.errors import HttpError
from paceline.http.sse import SSE
from paceline.http.upstream import Headers
from paceline.statuses import meaning_of

__all__ = ["Response"]

# headers of a stream before its engine has sent any
_EVENTS: Final = [(b"content-type", SSE.encode())]


class Response:
    """Response to one request. Its owner names the attempt with ``comes_from``, then calls exactly
    one of ``finish``, ``refuse``, ``give_up`` and ``break_off``.

    Args:
        asked: the model's name as the caller knows it.
        relay: relay of the streamed answer; None: it is not streamed.
        note: what was done to the answer, for its headers and, by the relay, its last chunk.
        now: clock, monotonic seconds.
        wake: set when there is something to flush, or the caller is gone.
    """

    def __init__(
        self,
        path: str,
        body: Body,
        asked: str,
        incoming: DownstreamRequest,
        relay: StreamRelay | None,
        upstream_request: UpstreamRequest,
        retries: RetryState,
        note: dict[str, Any],
        metrics: GatewayMetrics,
        trace: Trace,
        now: Callable[[], float],
        arrived: float,
        wake: asyncio.Event,
    ) -> None:
        self.downstream = Downstream(
            incoming, stream=body.stream, wake=wake, source=self, now=arrived
        )
        self._path, self._body, self._asked = path, body, asked
        self._relay, self._upstream_request, self._retries = relay, upstream_request, retries
        self._note, self._metrics, self._trace = note, metrics, trace
        self._now, self._arrived = now, arrived
        self._attempt: Attempt | None = None
        self._failures: list[str] = []
        self._retry_after: float | None = None

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that answers; None: no engine was asked."""
        return self._attempt

    def comes_from(self, attempt: Attempt) -> None:
        """Take the answer from ``attempt`` from now on."""
        self._attempt = attempt

    def close(self) -> None:
        """Drop references once the request is over. See ``ProxiedRequest.close``."""
        self._attempt = None
        self.downstream.close()

    def note(self, **what: Any) -> None:
        """Record something done to the answer that the caller may want to know."""
        self._note |= what

    def failed(self, attempt: Attempt) -> None:
        """Record a failed attempt; the caller hears of it only if no other attempt succeeds."""
        assert attempt.verdict is not None, "the attempt is over"
        self._failures.append(f"{attempt.endpoint.upstream.name}: {attempt.verdict.why}")
        if attempt.verdict.kind == "refused":
            wait = retry_after(attempt.headers)
            if wait is not None:
                self._retry_after = min(wait, self._retry_after or wait)

    # ---------------------------------------------------------------- DownstreamSource

    def head(self) -> tuple[Headers, Headers] | None:
        """Return the headers of a stream that starts now; None: no engine is answering."""
        attempt = self._attempt
        return None if attempt is None else (_headers_of(attempt), self._notes())

    def hold_back(self) -> None:
        """Pause the engine's connection: too much waits for the caller."""
        if self._attempt is not None and self._attempt.connection is not None:
            self._attempt.connection.pause()

    def _notes(self) -> Headers:
        return _note_headers(self._attempt, self._path, self._body, self._retries.num, self._note)

    async def flush(self, *, comments: bool = False) -> None:
        """Send what waits for the caller; returns once a slow caller has read enough.

        Args:
            comments: only comments wait to be sent; no engine is answering.
        """
        attempt = None if comments else self._attempt
        if not self.downstream.started:
            await self._start(200, _EVENTS if attempt is None else _headers_of(attempt))
        await self.downstream.flush()
        if attempt is not None and attempt.connection is not None and attempt.verdict is None:
            attempt.connection.resume()

    async def _start(self, status: int, headers: Headers) -> None:
        await self.downstream.start(status, headers, self._notes())

    # ---------------------------------------------------------------- ends

    def ended(self, result: str) -> None:
        """Count and trace the end of the request; see ``GatewayMetrics.ended``."""
        attempt = self._attempt
        engine, status = (
            ("", 0) if attempt is None else (attempt.endpoint.upstream.name, attempt.status)
        )
        self._metrics.ended(engine, result, self._now() - self._arrived)
        self._trace.ended(result, status, self._note)

    async def finish(self, attempt: Attempt) -> None:
        """Complete an answer that has arrived in full."""
        if attempt.streams:
            # an empty stream that ends in order is an answer, too
            if not self.downstream.started:
                await self._start(200, attempt.headers)
            await self.downstream.end()
        else:
            await self._whole(attempt)
        self.ended("ok")

    async def _whole(self, attempt: Attempt) -> None:
        """Send an answer that is not a stream."""
        status, headers, body = _whole_answer(attempt, self._path, self._asked, self._note)
        if self.downstream.started:
            # comments were sent meanwhile, so the body goes out as an event
            await self.downstream.end(b"data: " + body.replace(b"\n", b" ") + b"\n\n" + DONE)
            return
        await self.downstream.whole(status, headers, self._notes(), body)

    async def refuse(self, attempt: Attempt) -> None:
        """Pass the engine's refusal on. Raises HttpError if the gateway caused it."""
        name, status = attempt.endpoint.upstream.name, attempt.status
        if self.downstream.started:
            words = read_words(
                status, redacted(bytes(attempt.body), attempt.endpoint.upstream.key)
            ).message
            await self.break_off(f"engine {name} refused it ({status})" + (words and f": {words}"))
            return
        self.ended("refused")
        if meaning_of(status) == "account":
            # the engine refused the gateway's key or its credit, not the caller's
            what = "credit" if status == 402 else "credentials"
            raise HttpError(502, f"engine {name} refused the gateway's {what}")
        if status < 400:
            raise HttpError(502, f"engine {name} answered with status {status}")
        await self._whole(attempt)

    async def give_up(self) -> None:
        """Report that no engine answered. Raises HttpError while a status can still be sent."""
        self.ended("failed")
        tried = "; ".join(self._failures[-3:])
        failure = HttpError(
            503, f"no engine answered: {tried}", retry_after=self._retry_after or 1.0
        )
        if not self.downstream.started:
            raise failure
        await self._break(str(failure))

    async def break_off(self, why: str) -> None:
        """Send an error event and end the stream, which cannot go on."""
        self.ended("broken")
        await self._break(why)

    async def _break(self, why: str) -> None:
        relay = self._relay
        assert relay is not None, "a stream was asked for"
        resumable, secret = False, ""
        if self._attempt is not None:
            endpoint = self._attempt.endpoint
            resumable, secret = (
                self._upstream_request.can_resume(endpoint, endpoint),
                endpoint.upstream.key,
            )
        event = redacted(relay.failure_event, secret)
        if not event or self._path in RESUMABLE:
            event = broken_event(
                self._path,
                f"{why}, and the answer cannot go on elsewhere",
                relay.num_output_tokens,
                "no other engine of this model" if resumable else "this engine's kind cannot",
            )
        await self.downstream.end(event)


def _headers_of(attempt: Attempt) -> Headers:
    """Headers of a stream from ``attempt``; comments may start it before the engine has
    answered."""
    return attempt.headers if attempt.streams else _EVENTS


def _note_headers(
    attempt: Attempt | None, path: str, body: Body, attempts: int, note: Mapping[str, Any]
) -> Headers:
    """Build the headers that tell the caller about attempts, engine and fallback.

    Args:
        attempt: the attempt that answers; None: no engine was asked.
        note: what was done to the answer.
    """
    found = [(b"x-paceline-attempts", b"%d" % attempts)]
    if attempt is None:
        return found
    upstream = attempt.endpoint.upstream
    found.append((b"x-paceline-engine", upstream.name.encode()))
    if ignored := upstream.dialect.ignored(path, body):
        found.append((b"x-paceline-ignored-fields", ignored.encode("ascii", "replace")))
    if "hedged" in note:
        found.append((b"x-paceline-hedged", b"true"))
    if "fallback" in note:
        name = attempt.endpoint.model.encode("ascii", "backslashreplace")
        found.append((b"x-paceline-fallback", name))
    return found


def _whole_answer(
    attempt: Attempt, path: str, model: str, note: Mapping[str, Any]
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of an answer that is not a stream, in the API of ``path``.

    Args:
        model: its name as the caller knows it.
    """
    body = bytes(attempt.body)
    if attempt.status == 200:
        return 200, attempt.headers, _noted(body, attempt, model, note)
    body = redacted_error(path, attempt.status, body, attempt.endpoint.upstream.key)
    headers = [header for header in attempt.headers if header[0] != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    return map_status(path, attempt.status), headers, body


def _noted(body: bytes, attempt: Attempt, model: str, note: Mapping[str, Any]) -> bytes:
    if attempt.endpoint.model == model and not note:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return body
    if "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    if note:
        fields["paceline"] = msgspec.Raw(msgspec.json.encode(note))
    return msgspec.json.encode(fields)
