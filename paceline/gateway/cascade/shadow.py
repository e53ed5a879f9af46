"""Shadow traffic: a share of the chats is put to both models, and their answers are compared.

It begins once the caller has its answer, is paid from the key's budget, and is not counted against
limits of its rate. A request that may not leave is never put to anything but its own model.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.types import Message

from paceline.errors import RequestError
from paceline.files import private_opener
from paceline.gateway.cascade.answer import read_said, without_logprobs
from paceline.gateway.cascade.asked import Asked, Relaying
from paceline.gateway.cascade.gate import WholeGate, behind
from paceline.gateway.cascade.judge import Judge
from paceline.gateway.cascade.prompt import PROMPT_FIELDS, Prompt
from paceline.gateway.proxy.context import Allowed
from paceline.gateway.requests.body import Body
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.calibration import Shadow
from paceline.gateway.settings.cascade import Mode
from paceline.http.errors import HttpError
from paceline.routing.cascade import agree

__all__ = ["Shadows"]

_log = logging.getLogger("paceline.gateway")

# comparisons at once, beyond which none begins
_MOST: Final = 4
# bytes of a file beyond which none is added
_MOST_BYTES: Final = 256 << 20
_ALLOWED: Final = Allowed(True, False, False, False)


class Shadows:
    """Comparisons of one gateway."""

    def __init__(self, gateway: Relaying) -> None:
        self._gateway = gateway
        self._running: set[asyncio.Task[None]] = set()

    def begin(
        self, judge: Judge, asked: Asked, prompt: Prompt, small: Route, body: Body, mode: Mode
    ) -> None:
        """Put a request to both models, if it is one of the share.

        Args:
            body: the request for the small model.
            mode: how the request was decided.
        """
        # the data policy comes before all else
        if asked.route.local_only or self._gateway.draining or len(self._running) >= _MOST:
            return
        if random.random() < judge.config.shadow:
            task = asyncio.ensure_future(self._guarded(judge, asked, prompt, small, body, mode))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _guarded(
        self, judge: Judge, asked: Asked, prompt: Prompt, small: Route, body: Body, mode: Mode
    ) -> None:
        try:
            await self._compare(judge, asked, prompt, small, body, mode)
        except (HttpError, RequestError, OSError) as error:
            # no caller waits for it, and the next one may do better
            _log.info("cascade_shadow_failed model=%s reason=%r", judge.model, str(error)[:200])
        except Exception:
            _log.exception("cascade_shadow_failed model=%s", judge.model)

    async def _compare(
        self, judge: Judge, asked: Asked, prompt: Prompt, small: Route, body: Body, mode: Mode
    ) -> None:
        found = []
        for route, each in (
            (small, body),
            (asked.route, without_logprobs(asked.body, stream=False)),
        ):
            # an answer that no caller gets is not for its list of stored ones
            kept = {name: value for name, value in each.fields.items() if name != "store"}
            unstored = replace(each, fields=kept)
            gate = await self._ask(replace(asked, route=route, body=unstored, allowed=_ALLOWED))
            said = read_said(bytes(gate.body), prompt) if gate.status == 200 else None
            if said is None:
                _log.info("cascade_shadow_failed model=%s status=%d", judge.model, gate.status)
                return
            found.append((said, bytes(gate.body)))
        (one, small_answer), (other, large_answer) = found
        judge.audited(mode, prompt, one, differs=not agree(one.answer, other.answer))
        self._gateway.metrics.cascade_audited(judge.model, judge.audit.loss, judge.audit.is_broken)
        if judge.config.shadow_file:
            fields = asked.body.fields
            told: Mapping[str, msgspec.Raw] = {
                name: msgspec.Raw(fields[name]) for name in PROMPT_FIELDS if name in fields
            }
            digests = judge.digests(small, asked.route)
            line = Shadow(*digests, told, msgspec.Raw(small_answer), msgspec.Raw(large_answer))
            await asyncio.to_thread(_append, Path(judge.config.shadow_file), line)

    async def _ask(self, asked: Asked) -> WholeGate:
        gate = WholeGate()
        incoming = with_fields(behind(asked.incoming, gate), receive=_stays, ticket=None)
        await self._gateway.relay(replace(asked, incoming=incoming))
        return gate


async def _stays() -> Message:
    """Receive nothing: the caller has its answer, and its hanging up ends no comparison."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


def _append(path: Path, line: Shadow) -> None:
    """Add a line. Raises OSError."""
    with open(path, "ab", opener=private_opener) as file:
        if file.tell() >= _MOST_BYTES:
            raise OSError(f"{path} has {file.tell()} bytes: none is added beyond {_MOST_BYTES}")
        # a line of its own also behind half a line
        file.write(b"\n" + msgspec.json.encode(line))
