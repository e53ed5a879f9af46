"""Prompts and answers apart, for one request: which engine computes its prompt, and how the one
that answers finds it.

::

    Paceline, streamed   P answers; after its first token the stream goes on at D, which fetches
                         the prompt's blocks from P (``resume_output_ids``, ``kv_source``)
    Paceline, whole      P is asked for one token; then D, with ``kv_source``
    vLLM                 P is asked for one token; then D, with the ``kv_transfer_params`` that P
                         returned (NixlConnector and connectors that speak like it: D pulls)
    SGLang               P and D are asked at once, with the address of P's bootstrap server and the
                         same room (P pushes); D's answer is the caller's

P's token is thrown away where D is asked behind it. Whatever P fails at, D computes: only SGLang's
engines cannot, so a request goes to another pair of them.

Sources: the request fields of vLLM 0.32.0 (``entrypoints/openai``) and of its proxy for tests
(``tests/v1/kv_connector/nixl_integration``); SGLang's ``bootstrap_*`` fields as its router sets
them (https://docs.sglang.ai/advanced_features/pd_disaggregation.html).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.context import RequestContext
from paceline.gateway.proxy.upstream_request import RESUMABLE, takes_ids
from paceline.gateway.proxy.verdict import Verdict
from paceline.gateway.routing.picker import Pick
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.prices import Used
from paceline.gateway.streams.usage import used_by
from paceline.routing import Dispatch

__all__ = [
    "ONE_TOKEN", "PromptAttempt", "PromptLeg", "bootstrap_of", "may_hand", "needs_prompt",
    "streams_over",
]  # fmt: skip

# what vLLM's engines for prompts are told; they fill it in
_REMOTE_DECODE: Final = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
# fields of a request whose answer is one token that no caller gets; None: left out
ONE_TOKEN: Final[Mapping[str, Any]] = {
    "stream": False, "stream_options": None, "max_tokens": 1, "min_tokens": None,
    "min_completion_tokens": None, "return_token_ids": None, "n": None, "best_of": None,
}  # fmt: skip


def may_hand(context: RequestContext, prompts: Endpoint, outputs: Endpoint) -> bool:
    """Whether the prompt may be computed at ``prompts`` for ``outputs``, at all."""
    body, kind = context.body, prompts.upstream.kind
    if (
        context.path not in RESUMABLE
        or body.resumed
        or body.num_prompts != 1
        or prompts.model != outputs.model
        or prompts.tier != outputs.tier
        or not prompts.upstream.hands_to(outputs.upstream)
    ):
        return False
    if kind == "vllm":
        # the engine would pull the same blocks for each choice, and the other one frees them once
        return body.num_made == 1
    if kind == "paceline" and body.stream:
        both = takes_ids(prompts) and takes_ids(outputs)
        return both and context.allowed.resume and body.fields.get("echo") != b"true"
    return True


def needs_prompt(outputs: Endpoint) -> bool:
    """Whether an engine cannot compute prompts itself."""
    return outputs.upstream.kind == "sglang" and outputs.upstream.role == "outputs"


def streams_over(context: RequestContext, prompts: Endpoint) -> bool:
    """Whether the stream begins at ``prompts`` and goes on elsewhere."""
    return prompts.upstream.kind == "paceline" and context.body.stream


def bootstrap_of(prompts: Endpoint) -> dict[str, Any]:
    """Return the fields by which SGLang's engines meet for one request."""
    upstream = prompts.upstream
    host = upstream.pool.origin.host
    return {
        "bootstrap_host": f"[{host}]" if ":" in host else host,
        "bootstrap_port": upstream.config.bootstrap_port,
        "bootstrap_room": random.getrandbits(63),
    }


def _relay_nothing(data: bytes) -> None:
    """Drop a part of an answer that no caller gets."""


class PromptAttempt(Attempt):
    """Attempt whose answer no caller gets; ``over`` is done with it."""

    def __init__(self, leg: PromptLeg, endpoint: Endpoint, dispatch: Dispatch) -> None:
        super().__init__(leg, endpoint, dispatch)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ticket = dispatch

    def _finish_whole(self) -> None:
        # the one token came with the whole answer
        self._ticket.first_token(self._context.now())
        self._end(Verdict("done"))

    def _end(self, verdict: Verdict | None) -> None:
        super()._end(verdict)
        if not self.over.done():
            self.over.set_result(None)


class PromptLeg:
    """Request to the engine that computes a prompt: the owner of its attempt.

    Args:
        tick: called while the attempt runs, about every 0.1 s.
    """

    relay = None

    def __init__(self, context: RequestContext, pick: Pick, tick: Callable[[float], None]) -> None:
        self.context = context
        # no part of a stream is relayed
        self.write: Callable[[bytes], None] = _relay_nothing
        self.write_last: Callable[[bytes], None] = _relay_nothing
        # what became of it is recorded
        self.is_noted = False
        self.endpoint = pick.endpoint
        demand = replace(context.demand, max_tokens=1.0, output_tokens=1.0)
        dispatch = pick.endpoint.upstream.load.dispatch(demand, pick.view, context.now())
        self.attempt = PromptAttempt(self, pick.endpoint, dispatch)
        self._tick = tick

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields of the prompt's request that the caller's lacks, for vLLM."""
        return {"kv_transfer_params": _REMOTE_DECODE} if self._kind == "vllm" else {}

    @property
    def failure(self) -> str | None:
        """Why the prompt is not computed there; None: it is, or may still be."""
        verdict = self.attempt.verdict
        if verdict is None or self.attempt.is_answer:
            return None
        return verdict.why

    def found(self) -> Mapping[str, Any]:
        """Return the fields by which the other engine finds the prompt; empty if there is none."""
        if not self.attempt.is_answer:
            return {}
        if self._kind == "paceline":
            source = self.endpoint.upstream.kv_source
            return {} if source is None else {"kv_source": source}
        try:
            told = msgspec.json.decode(bytes(self.attempt.body), type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return {}
        params = told.get("kv_transfer_params", b"null")
        # opaque: the connector's business
        return {"kv_transfer_params": msgspec.Raw(params)} if bytes(params)[:1] == b"{" else {}

    def used(self) -> Used | None:
        """Return what the engine counted; None: nothing."""
        if not self.attempt.is_answer:
            return None
        return used_by(self.context.path, bytes(self.attempt.body))

    @property
    def _kind(self) -> str:
        return self.endpoint.upstream.kind

    # ---------------------------------------------------------------- AttemptOwner

    def first_token(self, now: float) -> None:
        """Take no note: the attempt itself does."""

    def spare_spoke(self, attempt: Attempt) -> None:
        """Take no note: there is no hedge."""

    def tick(self, now: float) -> None:
        self._tick(now)

    def may_leave(self, attempt: Attempt) -> bool:
        return True

    def may_move(self, attempt: Attempt) -> bool:
        return True

    def again(
        self, attempt: Attempt, left_out: frozenset[str]
    ) -> tuple[bytes, frozenset[str]] | None:
        return None
