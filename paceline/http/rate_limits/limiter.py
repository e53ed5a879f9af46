"""Counts each caller's requests and tokens, refuses those over a limit, and reports it in headers.

::

    door                 enter: one request            refused: 429 before the body is read
    around the engine    hold: prompt + n * max_tokens of every prompt
                                                       refused: 429, or 400 if it can never fit
                         ... tokens flow ...
                                              settle, in any case: unused tokens are given back

Between the door and the engine are five APIs which need not know about limits, so the exchange's
``Ticket`` is passed in a context variable.
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

from paceline.errors import InvalidRequestError
from paceline.http.errors import HttpError
from paceline.http.rate_limits.rates import KeyLimits, Want, Window, go_duration
from paceline.http.rate_limits.store import RateStore

__all__ = ["Hold", "RateLimiter", "Tally", "Ticket", "Usage", "caller_of", "current_ticket"]

# seconds before the window rolls, so that tokens given back still arrive in it
_ROLL_MARGIN: Final = 0.1
# advised wait, s, if another request of the key must end first, which may be soon
_CONCURRENT_WAIT: Final = 1.0
# attempts to reserve what is left, of which others take some meanwhile
_TRIES: Final = 4

_T = TypeVar("_T")

_TICKET: ContextVar[Ticket | None] = ContextVar("paceline_rate_ticket", default=None)


@dataclass(slots=True, eq=False)
class Ticket:
    """The counts of one exchange."""

    # the key's name, or the caller's address if there are no keys
    who: str
    limits: KeyLimits
    # by kind, as last seen
    windows: dict[str, Window] = field(default_factory=dict)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's ``x-ratelimit-*`` headers."""
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
    """Output tokens of one run's requests, counted where every output is seen first, as an answer
    that is sent whole shows nothing before its end."""

    # tokens of all choices of each request
    generated: list[int]

    @classmethod
    def of(cls, count: int) -> Tally:
        return cls([0] * count)

    def note(self, index: int, num_output_tokens: int) -> None:
        self.generated[index] = num_output_tokens


@dataclass(slots=True, eq=False)
class Hold:
    """Tokens that one run has reserved, until it is settled."""

    ticket: Ticket
    tokens: int = 0
    # the window they were taken from; None: the key's tokens are not limited
    window: Window | None = None
    # time until which they can be given back, in seconds of the limiter's clock
    deadline: float = 0.0

    def headers(self, used: int) -> list[tuple[bytes, bytes]]:
        """Return the ticket's headers as they will be after settling with ``used`` tokens."""
        ticket = self.ticket
        if self.window is None:
            return ticket.headers()
        seen = ticket.windows["tokens"]
        after = replace(seen, current=seen.current - self.tokens + used)
        return replace(ticket, windows={**ticket.windows, "tokens": after}).headers()


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of a caller's limits so far."""

    limits: KeyLimits
    # by kind, for limited kinds
    windows: Mapping[str, Window]
    # running generation requests, counted if anything is limited
    running: int


def _add(counts: Counter[str], who: str, amount: int) -> None:
    """Add to a caller's count, and drop the entry at 0."""
    counts[who] += amount
    if not counts[who]:
        del counts[who]


def current_ticket() -> Ticket | None:
    """Return the ticket of the exchange that this code runs for; None without limits."""
    return _TICKET.get()


def caller_of(principal: str, client: Any) -> str:
    """Return the caller to count: the key's name, else the address; of IPv6, the /64 network."""
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
        defaults: limits of callers without their own.
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
        # tokens that this process holds, by caller
        self._held: Counter[str] = Counter()
        self._giving_back: set[asyncio.Task[None]] = set()
        # refused exchanges, by the kind of limit
        self._refused: Counter[str] = Counter({"requests": 0, "tokens": 0, "concurrent": 0})

    def ticket(self, who: str) -> Ticket | None:
        """Make a ticket for ``who`` that ``current_ticket`` will return; None without any limit."""
        limits = self._limits.get(who, self._defaults)
        ticket = Ticket(who, limits) if limits else None
        _TICKET.set(ticket)
        return ticket

    async def usage(self, who: str) -> Usage:
        """Return the present use; counts nothing."""
        limits = self._limits.get(who, self._defaults)
        rates = {"requests": limits.requests, "tokens": limits.tokens}
        windows = {
            kind: await self._store.look(kind, who, rate)
            for kind, rate in rates.items()
            if rate is not None
        }
        return Usage(limits, windows, self._running[who])

    @property
    def is_settled(self) -> bool:
        """Whether no run holds tokens, and none are being given back."""
        return not self._held and not self._giving_back

    def refused(self) -> dict[str, int]:
        """Return the number of refused exchanges so far, by the kind of limit."""
        return dict(self._refused)

    @property
    def store_up(self) -> bool | None:
        """Whether the storage that several servers share responds; None: there is none."""
        return self._store.up if self._store.shared else None

    def charge_batches(self, owner: str) -> None:
        """Count this task's work from here on as ``owner``'s batches: charged against the owner's
        token limit, but separately, so that batches leave the owner's own requests their budget.
        Requests and concurrency are not counted: the batch runner bounds them.
        """
        tokens = self._limits.get(owner, self._defaults).tokens
        # no key has a name with a space
        who = f"batches of {owner}"
        _TICKET.set(None if tokens is None else Ticket(who, KeyLimits(tokens=tokens)))

    async def enter(self, ticket: Ticket) -> None:
        """Count one request. Raises HttpError 429."""
        limits = ticket.limits
        if limits.tokens is not None:
            ticket.windows["tokens"] = await self._store.look("tokens", ticket.who, limits.tokens)
        if limits.requests is not None:
            taken, window = await self._store.take("requests", ticket.who, limits.requests, 1)
            ticket.windows["requests"] = window
            if not taken:
                raise self._too_much("requests", window, 1, window.retry_after(1))

    async def metered(
        self,
        ticket: Ticket,
        prompts: Sequence[int],
        most: int,
        outputs: AsyncGenerator[_T, None],
        tally: Tally,
    ) -> AsyncGenerator[_T, None]:
        """Yield ``outputs`` of a run, after reserving its tokens. ``tally`` holds the tokens used
        at the end.

        Args:
            prompts: tokens of the prompt of each request of the run.
            most: most tokens of their outputs together.

        Raises:
            HttpError: 429, too early.
            InvalidRequestError: more tokens than the limit ever allows.
        """
        hold = await self.hold(ticket, Want.exactly(sum(prompts) + most))
        failed = False
        try:
            async for output in outputs:
                yield output
        except Exception:
            # a request without output costs nothing
            failed = True
            raise
        finally:
            try:
                await outputs.aclose()
            finally:
                read = sum(
                    prompt
                    for prompt, made in zip(prompts, tally.generated, strict=True)
                    if made or not failed
                )
                await self.settle(hold, read + sum(tally.generated))

    async def hold(self, ticket: Ticket, want: Want) -> Hold:
        """Reserve tokens for a run, to be settled when it has ended.

        Raises:
            HttpError: 429, too early.
            InvalidRequestError: more tokens than the limit ever allows.
        """
        most = ticket.limits.concurrent
        if most is not None and self._running[ticket.who] >= most:
            self._refused["concurrent"] += 1
            raise HttpError(
                429,
                f"{most} requests of this key are running, and no more are allowed at once",
                retry_after=_CONCURRENT_WAIT,
            )
        _add(self._running, ticket.who, 1)
        try:
            found = Hold(ticket) if ticket.limits.tokens is None else await self._take(ticket, want)
        except BaseException:
            _add(self._running, ticket.who, -1)
            raise
        _add(self._held, ticket.who, found.tokens)
        return found

    async def _take(self, ticket: Ticket, want: Want) -> Hold:
        rate = ticket.limits.tokens
        assert rate is not None, "asked for where there is a limit"
        want = want.within(rate.amount)
        if want.least > rate.amount:
            raise InvalidRequestError(
                f"this request may take {want.least} tokens (prompt and max_tokens of every "
                f"choice), but its key may take {rate.amount} in {rate.seconds} s: lower "
                "max_tokens or shorten the prompt",
                "max_tokens",
            )
        seen = ticket.windows.get("tokens")
        left = rate.amount if seen is None else seen.remaining
        for _ in range(_TRIES):
            cost = want.of(left)
            taken, window = await self._store.take("tokens", ticket.who, rate, cost)
            ticket.windows["tokens"] = window
            if taken:
                return Hold(ticket, cost, window, self._now() + window.rolls_in - _ROLL_MARGIN)
            left = window.remaining
            if want.of(left) >= cost:
                break
        wait = window.retry_after(want.least)
        if window.used - self._held[ticket.who] + want.least <= rate.amount:
            # the unused part of running requests' reservations will be enough
            wait = min(wait, _CONCURRENT_WAIT)
        raise self._too_much("tokens", window, want.least, wait)

    def _too_much(self, kind: str, window: Window, cost: int, wait: float) -> HttpError:
        self._refused[kind] += 1
        return HttpError(
            429,
            f"too many {kind} for this key: the limit is {window.rate}, {window.remaining} are "
            f"left, this request takes {cost}. Try again in {go_duration(wait)}",
            retry_after=wait,
        )

    async def settle(self, hold: Hold, used: int) -> None:
        """End a run that used ``used`` tokens: give back the rest of its reservation, or charge
        what exceeds it. Best effort: a window that has rolled gets nothing back, as it fades by
        itself."""
        ticket, unused = hold.ticket, hold.tokens - used
        _add(self._running, ticket.who, -1)
        _add(self._held, ticket.who, -hold.tokens)
        if hold.window is None or not unused or (unused > 0 and self._now() >= hold.deadline):
            return
        # shielded: the tokens are given back even if this exchange is cancelled
        task = asyncio.ensure_future(
            self._store.give_back("tokens", ticket.who, hold.window, unused)
        )
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
        window = ticket.windows["tokens"]
        ticket.windows["tokens"] = replace(window, current=window.current - unused)
        await asyncio.shield(task)

    async def close(self) -> None:
        await asyncio.gather(*self._giving_back, return_exceptions=True)
        await self._store.close()

    def collect(self) -> Iterator[Metric]:
        """Yield metrics. No label holds a caller's name, as their number is not bounded."""
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
                "Failed operations of the shared storage.",
                value=self._store.failures,
            )
