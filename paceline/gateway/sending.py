"""What of a request is sent to an engine: headers, and the body with what that kind of engine needs
so that the answer can go on elsewhere."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from paceline.gateway.bodies import PREDICT, Body, new_seed
from paceline.gateway.caller import Caller
from paceline.gateway.engine import Engine
from paceline.gateway.refusals import is_too_long
from paceline.gateway.routes import Site
from paceline.gateway.splice import Splice
from paceline.gateway.tracing import NO_TRACE
from paceline.http.upstream import Headers, lines_of

__all__ = ["CHAT", "RESUMABLE", "Sending"]

CHAT: Final = "/v1/chat/completions"
# endpoints whose streams can go on behind what was made
RESUMABLE: Final = frozenset({CHAT, "/v1/completions"})
# of a chat that text cannot go on behind: it says how the rest has to look
_BOUND_TO_TOKENS: Final = (
    "tools", "response_format", "logprobs", "structured_outputs", "guided_json", "guided_regex",
    "continue_final_message",
)  # fmt: skip
_TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
# of callers that engines get
_REQUEST_HEADERS: Final = frozenset(
    {
        *_TRACE_HEADERS,
        b"anthropic-version",
        b"anthropic-beta",
        b"x-llm-d-slo-ttft-ms",
        b"x-llm-d-slo-tpot-ms",
        b"x-slo-ttft-ms",
        b"x-slo-tpot-ms",
        b"x-llm-d-inference-ttl",
    }
)
# fields that the gateway adds by itself, and leaves out where an engine's refusal names one of them
_OWN_FIELDS: Final = {
    name: re.compile(rb"\b(?:%b)\b" % words)
    for name, words in (
        ("stream_options", rb"stream_options|include_usage"),
        ("return_token_ids", rb"return_token_ids"),
        ("seed", rb"seed"),
        ("cache_salt", rb"cache_salt"),
    )
}
_MOST_ERROR_BYTES: Final = 64 * 1024
_OPENAI: Final = "api.openai.com"
# names of the limit of an answer in a chat, of which some engines know one; and in a refusal
_CHAT_LIMITS: Final = ("max_tokens", "max_completion_tokens")
_LIMIT_NAMES: Final = re.compile(rb"max_(completion_|output_|new_)?tokens")
_TOO_LARGE: Final = re.compile(rb"too large|at most|less than|valid range|maximum|must be <=", re.I)
# tokens that every engine makes
_SMALL_CAP: Final = 512
_TENANT_HEADER: Final = b"x-llm-d-inference-fairness-id"


def _resumes(site: Site) -> bool:
    """Whether an answer can go on there behind the ids of its tokens."""
    engine = site.engine
    return engine.facts.resumes and "return_token_ids" not in engine.left_out(site.model)


class Sending:
    """Of one request.

    Args:
        splice: what came of its answer so far; None: it is not streamed.
    """

    def __init__(self, path: str, body: Body, caller: Caller, splice: Splice | None) -> None:
        self._path, self._body, self._caller, self._splice = path, body, caller, splice
        self._seed = new_seed() if body.seed is None else None
        # by engine that has refused a limit, the one that it is asked for then
        self._caps: dict[str, int] = {}

    def can_go_on(self, site: Site, before: Site) -> bool:
        """Whether a stream that broke at ``before`` can be resumed at ``site``: the same model, and
        a kind that takes the ids of what was made, or its text where that will do."""
        body, splice = self._body, self._splice
        if (
            self._path not in RESUMABLE
            or splice is None
            or body.num_prompts != 1
            or body.resumed
            or body.fields.get("echo") == b"true"
            or site.model != before.model
            or site.tier != before.tier
        ):
            return False
        if self.exactly(site):
            return True
        return (
            site.engine.facts.continues
            and body.fields.get("messages", b"").startswith(b"[")
            and splice.partial_text() is not None
            and not any(
                body.fields.get(name, b"null") not in (b"null", b"false")
                for name in _BOUND_TO_TOKENS
            )
        )

    def exactly(self, site: Site) -> bool:
        """Whether it would go on there token for token."""
        splice = self._splice
        return _resumes(site) and splice is not None and splice.resume_ids() is not None

    def request(
        self, site: Site, *, resumed: bool, left_out: frozenset[str] = frozenset()
    ) -> bytes:
        """Head and body. Raises RequestError for what cannot be said in the engine's API.

        Args:
            resumed: it goes on behind what the splice has.
            left_out: fields of the gateway's own, beside those that this place is known to refuse.
        """
        changes = self._changes(site, resumed=resumed)
        for name in left_out | site.engine.left_out(site.model):
            changes.pop(name, None)
        body = site.engine.dialect.body(self._path, self._body, changes)
        return b"%bcontent-length: %d\r\n\r\n%b" % (self._head(site), len(body), body)

    def refused(self, site: Site, status: int, error: bytes, *, resumed: bool) -> frozenset[str]:
        """Fields that the gateway added by itself and that an engine's refusal names."""
        if status not in (400, 422):
            return frozenset()
        added = self._changes(site, resumed=resumed).keys() - site.engine.left_out(site.model)
        error = error[:_MOST_ERROR_BYTES]
        return frozenset(
            name for name in _OWN_FIELDS.keys() & added if _OWN_FIELDS[name].search(error)
        )

    def _head(self, site: Site) -> bytes:
        """But for its end."""
        caller, engine = self._caller, site.engine
        target = engine.dialect.target(self._path, site.model)
        accept = b"text/event-stream" if self._body.stream else b"application/json"
        # a trace of this request's own comes with its attempt
        own = () if caller.trace is NO_TRACE else _TRACE_HEADERS
        found: Headers = [
            header
            for header in caller.headers
            if header[0] in _REQUEST_HEADERS and header[0] not in own
        ]
        start = engine.start_of(target, accept)
        if found:
            # what a caller says of an API's version stands over the engine's own
            said = {name for name, _ in found}
            found += [header for header in engine.headers() if header[0] not in said]
            common = [(b"content-type", b"application/json"), (b"accept", accept)]
            start = engine.pool.origin.start("POST", target, common)
        found.append((b"x-request-id", caller.request_id.encode()))
        if caller.tenant and engine.kind == "paceline":
            found.append((_TENANT_HEADER, caller.tenant.encode()))
        return start + lines_of(found)

    def _changes(self, site: Site, *, resumed: bool) -> dict[str, Any]:
        """Fields that differ from the caller's."""
        body, facts = self._body, site.engine.facts
        changes: dict[str, Any] = {}
        if "model" not in body.fields or site.model != body.model:
            changes["model"] = site.model
        limits = self._limits(site)
        changes |= limits
        if self._caller.salt and facts.salts:
            changes["cache_salt"] = self._caller.salt
        if body.stream and self._path in RESUMABLE:
            if not body.include_usage:
                changes["stream_options"] = {**body.stream_options(), "include_usage": True}
            if _resumes(site) and not body.resumed:
                changes["return_token_ids"] = True
        if _resumes(site) and self._seed is not None and self._path in RESUMABLE:
            changes["seed"] = self._seed
        if resumed:
            assert self._splice is not None, "a stream is resumed"
            ids = self._splice.resume_ids()
            if ids is not None and _resumes(site):
                changes["resume_output_ids"] = ids[0] if len(ids) == 1 else ids
            else:
                changes |= self._behind_text(self._splice, limits)
        return changes

    def _limits(self, site: Site) -> dict[str, int]:
        """Fields that keep an answer within what was reserved for it, where its caller set no
        limit and the engine's context is not the narrower one."""
        body, context = self._body, site.max_model_len
        if body.cap is None or (context is not None and body.cap >= context - body.prompt_tokens):
            return {}
        cap = min(body.cap, self._caps.get(site.engine.name, body.cap))
        told = {known: cap for known in body.limits if body.limits[known] < 0}
        if body.limits.get(PREDICT, 0) > cap:
            told[PREDICT] = cap
        return {**told, self._limit_name(site.engine): cap}

    def _limit_name(self, engine: Engine) -> str:
        if self._path == "/v1/responses":
            return "max_output_tokens"
        if self._path != CHAT:
            return "max_tokens"
        # some models of theirs take no other
        is_new = engine.kind == "azure" or engine.pool.origin.host == _OPENAI
        return engine.limit_name or ("max_completion_tokens" if is_new else "max_tokens")

    def eases(self, site: Site, status: int, body: bytes) -> bool:
        """Whether the engine refused the limit that its caller did not set, and is to be asked
        otherwise: by its other name, which is remembered, or for less."""
        limits, name = self._limits(site), site.engine.name
        if not limits or name in self._caps or status not in (400, 422):
            return False
        if not (_LIMIT_NAMES.search(body) or is_too_long(status, body)):
            return False
        used = self._limit_name(site.engine)
        others = [each for each in _CHAT_LIMITS if each != used and each.encode() in body]
        is_unknown = used.encode() in body and not _TOO_LARGE.search(body)
        self._caps[name] = limits[used]
        if self._path == CHAT and (others or is_unknown):
            site.engine.limit_name = others[0] if others else _CHAT_LIMITS[used == _CHAT_LIMITS[0]]
        else:
            self._caps[name] = min(limits[used], _SMALL_CAP)
        return True

    def _behind_text(self, splice: Splice, limits: dict[str, int]) -> dict[str, Any]:
        """Fields of a chat that goes on behind what was said of its answer."""
        body = self._body
        messages = msgspec.json.decode(body.fields["messages"], type=list[msgspec.Raw])
        said = {"role": "assistant", "content": splice.partial_text()}
        changes: dict[str, Any] = {
            "messages": [*messages, said],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        # each from its own: engines go by one or the other. Below 0 is no limit
        for name, most in {**body.limits, **limits}.items():
            if most >= 0:
                changes[name] = max(1, most - splice.num_parts)
        if body.seed is not None:
            # with the same one the draws of the beginning would come again
            changes["seed"] = (body.seed + splice.num_parts) % (1 << 31)
        return changes
