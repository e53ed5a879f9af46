"""One attempt: a request at one engine, whose bytes are handled in the callback that read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from paceline.gateway.observability.tracing import NO_ATTEMPT, AttemptTrace
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.upstream_request import RESUMABLE
from paceline.gateway.proxy.verdict import Verdict, outcome_of
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.gateway.upstreams.dialects import Translator
from paceline.gateway.upstreams.refusals import cooldown_of, refusal_in
from paceline.http.fields import is_plain
from paceline.http.sse import SSE
from paceline.http.upstream import ConnectError, Connection, Headers, lines_of
from paceline.routing import Dispatch
from paceline.statuses import retry_of

__all__ = ["Attempt", "AttemptOwner"]

# size of an answer that is not streamed
_MAX_ANSWER_BYTES: Final = 64 << 20
_SSE: Final = SSE.encode()
_LAST_STATUS: Final = 599
# paths that answer with events if a stream is requested
_STREAMED: Final = RESUMABLE | {"/v1/responses", "/v1/messages"}


class AttemptOwner(Protocol):
    """Owner of an attempt: ``ProxiedRequest``."""

    # send a part to the caller; ``write_last`` also ends the answer
    write: Callable[[bytes], None]
    write_last: Callable[[bytes], None]

    @property
    def context(self) -> RequestContext: ...
    @property
    def relay(self) -> StreamRelay | None:
        """Relay of the streamed answer; None: it is not streamed."""
        ...

    def first_token(self, now: float) -> None: ...
    def spare_spoke(self, attempt: Attempt) -> None:
        """Note that the hedge has output."""
        ...

    def tick(self, now: float) -> None: ...

    def may_leave(self, attempt: Attempt) -> bool:
        """Whether the attempt may leave an engine that gives no sign of life."""
        ...

    def may_move(self, attempt: Attempt) -> bool:
        """Whether another engine can go on with the request, token for token."""
        ...

    def again(
        self, attempt: Attempt, left_out: frozenset[str]
    ) -> tuple[bytes, frozenset[str]] | None:
        """Return the request without added fields that the engine refused, and their names; None if
        the refusal names none beyond ``left_out``."""
        ...


class Attempt:
    """A request at one engine: the sink of its answer.

    Args:
        hedge_relay: set for a hedge (``hedging``). Its output is kept, and fed to this relay to
            find the first token, until the hedge is adopted.
    """

    def __init__(
        self,
        request: AttemptOwner,
        endpoint: Endpoint,
        dispatch: Dispatch,
        hedge_relay: StreamRelay | None = None,
    ) -> None:
        context, now = request.context, request.context.now()
        self.endpoint = endpoint
        self.status = 0
        self.headers: Headers = []
        self.body: bytes | bytearray = b""
        self.verdict: Verdict | None = None
        self.connection: Connection | None = None
        # ended through no fault of the engine
        self.was_abandoned = False
        self._owner, self._context = request, context
        self._upstream = endpoint.upstream
        self._standing = endpoint.upstream.standings.of(endpoint.model, now)
        # no connection, or no sign of life: the failure is the engine's, not the model's
        self._is_of_engine = False
        self._dispatch = dispatch
        # the engine answers with events
        self.streams = False
        # times of the last part of the answer, and of the last bytes of any kind
        self._heard_at = self._sign_at = now
        # the connection's ``num_reads`` at the last tick
        self._num_reads = 0
        # a part of the answer came since the last tick. Comments, pings and framing do not count:
        # they show that the connection lives, not that the engine works on this request
        self._has_moved = False
        relay = request.relay
        self._tokens_before = 0 if relay is None else relay.num_output_tokens
        self._request = b""
        # fields that the gateway added and the engine refused
        self._left_out: frozenset[str] = frozenset()
        self._connecting: asyncio.Task[None] | None = None
        self._path = context.path
        self._translator: Translator | None = None
        self._trace: AttemptTrace = NO_ATTEMPT
        self._hedge_relay = hedge_relay
        self._kept = bytearray()
        # takes a part of the answer; set by the kind of answer. See ``upstream.Sink``
        self.on_data: Callable[[bytes], None] = self._keep_whole

    @property
    def is_answer(self) -> bool:
        """Whether the engine answered completely."""
        return self.status == 200 and self.verdict is not None and self.verdict.kind == "done"

    @property
    def cached_tokens(self) -> float:
        """Tokens of the prompt that the engine is thought to have had in its cache."""
        return self._dispatch.view.cached_tokens

    @property
    def is_final(self) -> bool:
        """Whether the refusal is final: any other engine would refuse the request as well."""
        should = dict(self.headers).get(b"x-should-retry", b"").decode("latin-1").lower()
        refused = self.verdict is not None and self.verdict.kind == "refused"
        return refused and retry_of(self.status, should) == "nowhere"

    def send(self, request: bytes) -> None:
        """Send the request on an open or a new connection; a failure becomes the verdict."""
        upstream, context = self._upstream, self._context
        now = context.now()
        upstream.running.add(self)
        upstream.breaker.begin(now)
        self._standing.begin(self._path, now)
        hedge = self._hedge_relay is not None
        self._trace = context.trace.attempt(self.endpoint, self._tokens_before, hedge, now)
        self._ask(request)

    def _ask(self, request: bytes) -> None:
        if self._trace is not NO_ATTEMPT:
            # before the request's own headers
            line, end, rest = request.partition(b"\r\n")
            request = line + end + lines_of(self._trace.headers()) + rest
        self._request = request
        connection = self._upstream.pool.free()
        if connection is None:
            self._connecting = asyncio.ensure_future(self._send_on_new())
        else:
            self._send_on(connection)

    async def _send_on_new(self) -> None:
        try:
            connection = await self._upstream.pool.connect()
        except ConnectError as error:
            self._connecting = None
            self._is_of_engine = True
            self._end(Verdict("lost", str(error)))
            return
        self._connecting = None
        if self.verdict is not None:
            connection.drop()
            return
        self._send_on(connection)

    def _send_on(self, connection: Connection) -> None:
        self.connection = connection
        connection.send(self._request, self)
        # also of a hedge: its engine computes the prefix, too
        self._upstream.load.prefixes.add(self._context.demand.prefix)

    # ---------------------------------------------------------------- Sink

    def on_head(self, status: int, headers: Headers) -> None:
        self._upstream.alive()
        self.status, self.headers = status, headers
        found = dict(headers)
        encoding = found.get(b"content-encoding")
        if encoding is not None and not is_plain(encoding.decode("latin-1")):
            # no compression was requested, and the data could unpack to any size
            self.give_up("the answer is compressed")
            return
        if not 200 <= status <= _LAST_STATUS:
            # such a status cannot be passed on
            self.give_up(f"status {status}, which HTTP does not define")
            return
        if status == 200 and self._left_out:
            self._upstream.leave_out(self.endpoint.model, self._left_out)
        # an answer is relayed as it is if no stream was asked for, or if the engine sent none
        if status == 200 and self._owner.relay is not None:
            kind = found.get(b"content-type", _SSE).lower()
            self.streams = kind.startswith(_SSE)
            other = not self.streams and not kind.startswith(b"application/json")
            if other and self._path in _STREAMED:
                shown = found[b"content-type"].decode("latin-1")[:100]
                self.give_up(f"expected a stream, and the answer is {shown!r}")
                return
        if self.streams:
            self._translator = self._upstream.dialect.translator(self._path)
            plain = self._translator is None and self._hedge_relay is None
            self.on_data = self._relay_stream if plain else self._take_stream
        self._heard_at = self._sign_at = self._context.now()

    def _keep_whole(self, data: bytes) -> None:
        self._has_moved = True
        if not self.body:
            # most answers come in one read
            self.body = data
            return
        if type(self.body) is bytes:
            self.body = bytearray(self.body)
        self.body += data
        if len(self.body) > _MAX_ANSWER_BYTES:
            self.give_up(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")

    def _take_stream(self, data: bytes) -> None:
        if self._translator is None:
            self._take_events(data)
            return
        events: list[bytes] = []
        wrong = ""
        try:
            for event in self._translator.feed(data):
                events.append(event)
        except (ValueError, msgspec.MsgspecError) as error:
            wrong = f"the stream does not follow its API: {str(error)[:100]}"
        if self._translator.is_in_long:
            self._has_moved = True
        self._take_events(b"".join(events))
        # after a refusal the rest of the stream does not matter
        if wrong and self.streams:
            self.give_up(wrong)

    def _take_events(self, data: bytes) -> None:
        if self._hedge_relay is None:
            self._relay_stream(data)
            return
        self._kept += data
        parts = self._hedge_relay.num_events
        self._hedge_relay.feed(data)
        if self._hedge_relay.num_events != parts or self._hedge_relay.is_in_long:
            self._has_moved = True
        if self._hedge_relay.failed is not None:
            self._fail_by(self._hedge_relay, self._hedge_relay.failed)
        elif self._hedge_relay.emitted or self._hedge_relay.done:
            self._owner.spare_spoke(self)

    def adopt(self) -> None:
        """Answer the request from now on: send the output kept so far to the caller."""
        assert self._owner.relay is not None, "a stream was asked for"
        self._hedge_relay = None
        if self.streams and self._translator is None and self.verdict is None:
            self.on_data = self._relay_stream
        self._owner.relay.begin_attempt()
        kept, self._kept = bytes(self._kept), bytearray()
        if kept:
            self._relay_stream(kept)

    def _relay_stream(self, data: bytes) -> None:
        owner = self._owner
        relay = owner.relay
        assert relay is not None, "a stream was asked for"
        out = relay.relay_event(data)
        if out is not None:
            # nearly all parts take this path
            self._has_moved = True
            owner.write(out)
            return
        parts = relay.num_events
        out = relay.feed(data)
        if out:
            is_last = relay.done and relay.failed is None
            (owner.write_last if is_last else owner.write)(out)
        if relay.num_events != parts or relay.is_in_long:
            self._has_moved = True
        # of a stream that goes on the role may come ahead of the first token
        has_first = relay.emitted and (
            not self._tokens_before or relay.num_output_tokens > self._tokens_before
        )
        if self._dispatch.first_at is None and has_first:
            now = self._context.now()
            self._dispatch.first_token(now)
            self._trace.first_token(now)
            owner.first_token(now)
        if relay.failed is not None:
            self._fail_by(relay, relay.failed)
        elif relay.done:
            self._end(Verdict("done"))

    def _fail_by(self, relay: StreamRelay, why: str) -> None:
        """End the stream with its error. Some engines refuse a request in its stream: before any
        output, that counts like a status."""
        refusal = None if relay.emitted else refusal_in(relay.failure_event)
        if refusal is None or self.connection is None:
            self.give_up(why)
            return
        self.connection.drop()
        self.status, self.body = refusal
        self.streams = False
        relay.begin_attempt()
        self._refuse()

    def on_end(self) -> None:
        self._upstream.alive()
        if self.verdict is not None:
            return
        if self.streams:
            self._finish_stream("the stream ended")
        elif self.status == 200:
            self._finish_whole()
        else:
            self._refuse()

    def _refuse(self) -> None:
        """Handle a refusal. If it concerns a field that the gateway added, nothing was computed:
        the retry without that field is not an attempt of its own."""
        again = self._owner.again(self, self._left_out)
        if again is None:
            self._end(Verdict("refused", f"status {self.status}"))
            return
        request, self._left_out = again
        self.status, self.headers, self.body = 0, [], b""
        self._kept.clear()
        self.on_data = self._keep_whole
        self.connection, self._num_reads = None, 0
        self._heard_at = self._sign_at = self._context.now()
        self._ask(request)

    def on_lost(self, why: str) -> None:
        if self.verdict is not None:
            return
        connection = self.connection
        if connection is not None and not connection.begun and connection.is_used:
            # the engine closed the idle connection just as it was reused: not an attempt of its own
            self._connecting = asyncio.ensure_future(self._send_on_new())
            return
        if self.streams:
            self._finish_stream(why)
        else:
            self._end(Verdict("lost", why))

    def _finish_whole(self) -> None:
        try:
            self.body = self._upstream.dialect.answer(self._path, bytes(self.body))
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self.give_up(f"the answer does not follow its API: {str(error)[:100]}")
        else:
            self._end(Verdict("done"))

    def _finish_stream(self, why: str) -> None:
        if not self._is_said():
            relay = self._owner.relay if self._hedge_relay is None else None
            self._end(Verdict("lost", (relay and relay.failed) or why))

    def _is_said(self) -> bool:
        """Whether a stream that ended early had sent its whole answer. If so, the attempt is done,
        and later errors do not matter."""
        relay = self._owner.relay
        if not self.streams or self._hedge_relay is not None or relay is None:
            return False
        out = relay.end_attempt()
        if out:
            self._owner.write(out)
        if relay.done:
            self._end(Verdict("done"))
        return relay.done

    # ---------------------------------------------------------------- Running

    def tick(self, now: float) -> bool:
        connection = self.connection
        new = 0 if connection is None else connection.num_reads - self._num_reads
        if self._has_moved or (connection is not None and connection.is_paused):
            # a caller that reads slowly has paused the connection: the engine is not stalled
            self._heard_at = self._sign_at = now
        elif new:
            self._sign_at = now
        self._num_reads += new
        self._has_moved = False
        if why := self._stalled(now):
            self.give_up(why)
        else:
            self._owner.tick(now)
        return new > 0

    def _stalled(self, now: float) -> str:
        """Return why the attempt has stalled; empty while it has time left."""
        config = self._context.config
        limit = config.stall_timeout
        if not self.status or (self.streams and not self._dispatch.first_at):
            limit = config.first_byte_timeout
        elif self.streams:
            reader = self._translator or self._owner.relay
            if reader is not None and reader.between_parts:
                if now - self._sign_at > limit:
                    return f"no part of the answer and no ping for {limit:g} s"
                # between content blocks the engine may think or run a tool and send only pings:
                # allow it ``first_byte_timeout``
                limit = max(config.first_byte_timeout, limit)
        return f"no part of the answer for {limit:g} s" if now - self._heard_at > limit else ""

    def engine_gone(self, why: str) -> bool:
        """Give a silent engine up, unless it was asked only a moment ago; see ``Running``."""
        waited = self._context.now() - self._sign_at
        config = self._context.config
        if waited <= config.liveness_timeout or not (
            waited > config.stall_timeout or self._owner.may_leave(self)
        ):
            return False
        self._is_of_engine = True
        self.give_up(why)
        return True

    def move_on(self, why: str) -> bool:
        """Leave the engine if another one can go on; see ``Running``."""
        if self.verdict is not None or not self._owner.may_move(self):
            return False
        if not self._is_said():
            self._end(Verdict("moved", why))
        elif self.connection is not None:
            self.connection.drop()
        return True

    def leave(self, why: str) -> None:
        """Leave the engine, which is not at fault and cannot answer: another one begins anew."""
        if self.verdict is None:
            self._end(Verdict("moved", why))

    # ---------------------------------------------------------------- ends

    def give_up(self, why: str) -> None:
        """End the attempt through the engine's fault, unless the whole answer was sent."""
        if self.verdict is not None:
            return
        if not self._is_said():
            self._end(Verdict("lost", why))
        elif self.connection is not None:
            self.connection.drop()

    def abandon(self) -> None:
        """End the attempt without fault: the caller is gone, or another engine answered."""
        if self.verdict is None:
            self.was_abandoned = True
            self._end(None)

    def _end(self, verdict: Verdict | None) -> None:
        if self.verdict is not None:
            return
        now = self._context.now()
        upstream = self._upstream
        self.verdict = verdict or Verdict("lost", "abandoned")
        self.on_data = _drop
        upstream.running.discard(self)
        if self._connecting is not None:
            self._connecting.cancel()
        relay = self._owner.relay
        made = 0
        if relay is not None and self._hedge_relay is None:
            made = relay.num_output_tokens - self._tokens_before
        self._dispatch.end(now, made)
        self._trace.end("abandoned" if verdict is None else verdict.kind, self.status, made, now)
        self._count(verdict, now)
        if self.connection is not None and (verdict is None or verdict.kind in ("lost", "moved")):
            self.connection.drop()
        self._context.wake.set()

    def _count(self, verdict: Verdict | None, now: float) -> None:
        """Inform the breakers of engine and model; note a cooldown that was asked for."""
        upstream, standing = self._upstream, self._standing
        # an engine that gave no more sign has failed, even where its answer was whole by then
        if verdict is not None and verdict.kind == "done" and not self._is_of_engine:
            upstream.breaker.succeed(now)
            standing.end(self._path, "ok", now)
            return
        if verdict is not None and self._is_of_engine and self.connection is None:
            upstream.breaker.fail(now)
        elif self.status and not self._is_of_engine:
            upstream.breaker.succeed(now)
        else:
            upstream.breaker.abandon()
        if verdict is not None and verdict.kind == "refused":
            standing.cool_down(now + cooldown_of(self.status, self.headers))
        outcome = outcome_of(
            verdict, self.status, self.headers, of_engine=self._is_of_engine,
            names_stored=self._context.names_stored,
            cooling_down=standing.cooldown_left(now) > 0.0,
        )  # fmt: skip
        if outcome in ("failed", "missing") or (verdict is not None and self._is_of_engine):
            upstream.note_failure(now)
        standing.end(self._path, outcome, now)


def _drop(data: bytes) -> None:
    """Ignore data of an attempt that is over."""
