"""Flow control: queues for engines that are at their bound of requests (``max_concurrent``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from paceline.gateway.routing.endpoint_queue import EndpointQueue, Queued
from paceline.gateway.routing.picker import Picker
from paceline.gateway.routing.routes import Route
from paceline.gateway.settings.config import GatewayConfig
from paceline.routing import Demand

__all__ = ["FlowControl"]


@dataclass(slots=True, eq=False)
class _QueuedRequest:
    route: Route
    demand: Demand
    granted: asyncio.Future[None]


class FlowControl:
    """A queue for each model that needs one.

    Args:
        has_bounds: returns whether any engine has a bound on its requests.
    """

    def __init__(
        self,
        config: GatewayConfig,
        picker: Picker,
        now: Callable[[], float],
        has_bounds: Callable[[], bool],
    ) -> None:
        self._config, self._picker, self._now = config, picker, now
        self._has_bounds = has_bounds
        self._queues: dict[str, EndpointQueue] = {}
        self._waiting: dict[str, dict[str, _QueuedRequest]] = {}
        # free slots that were granted to a request but not used yet
        self._granted: Counter[str] = Counter()

    def change(self, config: GatewayConfig) -> None:
        """Apply another configuration; queues with waiting requests stay as they are."""
        self._config = config
        for model in [model for model in self._queues if not self._waiting.get(model)]:
            del self._queues[model]

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def must_wait(self, route: Route, demand: Demand) -> bool:
        """Whether other requests wait, or there is no free slot."""
        if self._waiting and self._waiting.get(route.model):
            return True
        return self._has_bounds() and self._free_slots(route, demand) == 0.0

    @contextlib.asynccontextmanager
    async def slot(self, route: Route, demand: Demand, queued: Queued) -> AsyncIterator[None]:
        """Wait for a free slot; the request that is sent within the block takes it.

        Raises:
            QueueFullError: too many requests wait, or this one waited too long.
        """
        model = route.model
        await self._wait(route, demand, queued)
        try:
            yield
        finally:
            self._granted[model] -= 1

    def pump(self) -> None:
        """Grant free slots to waiting requests, after a request ended or an engine came back."""
        if not self._waiting:
            return
        now = self._now()
        for model, waiting in list(self._waiting.items()):
            queue = self._queues[model]
            while waiting:
                first = next(iter(waiting.values()))
                if self._free_slots(first.route, first.demand) == 0.0:
                    break
                queue.free(now)
                chosen = queue.next(now)
                for dropped in queue.expired():
                    late = waiting.pop(dropped.request_id, None)
                    if late is not None and not late.granted.done():
                        late.granted.set_exception(dropped.error)
                if chosen is None:
                    break
                entry = waiting.pop(chosen, None)
                if entry is not None and not entry.granted.done():
                    self._granted[model] += 1
                    entry.granted.set_result(None)

    async def _wait(self, route: Route, demand: Demand, queued: Queued) -> None:
        model = route.model
        queue = self._queues.get(model)
        if queue is None:
            config = self._config
            queue = self._queues[model] = EndpointQueue(
                config.queue_policy,
                max_waiting=config.max_num_waiting,
                timeout=config.queue_timeout,
            )
        queue.add(queued)
        entry = _QueuedRequest(route, demand, asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(model, {})
        waiting[queued.request_id] = entry
        self.pump()
        try:
            await entry.granted
        except asyncio.CancelledError:
            if entry.granted.done() and not entry.granted.cancelled():
                # the slot was granted just as the caller left
                self._granted[model] -= 1
                self.pump()
            raise
        finally:
            if waiting.pop(queued.request_id, None) is not None:
                queue.leave(queued.request_id)

    def _free_slots(self, route: Route, demand: Demand) -> float:
        """Return the free slots that are not granted yet; infinite without a bound, or without any
        usable engine, for which a request cannot wait."""
        free = self._picker.free_slots(route, demand, self._now())
        return max(0.0, free - self._granted[route.model])
