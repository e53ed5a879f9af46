"""What is asked of a gateway before two servers of one kind, one check each.

In most checks the server that answers is stopped (SIGSTOP), so that it gives no sign, and goes on
afterwards; at the end one is killed. Answers are greedy and as long as they may be, so that what a
cut stream says can be held against an uncut one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmarks.common.processes import Process
from paceline.gateway import EngineConfig, Gateway, GatewayConfig
from paceline.gateway.settings.config import EngineKind
from paceline.gateway.settings.engine_types import KINDS, scan
from paceline.routing import Role
from tests.gateway.helpers import gateway_over

__all__ = ["CHECKS", "CheckFailedError", "Pair"]

_TOKENS: Final = 64
# of an answer that its caller leaves, at least; the fewest steps that one who stays must get
_LONG: Final = 200
_LEAST_STEPS: Final = 64
# seconds that such an answer takes at least: ten times what a gateway takes to see a hang-up
_LONG_SECONDS: Final = 1.0
# by kind, the server's own count of steps, whoever they were for
_STEPS: Final[Mapping[EngineKind, str]] = {
    "llama.cpp": "llamacpp:n_decode_total",
    "vllm": "vllm:iteration_tokens_total_count",
}
# until nothing runs there
_REST_SECONDS: Final = 60.0
# parts of an answer after which its server is stopped
_PARTS: Final = 8
_PROMPT: Final = "Tell me the story of the fox and the raven, slowly."
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"


class CheckFailedError(Exception):
    """The gateway did something else than it should."""


@dataclass(frozen=True)
class Pair:
    """Two servers of one kind with the same model."""

    kind: EngineKind
    first: Process
    second: Process
    ports: tuple[int, int]
    model: str

    @asynccontextmanager
    async def gateway(
        self, *, roles: tuple[Role, Role] = ("both", "both"), **fields: Any
    ) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
        """A new one before both, which sends to the first."""
        engines = tuple(
            EngineConfig(name=name, url=f"http://127.0.0.1:{port}", role=role)
            for name, port, role in zip(("a", "b"), self.ports, roles, strict=True)
        )
        config = GatewayConfig(
            engines=engines, poll_interval=0.2, poll_timeout=3.0, spend_storage="", **fields
        )
        async with gateway_over(config) as (gateway, client):
            await _until(lambda: self._known(gateway))
            gateway.upstreams.by_name["b"].load.prefill_tokens += 1e6
            yield gateway, client

    def kill_first(self) -> None:
        """With all that it started, and at once: the gateway runs in this process."""
        os.killpg(self.first.pid, signal.SIGKILL)

    def _known(self, gateway: Gateway) -> bool:
        engines = gateway.upstreams.by_name.values()
        return all(e.kind == self.kind and e.models and not e.trouble for e in engines)

    def body(self, path: str, **fields: Any) -> dict[str, Any]:
        said = [{"role": "user", "content": _PROMPT}]
        body: dict[str, Any] = {"model": self.model, "temperature": 0.0, **fields}
        if path == RESPONSES:
            return {"input": _PROMPT, "max_output_tokens": _TOKENS, **body}
        if path == COMPLETIONS:
            return {"prompt": _PROMPT, "max_tokens": _TOKENS, "ignore_eos": True, **body}
        body = {"messages": said, "max_tokens": _TOKENS, **body}
        return body if path == MESSAGES else {"ignore_eos": True, **body}


@dataclass
class Told:
    """What a stream said."""

    text: str = ""
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    note: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] | None = None
    done: bool = False
    num_parts: int = 0

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        if line == "data: [DONE]":
            self.done = True
            return
        event = json.loads(line[6:])
        self.error = event.get("error") or self.error
        self.note = event.get("paceline") or self.note
        self.usage = event.get("usage") or self.usage
        if event.get("type") == "error":
            self.error = event
        for choice in event.get("choices") or ():
            said = choice.get("delta", {}).get("content") or choice.get("text") or ""
            self._say(said)
            self.reason = choice.get("finish_reason") or self.reason
        # of the other two APIs
        delta = event.get("delta")
        if isinstance(delta, str):
            self._say(delta)
        elif isinstance(delta, dict):
            self._say(delta.get("text") or "")
        if event.get("type") in ("message_stop", "response.completed", "response.incomplete"):
            self.done = True

    def _say(self, text: str) -> None:
        self.text += text
        self.num_parts += bool(text)


async def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def _stream(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    after: tuple[int, Callable[[], None]] | None = None,
) -> Told:
    """``after``: so many parts, what to do then."""
    told = Told()
    async with client.stream("POST", path, json={**body, "stream": True}, timeout=120) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            raise CheckFailedError(f"status {answer.status_code}: {text[:200]}")
        async for line in answer.aiter_lines():
            told.take(line)
            if after is not None and told.num_parts >= after[0]:
                after, act = None, after[1]
                act()
    return told


def _must(condition: bool, what: str) -> None:
    if not condition:
        raise CheckFailedError(what)


# ------------------------------------------------------------------------------ while all is well


async def whole(pair: Pair) -> str:
    async with pair.gateway() as (_, client):
        answer = await client.post(CHAT, json=pair.body(CHAT), timeout=120)
        _must(answer.status_code == 200, answer.text[:200])
        _must(bool(answer.json()["choices"][0]["message"]["content"]), "nothing was said")
        return "as it is"


def streamed(path: str) -> Callable[[Pair], Awaitable[str]]:
    async def check(pair: Pair) -> str:
        body = pair.body(path)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pair.ports[0]}") as client:
            direct = await _stream(client, path, body)
        async with pair.gateway() as (_, client):
            told = await _stream(client, path, body)
        _must(told.done and told.error is None, f"it does not end: {told}")
        _must(told.text == direct.text, f"{told.text!r} is not {direct.text!r}")
        return "as it is"

    return check


async def usage(pair: Pair) -> str:
    body = pair.body(CHAT, stream_options={"include_usage": True})
    async with pair.gateway() as (_, client):
        told = await _stream(client, CHAT, body)
    _must(told.usage is not None and told.usage["completion_tokens"] == _TOKENS, f"{told.usage}")
    return "as it is"


async def apart(pair: Pair) -> str:
    """A prompt is asked of an engine that has no connector, and computed by the other one."""
    if pair.kind != "vllm":
        return "not of this kind"
    roles: tuple[Role, Role] = ("prompts", "outputs")
    async with pair.gateway(roles=roles, split_above=1) as (gateway, client):
        body = pair.body(CHAT)
        told = await _stream(client, CHAT, body)
        answer = (await client.post(CHAT, json=body, timeout=120)).json()
        text = answer["choices"][0]["message"]["content"]
        metrics = gateway.metrics.render((), 0, 0.0)
        _must(told.done and told.text == text, f"{told.text!r} is not {text!r}")
        failed = scan(metrics.encode(), "paceline:gateway_handed_total")
        _must(failed == 2, f"{failed} prompts were asked for")
        _must(not gateway.upstreams.by_name["a"].num_misses, "the first engine is gone")
    return "computed by the other one"


async def too_long(pair: Pair) -> str:
    body = pair.body(CHAT, messages=[{"role": "user", "content": "word " * 40_000}])
    async with pair.gateway() as (_, client):
        answer = await client.post(CHAT, json=body, timeout=120)
    _must(answer.status_code == 400, f"status {answer.status_code}: {answer.text[:200]}")
    return "400 with the numbers"


async def hang_up(pair: Pair, long: float = _LONG_SECONDS) -> str:
    """The server computes much less for a caller who hangs up than for one who reads on, by its own
    count of steps. That nothing runs there would say less: so it is behind an answer that ended.
    ``long``: seconds that an answer must take to tell."""
    body = {**pair.body(CHAT), "max_tokens": _LONG}
    url = f"http://127.0.0.1:{pair.ports[0]}"
    async with pair.gateway() as (_, client), httpx.AsyncClient(base_url=url) as server:
        middle, seconds, whole = await _rested(pair, server), 0.0, 0.0
        for _ in range(2):
            start, since = middle, time.monotonic()
            told = await _stream(client, CHAT, body)
            seconds = time.monotonic() - since
            _must(told.reason == "length", f"it ends otherwise: {told.reason}")
            middle = await _rested(pair, server)
            whole = middle - start
            if seconds >= long:
                break
            # a server this fast makes many steps before its caller's leaving is seen
            body["max_tokens"] = math.ceil(1.5 * _LONG * long / seconds)
        length = f"an answer of {whole:.0f} steps in {seconds:.2f} s"
        long_enough = whole >= _LEAST_STEPS and seconds >= long
        _must(long_enough, f"{length} is too short to tell")
        async with client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            told = Told()
            async for line in answer.aiter_lines():
                told.take(line)
                if told.num_parts >= _PARTS:
                    break
        made = await _rested(pair, server) - middle
    _must(told.reason is None and not told.done, f"it ended before: {told}")
    _must(made < whole / 2, f"{made:.0f} steps without a caller, {whole:.0f} with one")
    return "the server stops"


async def _rested(pair: Pair, server: httpx.AsyncClient) -> float:
    """Steps that the server has computed, once nothing runs there. Before each look it is asked for
    a token: some say what runs in a step alone."""
    names = (_STEPS[pair.kind], *KINDS[pair.kind].signals["running"])
    short = {**pair.body(CHAT), "max_tokens": 1}
    async with asyncio.timeout(_REST_SECONDS):
        while True:
            answer = await server.post(CHAT, json=short, timeout=_REST_SECONDS)
            _must(answer.status_code == 200, f"status {answer.status_code}: {answer.text[:200]}")
            text = (await server.get("/metrics")).content
            steps, running = (scan(text, name) for name in names)
            if steps is None or running is None:
                raise CheckFailedError(f"{names} are not in {len(text)} bytes of metrics")
            if not running:
                return steps
            await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------ and while it is not


async def before_a_word(pair: Pair) -> str:
    async with pair.gateway() as (_, client):
        pair.first.freeze()
        try:
            told = await _stream(client, CHAT, pair.body(CHAT))
        finally:
            pair.first.thaw()
    _must(told.done and told.error is None and told.reason == "length", f"{told}")
    return "begins anew"


async def whole_dies(pair: Pair) -> str:
    async with pair.gateway() as (_, client):
        sent = asyncio.ensure_future(client.post(CHAT, json=pair.body(CHAT), timeout=120))
        await asyncio.sleep(0.2)
        pair.first.freeze()
        try:
            answer = await sent
        finally:
            pair.first.thaw()
    _must(answer.status_code == 200, answer.text[:200])
    return "begins anew"


def dies(path: str, *, by_text: bool, kill: bool = False) -> Callable[[Pair], Awaitable[str]]:
    """``by_text``: the gateway may go on behind text. In a chat it must then, and nowhere else can
    it."""
    goes_on = by_text and path == CHAT

    async def check(pair: Pair) -> str:
        body = pair.body(path)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{pair.ports[1]}") as client:
            uncut = await _stream(client, path, body)
        act = pair.kill_first if kill else pair.first.freeze
        async with pair.gateway(resume_by_text=by_text) as (_, client):
            try:
                told = await _stream(client, path, body, (_PARTS, act))
            finally:
                pair.first.thaw()
        if goes_on:
            _must(told.error is None, f"an error where it goes on: {told.error}")
            _must(told.done and told.reason == "length", f"it does not end: {told}")
            _must(told.note is not None and told.note.get("exact") is False, f"{told.note}")
            same = told.text == uncut.text
            return f"goes on behind text ({'the same text' if same else 'another text'})"
        _must(told.error is not None, f"it ends as if done: {told}")
        said = json.dumps(told.error)
        _must("cannot be resumed" in said, f"the error does not say so: {said}")
        _must(uncut.text.startswith(told.text), f"{told.text!r} is not of {uncut.text!r}")
        _must(bool(told.text), "nothing was said")
        return "an error that says so"

    return check


CHECKS: Final[Mapping[str, Callable[[Pair], Awaitable[str]]]] = {
    "chat": whole,
    "chat, streamed": streamed(CHAT),
    "completions, streamed": streamed(COMPLETIONS),
    "Responses, streamed": streamed(RESPONSES),
    "Messages, streamed": streamed(MESSAGES),
    "usage of a stream": usage,
    "a prompt for the other engine": apart,
    "a prompt that is too long": too_long,
    "the caller hangs up": hang_up,
    "stopped before the first word": before_a_word,
    "stopped in a whole answer": whole_dies,
    "stopped in a chat": dies(CHAT, by_text=False),
    "stopped in a chat, `resume_by_text`": dies(CHAT, by_text=True),
    "stopped in a completion, `resume_by_text`": dies(COMPLETIONS, by_text=True),
    "stopped in a response": dies(RESPONSES, by_text=True),
    "stopped in a message": dies(MESSAGES, by_text=True),
    # the last one: that server is gone then
    "killed in a chat, `resume_by_text`": dies(CHAT, by_text=True, kill=True),
}
