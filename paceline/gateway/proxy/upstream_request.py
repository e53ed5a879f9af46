"""Request as it is sent to an engine: headers, and the body with the fields that its kind of engine
needs so that the answer can be resumed elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from paceline.gateway.observability.tracing import NO_TRACE
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.requests.body import PREDICT, new_seed
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.streams.openai_stream import StreamRelay
from paceline.gateway.upstreams.refusals import is_too_long
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.upstream import Headers, lines_of

__all__ = ["CHAT", "NO_FIELDS", "RESUMABLE", "UpstreamRequest", "takes_ids"]

CHAT: Final = "/v1/chat/completions"
# paths whose streams can be resumed
RESUMABLE: Final = frozenset({CHAT, "/v1/completions"})
NO_FIELDS: Final[Mapping[str, Any]] = {}
_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
# callers' headers that are passed on to engines
_REQUEST_HEADERS: Final = frozenset(
    {
        *_TRACE_HEADERS, b"anthropic-version", b"anthropic-beta", b"x-llm-d-slo-ttft-ms",
        b"x-llm-d-slo-tpot-ms", b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"x-llm-d-inference-ttl",
    }
)  # fmt: skip
# fields that the gateway adds, and leaves out if an engine's refusal names one of them
_OWN_FIELDS: Final = {
    name: re.compile(rb"\b(?:%b)\b" % words)
    for name, words in (
        ("stream_options", rb"stream_options|include_usage"),
        ("return_token_ids", rb"return_token_ids"),
        ("seed", rb"seed"),
        ("cache_salt", rb"cache_salt"),
        ("kv_source", rb"kv_source"),
    )
}
_MOST_ERROR_BYTES: Final = 64 * 1024
_OPENAI: Final = "api.openai.com"
# names of a chat's token limit, of which some engines know only one; and patterns in refusals
_CHAT_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_LIMIT_NAMES: Final = re.compile(rb"max_(completion_|output_|new_)?tokens")
_TOO_LARGE: Final = re.compile(rb"too large|at most|less than|valid range|maximum|must be <=", re.I)
# tokens that every engine can generate
_SMALL_CAP: Final = 512
_TENANT_HEADER: Final = b"x-llm-d-inference-fairness-id"


def takes_ids(endpoint: Endpoint) -> bool:
    """Whether an answer can be resumed there behind its token ids."""
    upstream = endpoint.upstream
    return upstream.facts.resumes and "return_token_ids" not in upstream.left_out(endpoint.model)


@dataclass(slots=True, eq=False)
class UpstreamRequest:
    """Upstream requests for one request of a caller."""

    context: RequestContext
    # relay of the streamed answer so far; None: it is not streamed
    relay: StreamRelay | None
    # seed of a request without one, so that each engine samples the same; None: none was needed
    _seed: int | None = None
    # engine that refused a limit -> the limit that it is asked for from then on
    _caps: dict[str, int] = field(default_factory=dict)
    # engine that was asked last, the output at that moment, and the engine that made the latest
    _asked: Upstream | None = None
    _tokens_before: int = 0
    _maker: Upstream | None = None

    def encode(
        self,
        endpoint: Endpoint,
        *,
        resumed: bool,
        left_out: frozenset[str] = frozenset(),
        added: Mapping[str, Any] = NO_FIELDS,
    ) -> bytes:
        """Return head and body. Raises RequestError for what the engine's API cannot express.

        Args:
            resumed: it continues behind what the relay has relayed.
            left_out: added fields to omit, in addition to those that the endpoint is known to
                refuse.
            added: fields for this one attempt.
        """
        self._note_maker(endpoint.upstream)
        changes = self._changes(endpoint, resumed=resumed)
        if changes:
            for name in (*left_out, *endpoint.upstream.left_out(endpoint.model)):
                changes.pop(name, None)
        return self._encoded(endpoint, {**changes, **added} if added else changes)

    def encode_prompt(
        self, endpoint: Endpoint, added: Mapping[str, Any], *, resumed: bool
    ) -> bytes:
        """Return the request for an engine whose answer no caller gets: it computes the prompt."""
        changes = {**self._changes(endpoint, resumed=resumed), **added}
        if "stream" in added and "max_completion_tokens" in {*changes, *self.context.body.fields}:
            changes["max_completion_tokens"] = 1
        return self._encoded(endpoint, changes)

    def _encoded(self, endpoint: Endpoint, changes: Mapping[str, Any]) -> bytes:
        body = endpoint.upstream.dialect.body(self.context.path, self.context.body, changes)
        stream = changes.get("stream", self.context.body.stream)
        head = self._head(endpoint, stream=stream)
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)

    def _note_maker(self, next_one: Upstream) -> None:
        """Note which engine has computed most: the last one that made output."""
        made = 0 if self.relay is None else self.relay.num_output_tokens
        if made > self._tokens_before:
            self._maker = self._asked
        self._asked, self._tokens_before = next_one, made

    def refused(
        self, endpoint: Endpoint, status: int, error: bytes, *, resumed: bool
    ) -> frozenset[str]:
        """Return the added fields that an engine's refusal names."""
        if status not in (400, 422):
            return frozenset()
        added = self._changes(endpoint, resumed=resumed).keys() - endpoint.upstream.left_out(
            endpoint.model
        )
        error = error[:_MOST_ERROR_BYTES]
        return frozenset(
            name for name in _OWN_FIELDS.keys() & added if _OWN_FIELDS[name].search(error)
        )

    def _head(self, endpoint: Endpoint, *, stream: bool) -> bytes:
        """Return the head without its last header."""
        incoming, upstream = self.context.incoming, endpoint.upstream
        target = upstream.dialect.target(self.context.path, endpoint.model)
        accept = b"text/event-stream" if stream else b"application/json"
        # the attempt adds its own trace headers
        own = () if self.context.trace is NO_TRACE else _TRACE_HEADERS
        found: Headers = []
        if not _REQUEST_HEADERS.isdisjoint(incoming.headers):
            found = [
                header
                for header in incoming.scope["headers"]
                if header[0] in _REQUEST_HEADERS and header[0] not in own
            ]
        start = upstream.start_of(target, accept)
        if found:
            # the caller's API version takes precedence over the engine's default
            said = {name for name, _ in found}
            found += [header for header in upstream.headers() if header[0] not in said]
            common = [(b"content-type", b"application/json"), (b"accept", accept)]
            start = upstream.pool.origin.start("POST", target, common)
            start += lines_of(found)
        start = b"%bx-request-id: %b\r\n" % (start, incoming.request_id.encode())
        if incoming.tenant and upstream.kind == "paceline":
            start = b"%b%b: %b\r\n" % (start, _TENANT_HEADER, incoming.tenant.encode())
        return start

    def _changes(self, endpoint: Endpoint, *, resumed: bool) -> dict[str, Any]:
        """Return the fields that differ from the caller's."""
        body, facts = self.context.body, endpoint.upstream.facts
        changes: dict[str, Any] = {}
        if "model" not in body.fields or endpoint.model != body.model:
            changes["model"] = endpoint.model
        limits = {} if body.cap is None else self._limits(endpoint, body.cap)
        changes |= limits
        if self.context.salt and facts.salts:
            changes["cache_salt"] = self.context.salt
        if self.context.path in RESUMABLE:
            has_ids = takes_ids(endpoint)
            if body.stream and not body.include_usage:
                changes["stream_options"] = {**body.stream_options(), "include_usage": True}
            if body.stream and has_ids and not body.resumed:
                changes["return_token_ids"] = True
            if has_ids and body.seed is None:
                changes["seed"] = self._seed = self._seed or new_seed()
        if resumed:
            assert self.relay is not None, "a stream is resumed"
            ids = self.relay.resume_ids()
            if ids is not None and takes_ids(endpoint):
                changes["resume_output_ids"] = ids[0] if len(ids) == 1 else ids
                source = None if self._maker is None else self._maker.kv_source
                if source is not None and endpoint.upstream.capabilities.kv is not None:
                    changes["kv_source"] = source
            else:
                changes |= self._behind_text(self.relay, limits)
        return changes

    def _limits(self, endpoint: Endpoint, most: int) -> dict[str, int]:
        """Return fields that keep an answer within its reservation, ``most``; none if the engine's
        context is tighter."""
        body, context = self.context.body, endpoint.max_model_len
        if context is not None and most >= context - body.prompt_tokens:
            return {}
        cap = min(most, self._caps.get(endpoint.upstream.name, most))
        told = {known: cap for known in body.limits if body.limits[known] < 0}
        if body.limits.get(PREDICT, 0) > cap:
            told[PREDICT] = cap
        return {**told, self._limit_name(endpoint.upstream): cap}

    def _limit_name(self, upstream: Upstream) -> str:
        if self.context.path == "/v1/responses":
            return "max_output_tokens"
        if self.context.path != CHAT:
            return "max_tokens"
        # some of their models only know the new name
        is_new = upstream.kind == "azure" or upstream.pool.origin.host == _OPENAI
        return upstream.limit_name or ("max_completion_tokens" if is_new else "max_tokens")

    def eases(self, endpoint: Endpoint, status: int, body: bytes) -> bool:
        """Whether the engine refused a limit that the gateway added, and should be asked again: by
        the limit's other name, which is remembered, or for less."""
        cap, name = self.context.body.cap, endpoint.upstream.name
        limits = {} if cap is None else self._limits(endpoint, cap)
        if not limits or name in self._caps or status not in (400, 422):
            return False
        if not (_LIMIT_NAMES.search(body) or is_too_long(status, body)):
            return False
        used = self._limit_name(endpoint.upstream)
        others = [each for each in _CHAT_LIMITS if each != used and each.encode() in body]
        is_unknown = used.encode() in body and not _TOO_LARGE.search(body)
        self._caps[name] = limits[used]
        if self.context.path == CHAT and (others or is_unknown):
            endpoint.upstream.learn_limit_name(
                others[0] if others else _CHAT_LIMITS[used == _CHAT_LIMITS[0]]
            )
        else:
            self._caps[name] = min(limits[used], _SMALL_CAP)
        return True

    def _behind_text(self, relay: StreamRelay, limits: dict[str, int]) -> dict[str, Any]:
        """Return the fields of a chat that is resumed behind its text."""
        body = self.context.body
        messages = msgspec.json.decode(body.fields["messages"], type=list[msgspec.Raw])
        said = {"role": "assistant", "content": relay.partial_text()}
        changes: dict[str, Any] = {
            "messages": [*messages, said],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        # reduce each limit, as engines use one or another; a negative one means none
        for name, most in {**body.limits, **limits}.items():
            if most >= 0:
                changes[name] = max(1, most - relay.num_parts)
        if body.seed is not None:
            # the same seed would repeat the beginning's draws
            changes["seed"] = (body.seed + relay.num_parts) % (1 << 31)
        return changes
