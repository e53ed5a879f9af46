"""One request of a cascade, which has one judge."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.errors import RequestError
from paceline.gateway.cascade.answer import (
    Said,
    agreement_of,
    events_of,
    read_said,
    shown,
    with_logprobs,
    without_logprobs,
)
from paceline.gateway.cascade.asked import (
    Asked,
    Relaying,
    Usage,
    without_fallback,
)
from paceline.gateway.cascade.early import Early, may_begin_early
from paceline.gateway.cascade.gate import OpenGate, PrefixGate, WholeGate, behind
from paceline.gateway.cascade.judge import Decision, Judge
from paceline.gateway.cascade.prompt import Prompt
from paceline.gateway.cascade.signals import embedded, sampled
from paceline.gateway.proxy.response import cascade_header
from paceline.gateway.proxy.upstream_request import CHAT
from paceline.gateway.requests.body import Body
from paceline.gateway.requests.incoming import IncomingRequest
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.cascade import Mode
from paceline.gateway.settings.prices import Used, show_amount
from paceline.http.errors import HttpError
from paceline.http.sse import SSE, STREAM_HEADERS
from paceline.http.upstream import Headers

__all__ = ["Run"]

_log = logging.getLogger("paceline.gateway")

# estimated tokens of a prompt up to which its perplexity is asked for
_MOST_PERPLEXITY: Final = 800
# statuses with which engines refuse a field
_REFUSED_FIELD: Final = (400, 422, 501)
# statuses of an engine that another one, or a later time, would not have
_UNAVAILABLE: Final = frozenset({408, 429, *range(500, 600)})
# an engine or a budget cannot serve a request
_NO_ANSWER: Final = (HttpError, RequestError)
# sends the small model's answer, or asks it again
_Instead = Callable[[Decision], Awaitable[None]]
_EVENTS: Final[Headers] = [
    (b"content-type", SSE.encode()),
    *((name.lower().encode(), value.encode()) for name, value in STREAM_HEADERS.items()),
]


class Run:
    """One request of a cascade."""

    def __init__(self, gateway: Relaying, judge: Judge, asked: Asked) -> None:
        self._gateway, self._judge, self._asked = gateway, judge, asked
        self._path = asked.incoming.path
        # answers of other APIs have other signals than those of the calibration
        is_chat = self._path == CHAT
        self.mode: Mode = judge.mode_for(stream=asked.body.stream) if is_chat else "route"
        # decision by the prompt alone, where it was made
        self._by_prompt: Decision | None = None

    @property
    def conversation_name(self) -> bytes:
        """The conversation's name, where the configuration names a header for it."""
        header = self._judge.config.conversation_header.lower().encode()
        return self._asked.incoming.headers.get(header, b"") if header else b""

    def small_route(self) -> Route | None:
        """Return the route of the small model; None: its engines cannot serve the request, or may
        not."""
        asked = self._asked
        found = self._gateway.routes.find(
            self._judge.config.small, asked.tokens, local_only=asked.route.local_only
        )
        try:
            served = found.serving(self._path, asked.body)
        except HttpError:
            return None
        # the caller knows the model by the name that it asked for
        return replace(served, asked=asked.route.shown) if served.tiers else None

    def _wait(self) -> float:
        """Return the predicted seconds to the large model's first token, where that matters."""
        if self._judge.config.under_load is None:
            return 0.0
        demand, now = self._gateway.demand_of(self._asked), self._gateway.now()
        return min(
            (
                endpoint.upstream.load.view(demand, now).ttft
                for endpoint in self._asked.route.tiers[0]
                if not endpoint.usable(now, self._path)
            ),
            default=math.inf,
        )

    # ---------------------------------------------------------------- one model is asked

    async def large(
        self,
        decision: Decision,
        by: str,
        prompt: Prompt | None = None,
        incoming: IncomingRequest | None = None,
        early: Early | None = None,
    ) -> None:
        """Ask the large model.

        Args:
            prompt: its conversation stays with the large model once that has answered.
            incoming: the request with a gate; None: as it came.
            early: it is asked already.
        """
        note = {"cascade": decision.note(by, self._judge.model)}
        asked = self._asked if incoming is None else replace(self._asked, incoming=incoming)
        try:
            if early is None:
                await self._gateway.relay(asked, note)
            else:
                await early.finish(note["cascade"])
        finally:
            # also where the caller has hung up in the middle
            if self._asked.incoming.started:
                self._large_answered(by, prompt)

    def _large_answered(self, by: str, prompt: Prompt | None) -> None:
        judge = self._judge
        self._gateway.metrics.cascaded(judge.model, by if by == "escalated" else "large")
        if prompt is not None:
            judge.conversations.escalate(prompt.conversation)

    async def _large_or(
        self,
        instead: _Instead,
        decision: Decision,
        by: str,
        prompt: Prompt,
        early: Early | None = None,
    ) -> None:
        """Ask the large model; where that cannot be had, and a score alone speaks against the small
        one, have ``instead`` answer."""
        may_instead = decision.why == "score"
        if not may_instead and early is None:
            await self.large(decision, by, prompt)
            return
        incoming, failed = self._asked.incoming, None
        gate = OpenGate(incoming) if early is None else early.gate
        try:
            await self.large(decision, by, prompt, behind(incoming, gate), early)
        except _NO_ANSWER as error:
            failed = error
        if incoming.started:
            if failed is not None:
                raise failed
        elif failed is None and not (may_instead and gate.status in _UNAVAILABLE):
            # the request itself is wrong, and its caller must see why
            await gate.pass_on()
            self._large_answered(by, prompt)
        elif failed is not None and not may_instead:
            raise failed
        else:
            try:
                await instead(replace(decision, why="large unavailable"))
            except _NO_ANSWER:
                if failed is not None:
                    raise failed from None
                await gate.pass_on()

    async def small(self, small: Route, decision: Decision, by: str = "routed") -> None:
        """Ask the small model, as the large one may not have the request, or cannot be had."""
        note = {"cascade": decision.note(by, small.model)}
        usage = await self._gateway.relay(replace(self._asked, route=small), note)
        self._gateway.metrics.cascaded(self._judge.model, "small")
        self._count(usage, kept=True)

    # ---------------------------------------------------------------- the decision

    async def decide(self, prompt: Prompt, small: Route) -> None:
        """Decide by the prompt, the small model's answer, or its first tokens."""
        judge, wait = self._judge, self._wait()
        if judge.config.embeddings and judge.has_scores:
            model = judge.config.embeddings
            prompt, usage = await embedded(self._gateway, self._asked, prompt, model)
            self._count(usage, kept=False)
        if self.mode == "route" or (judge.has_scores and not judge.asks_logprobs):
            decision = self._by_prompt = judge.by_prompt(prompt, wait)
            self._note_drift()
            if not decision.small:
                await self._large_or(partial(self.small, small), decision, "routed", prompt)
                return
            if self.mode == "route":
                await self._direct_or_large(small, decision, prompt)
                return
        ask = self._prefix if self.mode == "prefix" else self._whole
        await ask(prompt, small, wait)

    def _note_drift(self) -> None:
        if (drift := self._judge.take_drift()) is not None:
            self._gateway.metrics.cascade_drifts(self._judge.model, drift)

    async def _direct_or_large(self, small: Route, decision: Decision, prompt: Prompt) -> None:
        """Ask the small model, and the large one if no answer comes of that."""
        incoming = self._asked.incoming
        gate = OpenGate(incoming)
        note = {"cascade": decision.note("routed", small.model)}
        asked = replace(
            self._asked, incoming=behind(incoming, gate), route=small,
            allowed=without_fallback(self._asked.allowed),
        )  # fmt: skip
        try:
            usage = await self._gateway.relay(asked, note)
        except _NO_ANSWER as error:
            await self._without_small(error, prompt)
            return
        if not incoming.started:
            await self._without_small(None, prompt)
            return
        self._gateway.metrics.cascaded(self._judge.model, "small")
        self._count(usage, kept=True)

    async def _without_small(self, error: Exception | None, prompt: Prompt) -> None:
        """Ask the large model, as the small one has no answer."""
        if error is not None and self._asked.incoming.started:
            raise error
        await self.large(Decision(False, "small unavailable"), "escalated", prompt)

    def upstream_body(self, small: Route, *, stream: bool) -> Body:
        """Return the request for the small model: with log-probabilities, if it tells any."""
        body = self._asked.body
        if self._judge.asks_logprobs:
            # engines read no log-probabilities of long prompts
            of_prompt = self._judge.config.perplexity and self._asked.tokens < _MOST_PERPLEXITY
            wanted = with_logprobs(body, stream=stream, of_prompt=of_prompt and not stream)
            with contextlib.suppress(HttpError):
                small.serving(CHAT, wanted)
                return wanted
        return without_logprobs(body, stream=stream)

    async def _whole(self, prompt: Prompt, small: Route, wait: float) -> None:
        """Have the small model answer, and judge that."""
        asked, samples = self._asked.body, self._judge.config.samples
        drawn = None
        if samples and self._judge.asks_logprobs:
            drawn = asyncio.ensure_future(self._ask(small, sampled(asked, samples)))
        try:
            try:
                gate, usage = await self._ask(small, self.upstream_body(small, stream=False))
                if _refuses_logprobs(gate):
                    of_prompt = b"prompt_logprobs" in gate.body
                    gate, usage = await self._ask(small, without_logprobs(asked, stream=False))
                    if gate.status == 200 and not of_prompt:
                        self._lacks_logprobs(small)
                said = read_said(bytes(gate.body), prompt) if gate.status == 200 else None
                if drawn is not None and said is not None:
                    said = await self._with_agreement(drawn, said, prompt)
            finally:
                # before the large model is asked
                if drawn is not None:
                    drawn.cancel()
                    await asyncio.gather(drawn, return_exceptions=True)
        except _NO_ANSWER as error:
            await self._without_small(error, prompt)
            return
        if said is None:
            self._count(usage, kept=False)
            await self._without_small(None, prompt)
            return
        decision = self._judge.by_answer(prompt, said, wait, self._by_prompt)
        self._note_drift()
        if decision.small:
            await self._send_whole(gate, decision, small, usage)
            return
        is_sent = False

        async def at_hand(told: Decision) -> None:
            nonlocal is_sent
            is_sent = True
            await self._send_whole(gate, told, small, usage)

        try:
            await self._large_or(at_hand, decision, "escalated", prompt)
        finally:
            if not is_sent:
                self._count(usage, kept=False)

    async def _with_agreement(
        self, drawn: asyncio.Future[tuple[WholeGate, Usage]], said: Said, prompt: Prompt
    ) -> Said:
        """Return an answer with the share of further ones that say the same; without these, as it
        is."""
        try:
            gate, usage = await drawn
        except _NO_ANSWER:
            return said
        self._count(usage, kept=False)
        share = agreement_of(bytes(gate.body), said, prompt) if gate.status == 200 else None
        return replace(said, agreement=share)

    async def _ask(self, small: Route, body: Body) -> tuple[WholeGate, Usage]:
        gate = WholeGate()
        incoming = behind(self._asked.incoming, gate)
        # a budget that is too small for this model is too small for the large one
        allowed = without_fallback(self._asked.allowed)
        asked = replace(self._asked, incoming=incoming, body=body, route=small, allowed=allowed)
        return gate, await self._gateway.relay(asked)

    def _lacks_logprobs(self, small: Route) -> None:
        self._judge.asks_logprobs = False
        _log.warning(
            "cascade_no_logprobs model=%s: the engine of %s refuses logprobs, so the prompt alone "
            "is scored", self._judge.model, small.model,
        )  # fmt: skip

    async def _send_whole(
        self, gate: WholeGate, decision: Decision, small: Route, usage: Usage
    ) -> None:
        """Send the small model's answer."""
        asked, told = self._asked, decision.note("small", small.model)
        whole = shown(msgspec.json.decode(bytes(gate.body)), asked.body, {"cascade": told})
        headers = [*gate.kept, (b"x-paceline-cascade", cascade_header(told))]
        if asked.body.stream:
            data = events_of(whole, asked.body)
            headers = [*_EVENTS, *(each for each in headers if each[0] != b"content-type")]
        else:
            data = msgspec.json.encode(whole)
            headers.append((b"content-length", b"%d" % len(data)))
        self._gateway.metrics.cascaded(self._judge.model, "small")
        self._count(usage, kept=True)
        send = asked.incoming.send
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _prefix(
        self, prompt: Prompt, small: Route, wait: float, *, plain: bool = False
    ) -> None:
        """Have the small model begin, and judge its first tokens; ``plain``: without
        log-probabilities, as its engine has refused these."""
        asked, judge = self._asked, self._judge
        gate = PrefixGate(asked.incoming, asked.body, judge.config.prefix_tokens)
        body = asked.body if plain else self.upstream_body(small, stream=True)
        inner = replace(
            asked, incoming=behind(asked.incoming, gate), body=body, route=small,
            allowed=without_fallback(asked.allowed),
        )  # fmt: skip
        early = self._begin_early(prompt, wait)
        task = asyncio.ensure_future(self._gateway.relay(inner))
        if judge.has_scores:
            # behind the request, whose first tokens then wait for less
            asyncio.get_running_loop().call_soon(lambda: prompt.ngrams)
        wants_large = False
        try:
            await asyncio.wait((task, gate.ready), return_when=asyncio.FIRST_COMPLETED)
            if not gate.ready.done():
                if early is not None:
                    # the large model is not asked twice at once
                    dropped, early = early, None
                    await dropped.drop()
                if await self._no_prefix(task, gate, prompt, small, plain=plain):
                    await self._prefix(prompt, small, wait, plain=True)
                return
            if plain:
                self._lacks_logprobs(small)
            decision = Decision(False, "small unavailable")
            if gate.is_answer:
                said, known = gate.said(prompt), self._by_prompt
                decision = judge.by_prefix(prompt, said, wait, known, is_whole=gate.is_whole)
            self._note_drift()
            if decision.small:
                told = decision.note("small", small.model)
                header = b"x-paceline-cascade", cascade_header(told)
                # at once, however long the caller takes to read
                dropping = None if early is None else asyncio.create_task(early.drop())
                early = None
                try:
                    await gate.open({"cascade": told}, [header])
                finally:
                    if dropping is not None:
                        await dropping
                self._gateway.metrics.cascaded(judge.model, "small")
                self._count(await task, kept=True)
                return
            wants_large = True
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if early is not None and not wants_large:
                await early.drop()
        # a request that was cut off tells no usage
        used = Used(round(asked.tokens), 0, gate.num_tokens)
        self._count([(small.tiers[0][0], used)], kept=False)
        again = partial(self.small, small, by="small")
        await self._large_or(again, decision, "escalated", prompt, early)

    def _begin_early(self, prompt: Prompt, wait: float) -> Early | None:
        """Have the large model begin, where the prompt leaves it open which one will answer."""
        gateway, asked = self._gateway, self._asked
        tiers = asked.route.tiers
        if not (tiers and self._judge.is_grey(prompt, wait)):
            return None
        return (
            Early(gateway, asked, self._judge.model)
            if may_begin_early(gateway, asked, tiers[0])
            else None
        )

    async def _no_prefix(
        self, task: asyncio.Future[Usage], gate: PrefixGate, prompt: Prompt, small: Route,
        *, plain: bool,
    ) -> bool:  # fmt: skip
        """Go on where the small model's engine has refused the request, or failed. Returns whether
        it is to be asked again without log-probabilities."""
        try:
            await task
        except _NO_ANSWER as error:
            await self._without_small(error, prompt)
            return False
        if not plain and _refuses_logprobs(gate):
            return True
        await self._without_small(None, prompt)
        return False

    # ---------------------------------------------------------------- money

    def _count(self, usage: Usage, *, kept: bool) -> None:
        """Count what the small model has saved, or wasted."""
        metrics, model = self._gateway.metrics, self._judge.model
        if not kept:
            metrics.cascade_wasted(model, sum(used.output for _, used in usage))
        spending = self._gateway.spending
        if spending.is_free:
            return
        paid = sum(spending.cost(endpoint, used) for endpoint, used in usage)
        tiers = self._asked.route.tiers
        total = Used(*(sum(getattr(used, n) for _, used in usage) for n in Used.__struct_fields__))
        avoided = spending.cost(tiers[0][0], total) if kept and tiers else 0
        metrics.cascade_saved(model, float(show_amount(avoided - paid)))


def _refuses_logprobs(gate: WholeGate) -> bool:
    """Whether an engine has refused a request that asks for log-probabilities, perhaps for that: a
    refusal may also repeat the request. Only an answer to the same request without them tells."""
    return gate.status in _REFUSED_FIELD and b"logprob" in gate.body
