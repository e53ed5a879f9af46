"""Early start of the large model, so that its prefill is done if the small model's first tokens
turn out not to be good enough. It starts where the prompt has a score close to the threshold.

It is a hedge: ``hedge_share`` bounds how many there are, and engines that are nearly full get
none. The answer is held back until it is wanted; where it is not, its request is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace
from starlette.types import Message

from paceline.gateway.cascade.asked import Asked, Relaying
from paceline.gateway.cascade.gate import OpenGate, behind
from paceline.gateway.proxy.response import cascade_header
from paceline.gateway.routing.routes import Endpoint
from paceline.routing import saturation

__all__ = ["Early", "may_begin_early"]


# note of an answer before the decision, and how chunks have it: no text of a model has these bytes,
# as its quotes are escaped
_UNTOLD: Final = {"by": "escalated"}
_UNTOLD_BYTES: Final = b'"cascade":' + msgspec.json.encode(_UNTOLD)


class HeldGate(OpenGate):
    """Holds an answer back until it is opened; then it is an ``OpenGate``."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked.incoming)
        # the caller's fast path is not held
        self.writer = None
        self.opened = asyncio.Event()
        # what the caller is told, completed before it is opened
        self.note: dict[str, Any] = dict(_UNTOLD)

    async def send(self, message: Message) -> None:
        await self.opened.wait()
        if message["type"] == "http.response.start":
            kept = [each for each in message["headers"] if each[0] != b"x-paceline-cascade"]
            told = (b"x-paceline-cascade", cascade_header(self.note))
            message = {**message, "headers": [*kept, told]}
        elif _UNTOLD_BYTES in message.get("body", b""):
            # the last chunk was written before the decision
            note = b'"cascade":' + msgspec.json.encode(self.note)
            message = {**message, "body": message["body"].replace(_UNTOLD_BYTES, note)}
        await super().send(message)


class Early:
    """One request at the large model that may not be wanted; ``model``: the cascade's name."""

    def __init__(self, gateway: Relaying, asked: Asked, model: str) -> None:
        gateway.hedges.take()
        self._metrics, self._model = gateway.metrics, model
        self.gate = HeldGate(asked)
        held = replace(asked, incoming=behind(asked.incoming, self.gate))
        relayed = gateway.relay(held, {"cascade": self.gate.note})
        self._task = asyncio.ensure_future(relayed)

    async def finish(self, note: Mapping[str, object]) -> None:
        """Let its answer through. Raises as the relaying of a request does."""
        self._metrics.cascade_early(self._model, "used")
        self.gate.note.update(note)
        self.gate.opened.set()
        try:
            await self._task
        finally:
            await self._end()

    async def drop(self) -> None:
        """Cut its request: its answer is not wanted."""
        self._metrics.cascade_early(self._model, "wasted")
        await self._end()

    async def _end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def may_begin_early(gateway: Relaying, asked: Asked, endpoints: Sequence[Endpoint]) -> bool:
    """Whether a hedge may be sent to one of the endpoints, all of which are known not to be nearly
    full."""
    if not (asked.allowed.hedge and gateway.hedges.has_one):
        return False
    now = gateway.now()
    full = [
        saturation(e.upstream.load, e.upstream.config.max_concurrent or float("inf"), now)
        for e in endpoints
        if not e.usable(now, asked.incoming.path)
    ]
    return bool(full) and all(e is None or e < gateway.config.hedge_below for e in full)
