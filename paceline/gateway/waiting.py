"""Until a request may be sent: others whose turn comes first, engines that asked for a pause, and a
caller who hangs up meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from paceline.gateway.answers import Answer
from paceline.gateway.attempts import Attempts
from paceline.gateway.bodies import Body
from paceline.gateway.caller import Caller
from paceline.gateway.config import GatewayConfig
from paceline.gateway.pick import AllRestError, Pick
from paceline.gateway.routes import Site
from paceline.gateway.slot_queue import Queued
from paceline.gateway.turns import Turns
from paceline.http.errors import ClientDisconnectedError
from paceline.routing import Demand, Dispatch

__all__ = ["Waiting"]

_T = TypeVar("_T")

# between two looks at whether the caller of a waiting request is still there
_LOOK_SECONDS: Final = 0.1


class Waiting:
    """Of one request, which came at ``arrived``."""

    def __init__(
        self,
        config: GatewayConfig,
        turns: Turns,
        attempts: Attempts,
        demand: Demand,
        body: Body,
        caller: Caller,
        answer: Answer,
        now: Callable[[], float],
        wake: asyncio.Event,
        arrived: float,
    ) -> None:
        self._config, self._turns, self._attempts = config, turns, attempts
        self._demand, self._body, self._caller = demand, body, caller
        self._answer, self._now, self._wake, self._arrived = answer, now, wake, arrived

    async def place(self, last: Site | None) -> tuple[Pick, Dispatch]:
        """An engine, and the request counted there, once one may be asked.

        Args:
            last: where it was sent before.

        Raises:
            HttpError: none can take it, or it would wait too long.
            ClientDisconnectedError: the caller hung up.
        """
        while True:
            try:
                # further attempts have waited their turn once
                if last is None and self._turns.must_wait(self._attempts.route, self._demand):
                    return await self._unless_gone(self._turn(), self._give_up)
                return self._dispatched(last)
            except AllRestError as error:
                seconds = error.seconds
                waited = self._now() - self._arrived
                if seconds > self._config.max_rest_wait - waited:
                    raise
            await self._unless_gone(asyncio.sleep(seconds))

    async def _turn(self) -> tuple[Pick, Dispatch]:
        queued = Queued(
            # callers may use one id of theirs for several requests
            f"{self._caller.request_id} {id(self)}",
            self._arrived,
            round(self._demand.output_tokens),
            self._body.priority,
            self._caller.tenant,
            self._body.slo,
        )
        async with self._turns.turn(self._attempts.route, self._demand, queued):
            return self._dispatched(None)

    def _give_up(self, placed: tuple[Pick, Dispatch]) -> None:
        placed[1].end(self._now())
        self._turns.pump()

    def _dispatched(self, last: Site | None) -> tuple[Pick, Dispatch]:
        now = self._now()
        pick = self._attempts.pick(now, last)
        return pick, pick.site.engine.load.dispatch(self._demand, pick.view, now)

    async def _unless_gone(
        self, what: Coroutine[Any, Any, _T], undo: Callable[[_T], None] = lambda _: None
    ) -> _T:
        """Raises ClientDisconnectedError where the caller hangs up meanwhile. However it ends,
        nothing of ``what`` goes on; ``undo``: of what it brought as it was given up."""
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
        out, wake = self._answer.out, self._wake
        while not waiting.done():
            if out.gone:
                raise ClientDisconnectedError
            waking = asyncio.ensure_future(wake.wait())
            try:
                await asyncio.wait(
                    (waiting, waking), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waking.cancel()
            wake.clear()
            out.tick(self._now(), self._config.sse_keep_alive)
            if out.num_waiting:
                await self._answer.flush(comments=True)
