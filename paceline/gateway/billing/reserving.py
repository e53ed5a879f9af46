"""Reservation for a request before it is sent: the most that it may use, in tokens and money.

If the caller does not limit the answer, only the engines' context bounds it, and if that is
unknown, nothing does. Then the key's remaining budget, or a share of it, is reserved, and the
engine is asked for no more than that (``Body.cap``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from paceline.gateway.requests.body import Body
from paceline.gateway.requests.prompt_size import PromptSize
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.engine_types import TEXT_PATHS
from paceline.gateway.settings.prices import Prices
from paceline.http.rate_limits.rates import Want

__all__ = ["Lengths", "Plan", "endpoints_of"]

# weight of one answer in its model's mean
_LEARN: Final = 0.05
# expected tokens of an answer before any has ended
_UNKNOWN: Final = 512
# stands for an unknown context: no bound
_ANY: Final = 10**9
# safety factor on an estimated prompt, and tokens that a template may add
_MARGIN, _TEMPLATE = 1.25, 64
# tokens reserved per image, audio or document, which never cause a refusal
_MEDIA: Final = 2048


class Lengths:
    """Lengths of ended answers, by model; models are those of the configuration and of engines."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._longest: dict[str, int] = {}

    @property
    def models(self) -> Set[str]:
        """Models that something was learned of."""
        return self._means.keys()

    def learn(self, model: str, made: int) -> None:
        """Learn from an answer of ``made`` tokens."""
        mean = self._means.get(model, made)
        self._means[model] = mean + _LEARN * (made - mean)
        if made > self._longest.get(model, 0):
            self._longest[model] = made

    def mean(self, model: str) -> float | None:
        return self._means.get(model)

    def longest(self, model: str) -> int | None:
        return self._longest.get(model)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens to reserve for one request: its prompt as estimated, and at most; ``num`` answers; and
    of each answer the tokens needed to start it, the usual reservation, and the most it may use."""

    prompt: int
    longest_prompt: int
    num: int
    least: int
    usual: int
    most: int
    # most tokens that an engine is asked for per answer; None: the caller set a limit
    cap: int | None = None
    # prompt tokens that share the context with an answer
    beside: float = 0.0

    @classmethod
    def of(
        cls,
        path: str,
        body: Body,
        endpoints: Sequence[Endpoint],
        size: PromptSize,
        prompt_tokens: float,
        lengths: Lengths,
        model: str,
        default: int,
    ) -> Plan:
        """Plan a request; ``default``: tokens of an answer that neither its caller nor its engine
        bounds."""
        prompt = round(prompt_tokens)
        media = _MEDIA * size.media
        margin = min(round(_MARGIN * prompt_tokens) + _TEMPLATE, round(size.text) + size.ids)
        longest = max(prompt, margin) + media
        if path not in TEXT_PATHS:
            return cls(prompt, longest, 0, 0, 0, 0)
        num, told = body.num_made, body.most_tokens(path)
        if told is not None:
            return cls(prompt, longest, num, told, told, told)
        contexts = [endpoint.max_model_len or _ANY for endpoint in endpoints]
        context = max(contexts, default=_ANY)
        seen = lengths.longest(model)
        usual = max(default, seen or 0)
        # an engine of unknown context may refuse a request for more
        cap = usual if context == _ANY else context
        # some engines ignore limits: until a model's first answer ends, reserve the full context
        most = context if seen is None else cap
        usual = most if seen is None else min(most, usual)
        least = min(usual, round(lengths.mean(model) or _UNKNOWN))
        return cls(prompt, longest, num, least, usual, most, cap, prompt_tokens + media)

    def tokens(self) -> Want:
        num, bare = self.num, self.num if self.cap is not None else self.num * self.least
        return Want(
            self.prompt + num * self.least,
            self.longest_prompt + num * self.usual,
            self.longest_prompt + num * self.most,
            self.prompt + bare,
        )

    def amounts(self, prices: Prices, endpoints: Sequence[tuple[str, str]]) -> Want:
        """Return the plan in money, at the most expensive endpoint."""
        bare = self.tokens().bare - self.prompt
        return Want(
            prices.worst(endpoints, self.prompt, self.num * self.least),
            prices.worst(endpoints, self.longest_prompt, self.num * self.usual),
            prices.worst(endpoints, self.longest_prompt, self.num * self.most),
            prices.worst(endpoints, self.prompt, bare),
        )

    def granted(self, left_beside: Callable[[int], int]) -> int:
        """Return the tokens that a reservation allows for all answers together; ``left_beside``:
        tokens left after a prompt of a given length."""
        least = min(left_beside(self.prompt), self.num * self.least)
        return max(left_beside(self.longest_prompt), least)

    def capped(self, body: Body, granted: int) -> Body:
        """Cap the answers of ``body`` to share ``granted`` tokens, and never raise an earlier
        cap."""
        if self.cap is None:
            return body
        each = min(self.cap, granted // self.num, self.cap if body.cap is None else body.cap)
        return body.capped(max(1, each), self.beside)


def endpoints_of(route: Route) -> list[Endpoint]:
    """Return all endpoints that may serve a route, including those for prompts that prove too
    long."""
    routes = [route] if route.longer is None else [route, route.longer]
    return [endpoint for each in routes for tier in each.tiers for endpoint in tier]
