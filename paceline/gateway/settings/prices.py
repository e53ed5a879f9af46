"""Cost of an answer: amounts, prices, and budgets of keys. Pure.

An amount is an ``int`` in millionths of a millionth of the currency, so that a price per million
tokens is a whole number per token, and sums are exact.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final, Literal

import msgspec

from paceline.errors import ConfigError

__all__ = ["Budget", "Price", "Prices", "Used", "Window", "parse_amount", "show_amount"]

_UNIT: Final = 10**12
_MILLION: Final = 10**6
# largest price or budget
_MAX: Final = Decimal(10**6)
# largest cost of one request, whatever was counted: as large as any budget. SQLite and Redis count
# with 63 bits, nine times that
_MOST_COST: Final = 10**18
_BUDGET: Final = re.compile(r"([0-9.]{1,20})/(day|month|total)")

Window = Literal["day", "month", "total"]


def parse_amount(value: str | int | float, what: str) -> int:
    """Parse a number from 0 with at most six decimal places. Raises ConfigError, naming
    ``what``."""
    try:
        # a float's shortest form is what was written in the file
        found = Decimal(str(value))
    except InvalidOperation:
        raise ConfigError(
            f"{what} must be an amount such as 2.50, got {str(value)[:40]!r}"
        ) from None
    if not found.is_finite() or not 0 <= found <= _MAX or found * _MILLION % 1:
        raise ConfigError(
            f"{what} must be 0 to {_MAX} with at most six places, got {str(value)[:40]!r}"
        )
    return int(found * _UNIT)


def show_amount(amount: int) -> str:
    """Format an amount with all its decimal places, at least two."""
    whole, rest = divmod(abs(amount), _UNIT)
    places = f"{rest:012d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}{whole}.{places}"


class Used(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt: int = 0
    # prompt tokens that the engine had in its cache
    cached: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """Price per token, and per request."""

    input: int
    cached_input: int
    output: int
    request: int = 0

    @classmethod
    def per_million(cls, input: int, cached_input: int, output: int, *, request: int = 0) -> Price:
        """Make a price from amounts per million tokens, as vendors quote them."""
        return cls(input // _MILLION, cached_input // _MILLION, output // _MILLION, request)

    def of(self, used: Used, *, whole: bool = True) -> int:
        """Return the cost; ``whole``: False for a further engine, without ``request``."""
        cached = min(used.cached, used.prompt)
        cost = (
            (self.request if whole else 0)
            + (used.prompt - cached) * self.input
            + cached * self.cached_input
            + used.output * self.output
        )
        return min(cost, _MOST_COST)


class Prices:
    """Prices by (engine, model), either of which may be "": any."""

    def __init__(self, rows: Mapping[tuple[str, str], Price]) -> None:
        self._rows = dict(rows)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def find(self, engine: str, model: str) -> Price | None:
        """Return the most specific row for an endpoint; None if there is none."""
        for row in ((engine, model), (engine, ""), ("", model), ("", "")):
            if row in self._rows:
                return self._rows[row]
        return None

    def worst(self, endpoints: Iterable[tuple[str, str]], prompt: int, most_output: int) -> int:
        """Return the cost of a request at the most expensive of its endpoints."""
        used = Used(prompt, 0, most_output)
        found = (self.find(*place) for place in endpoints)
        return max((price.of(used) for price in found if price is not None), default=0)

    def affords(self, endpoints: Iterable[tuple[str, str]], prompt: int, amount: int) -> int:
        """Return the output tokens that ``amount`` buys after a prompt, at the costliest
        endpoint."""
        found = [self.find(*place) for place in endpoints]
        return min(
            (
                (amount - price.of(Used(prompt))) // price.output
                for price in found
                if price is not None and price.output
            ),
            default=_MOST_COST,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """Amount per day, per month (UTC calendar), or in total."""

    amount: int
    window: Window

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse ``5.00/day``, ``100/month``, ``20/total``. Raises ConfigError."""
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"a budget is written AMOUNT/day, /month or /total, got {text[:60]!r}"
            )
        window: Window = match[2]  # type: ignore[assignment]
        return cls(parse_amount(match[1], "a budget"), window)

    def begins(self, now: float) -> str:
        """Return the first day of the window that holds ``now`` (Unix seconds); "" for a total."""
        day = datetime.datetime.fromtimestamp(now, datetime.UTC).date()
        if self.window == "total":
            return ""
        return (day if self.window == "day" else day.replace(day=1)).isoformat()

    def ends_in(self, now: float) -> float | None:
        """Seconds until the next window; None: never."""
        if self.window == "total":
            return None
        then = datetime.datetime.fromtimestamp(now, datetime.UTC)
        begin = then.replace(hour=0, minute=0, second=0, microsecond=0)
        if self.window == "day":
            end = begin + datetime.timedelta(days=1)
        else:
            end = (begin.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
        return (end - then).total_seconds()

    def __str__(self) -> str:
        return f"{show_amount(self.amount)}/{self.window}"
