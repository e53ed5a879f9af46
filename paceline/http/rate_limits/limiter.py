"""Counts what every caller asks for, refuses what is too much, and says so in headers.

::

    door                 enter: one request            refused: 429 before the body is read
    around the engine    metered: prompt + n * max_tokens of every prompt
                                                       refused: 429, or 400 if it can never fit
                         ... tokens flow ...
                         at the end, however it comes: what was not generated is given back

Between the door and the engine lie five APIs which need not know of any of this, so the exchange's
``Ticket`` goes from one to the other in a context variable.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.errors import InvalidRequestError, RequestError
from paceline.http.errors import HttpError
from paceline.http.rate_limits.rates import KeyLimits, Window, go_duration
from paceline.http.rate_limits.store import RateStore

__all__ = ["RateLimiter", "Tally", "Ticket", "Usage", "caller_of", "current_ticket"]

# before the window rolls, time for what is given back to arrive in it
_ROLL_MARGIN: Final = 0.1
# advised wait when a key has too many requests at once: nobody knows when one ends
_CONCURRENT_WAIT: Final = 1.0

_T = TypeVar("_T")

_TICKET: ContextVar[Ticket | None] = ContextVar("paceline_rate_ticket", default=None)


@dataclass(slots=True, eq=False)
class Ticket:
    """What one exchange was counted as."""

    # the key's name, or the caller's address where there are no keys
    who: str
    limits: KeyLimits
    # by kind, as last seen
    windows: dict[str, Window] = field(default_factory=dict)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's ``x-ratelimit-*``."""
        found: list[tuple[bytes, bytes]] = []
        for kind, window in self.windows.items():
            for name, value in (
                ("limit", str(window.rate.amount)),
                ("remaining", str(window.remaining)),
                ("reset", go_duration(window.reset_after)),
            ):
                found.append((f"x-ratelimit-{name}-{kind}".encode(), value.encode()))
        return found


@dataclass(slots=True, eq=False)
class Tally:
    """What came of the requests of one run, kept by whoever sees every output first: an answer
    that goes out whole shows nothing before its end."""

    # per request: the engine has sent something; tokens of all its choices
    begun: list[bool]
    generated: list[int]

    @classmethod
    def of(cls, count: int) -> Tally:
        return cls([False] * count, [0] * count)

    def note(self, index: int, num_output_tokens: int) -> None:
        self.begun[index], self.generated[index] = True, num_output_tokens


@dataclass(frozen=True, slots=True)
class Usage:
    """What a caller has used of its limits."""

    limits: KeyLimits
    # by kind, of those that are limited
    windows: Mapping[str, Window]
    # generation requests under way, where anything is limited
    running: int


def current_ticket() -> Ticket | None:
    """The ticket of the exchange that this code runs for; None where nothing is limited."""
    return _TICKET.get()


def caller_of(principal: str, client: Any) -> str:
    """Who is counted: the key's name, else the address, of IPv6 the network of a household."""
    if principal:
        return principal
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host[:64]}"
    if address.version == 6:
        return f"address {ipaddress.ip_network((address, 64), strict=False).network_address}"
    return f"address {address}"


class RateLimiter(Collector):
    """The limits of one server. Used on its event loop; also a collector of metrics.

    Args:
        defaults: what holds for callers without limits of their own.
        overrides: by key name, fields of KeyLimits that differ from ``defaults``.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        defaults: KeyLimits,
        overrides: Mapping[str, Mapping[str, Any]],
        store: RateStore,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._defaults = defaults
        self._limits = {name: replace(defaults, **own) for name, own in overrides.items()}
        self._store = store
        self._now = now
        self._running: Counter[str] = Counter()
        self._giving_back: set[asyncio.Task[None]] = set()
        # refused exchanges, by what was too much
        self._refused: Counter[str] = Counter({"requests": 0, "tokens": 0, "concurrent": 0})

    def ticket(self, who: str) -> Ticket | None:
        """A ticket for ``who`` that ``current_ticket`` will find; None without any limit."""
        limits = self._limits.get(who, self._defaults)
        ticket = Ticket(who, limits) if limits else None
        _TICKET.set(ticket)
        return ticket

    async def usage(self, who: str) -> Usage:
        """As it is now; counts nothing."""
        limits = self._limits.get(who, self._defaults)
        rates = {"requests": limits.requests, "tokens": limits.tokens}
        windows = {
            kind: await self._store.look(kind, who, rate)
            for kind, rate in rates.items()
            if rate is not None
        }
        return Usage(limits, windows, self._running[who])

    def refused(self) -> dict[str, int]:
        """Exchanges so far, by the kind of what was too much."""
        return dict(self._refused)

    @property
    def store_up(self) -> bool | None:
        """Whether the storage that several servers share answers; None: there is none."""
        return self._store.up if self._store.shared else None

    def charge_batches(self, owner: str) -> None:
        """What this task runs from here on is work for ``owner``'s batches: charged against the
        owner's token limit, but counted apart, so that a batch leaves its owner's own requests
        what they had. Requests and concurrency are not counted: whoever runs batches bounds them.
        """
        tokens = self._limits.get(owner, self._defaults).tokens
        # no key has a name with a space in it
        who = f"batches of {owner}"
        _TICKET.set(None if tokens is None else Ticket(who, KeyLimits(tokens=tokens)))

    async def enter(self, ticket: Ticket) -> None:
        """Count one request. Raises HttpError 429."""
        limits = ticket.limits
        if limits.tokens is not None:
            ticket.windows["tokens"] = await self._store.look("tokens", ticket.who, limits.tokens)
        if limits.requests is not None:
            await self._take("requests", ticket, 1)

    async def metered(
        self,
        ticket: Ticket,
        prompts: Sequence[int],
        most: int,
        outputs: AsyncGenerator[_T, None],
        tally: Tally,
    ) -> AsyncGenerator[_T, None]:
        """``outputs`` of a run, after its tokens were reserved. ``tally`` says at the end what was
        used.

        Args:
            prompts: tokens of the prompt of each request of the run.
            most: tokens that their outputs may have together.

        Raises:
            HttpError: 429, now is too early.
            InvalidRequestError: more tokens than the limit allows at any time.
        """
        reserved = sum(prompts) + most
        refused = False
        self._start(ticket)
        reservation = None
        try:
            if ticket.limits.tokens is not None:
                reservation = await self._reserve(ticket, reserved)
            async for output in outputs:
                yield output
        except RequestError:
            # the engine did not take it
            refused = True
            raise
        finally:
            self._running[ticket.who] -= 1
            if not self._running[ticket.who]:
                del self._running[ticket.who]
            await outputs.aclose()
            if reservation is not None:
                read = sum(
                    prompt
                    for prompt, seen in zip(prompts, tally.begun, strict=True)
                    if seen or not refused
                )
                unused = reserved - read - sum(tally.generated)
                await self._give_back(ticket, unused, *reservation)

    def _start(self, ticket: Ticket) -> None:
        most = ticket.limits.concurrent
        if most is not None and self._running[ticket.who] >= most:
            self._refused["concurrent"] += 1
            raise HttpError(
                429,
                f"{most} requests of this key are under way already, and no more are allowed at "
                "once",
                retry_after=_CONCURRENT_WAIT,
            )
        self._running[ticket.who] += 1

    async def _reserve(self, ticket: Ticket, cost: int) -> tuple[Window, float]:
        """The window it was taken from, and until when it can be given back, in seconds of
        ``now``."""
        rate = ticket.limits.tokens
        assert rate is not None, "asked for where there is a limit"
        if cost > rate.amount:
            raise InvalidRequestError(
                f"this request may take {cost} tokens (prompt and max_tokens of every choice), and "
                f"its key's limit is {rate.amount} in {rate.seconds} s: lower max_tokens or "
                "shorten the prompt",
                "max_tokens",
            )
        window = await self._take("tokens", ticket, cost)
        return window, self._now() + window.rolls_in - _ROLL_MARGIN

    async def _take(self, kind: str, ticket: Ticket, cost: int) -> Window:
        rate = getattr(ticket.limits, kind)
        taken, window = await self._store.take(kind, ticket.who, rate, cost)
        ticket.windows[kind] = window
        if not taken:
            self._refused[kind] += 1
            wait = window.retry_after(cost)
            raise HttpError(
                429,
                f"too many {kind} for this key: the limit is {rate}, {window.remaining} are left, "
                f"this request takes {cost}. Try again in {go_duration(wait)}",
                retry_after=wait,
            )
        return window

    async def _give_back(
        self, ticket: Ticket, amount: int, taken_from: Window, deadline: float
    ) -> None:
        """Best effort: a window that has rolled is left alone, it fades by itself."""
        if amount <= 0 or self._now() >= deadline:
            return
        # this exchange may be cancelled, what it owes is given back all the same
        task = asyncio.ensure_future(
            self._store.give_back("tokens", ticket.who, taken_from, amount)
        )
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
        window = ticket.windows["tokens"]
        ticket.windows["tokens"] = replace(window, current=window.current - amount)
        await asyncio.shield(task)

    async def close(self) -> None:
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        await self._store.close()

    def collect(self) -> Iterator[Metric]:
        """No label holds a caller's name: their number is not the server's to bound."""
        refused = CounterMetricFamily(
            "paceline:rate_limited", "Requests refused by a limit of their key.", labels=("limit",)
        )
        for kind, count in self._refused.items():
            refused.add_metric((kind,), count)
        yield refused
        if self._store.shared:
            yield GaugeMetricFamily(
                "paceline:rate_limit_storage_up",
                "1 while the shared storage answers; 0: this process counts alone.",
                value=float(self._store.up),
            )
            yield CounterMetricFamily(
                "paceline:rate_limit_storage_failures",
                "Operations that the shared storage did not do.",
                value=self._store.failures,
            )
