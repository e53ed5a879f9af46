"""Placement of a request at an engine: the wait for a free slot and for engines' cooldowns, unless
its caller hangs up meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from paceline.gateway.proxy.caller import Caller
from paceline.gateway.proxy.response import Response
from paceline.gateway.proxy.retry_state import RetryState
from paceline.gateway.requests.body import Body
from paceline.gateway.routing.endpoint_queue import Queued
from paceline.gateway.routing.flow_control import FlowControl
from paceline.gateway.routing.picker import AllCoolingDownError, Pick
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.config import GatewayConfig
from paceline.http.errors import ClientDisconnectedError
from paceline.routing import Demand, Dispatch

__all__ = ["Placement"]

_T = TypeVar("_T")

# interval of checks whether the waiting caller is still there, s
_LOOK_SECONDS: Final = 0.1


class Placement:
    """Placement of one request, which arrived at ``arrived``."""

    def __init__(
        self,
        config: GatewayConfig,
        flow_control: FlowControl,
        retries: RetryState,
        demand: Demand,
        body: Body,
        caller: Caller,
        response: Response,
        now: Callable[[], float],
        wake: asyncio.Event,
        arrived: float,
    ) -> None:
        self._config, self._flow_control, self._retries = config, flow_control, retries
        self._demand, self._body, self._caller = demand, body, caller
        self._response, self._now, self._wake, self._arrived = response, now, wake, arrived

    async def place(self, last: Endpoint | None) -> tuple[Pick, Dispatch]:
        """Wait for an engine, and count the request there.

        Args:
            last: endpoint of the attempt before.

        Raises:
            HttpError: no engine can take it, or the wait would be too long.
            ClientDisconnectedError: the caller hung up.
        """
        while True:
            try:
                # a retry does not queue again
                if last is None and self._flow_control.must_wait(self._retries.route, self._demand):
                    return await self._unless_gone(self._queue(), self._give_up)
                return self._dispatched(last)
            except AllCoolingDownError as error:
                seconds = error.seconds
                waited = self._now() - self._arrived
                if seconds > self._config.max_rest_wait - waited:
                    raise
            await self._unless_gone(asyncio.sleep(seconds))

    async def _queue(self) -> tuple[Pick, Dispatch]:
        queued = Queued(
            # callers may reuse their ids
            f"{self._caller.request_id} {id(self)}",
            self._arrived,
            round(self._demand.output_tokens),
            self._body.priority,
            self._caller.tenant,
            self._body.slo,
        )
        async with self._flow_control.slot(self._retries.route, self._demand, queued):
            return self._dispatched(None)

    def _give_up(self, placed: tuple[Pick, Dispatch]) -> None:
        placed[1].end(self._now())
        self._flow_control.pump()

    def _dispatched(self, last: Endpoint | None) -> tuple[Pick, Dispatch]:
        now = self._now()
        pick = self._retries.pick(now, last)
        return pick, pick.endpoint.upstream.load.dispatch(self._demand, pick.view, now)

    async def _unless_gone(
        self, what: Coroutine[Any, Any, _T], undo: Callable[[_T], None] = lambda _: None
    ) -> _T:
        """Await ``what`` unless the caller hangs up, which raises ClientDisconnectedError. On any
        error ``what`` is cancelled, and ``undo`` is called with a result that it had by then."""
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
        out, wake = self._response.downstream, self._wake
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
                await self._response.flush(comments=True)
