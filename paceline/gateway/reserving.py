"""What is reserved for a request before it is sent: the most that it may use, in tokens and money.

Where its caller does not say how long an answer may be, nothing bounds it but the context of its
engines, and where they do not tell that, nothing at all. So what is reserved is what its key has
left, or a share of it, and the engine is asked for no more than that (``Body.cap``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from paceline.gateway.bodies import Body
from paceline.gateway.kinds import TEXT_PATHS
from paceline.gateway.money import Prices
from paceline.gateway.prompts import PromptSize
from paceline.gateway.routes import Route, Site
from paceline.http.rate_limits import Want

__all__ = ["Lengths", "Plan", "sites_of"]

# weight of one answer in the mean of a model's
_LEARN: Final = 0.05
# tokens that an answer has before any has ended
_UNKNOWN: Final = 512
# as many as can be told: there is no bound
_ANY: Final = 10**9
# of the estimate of a prompt, and tokens beside it, by which it may be longer: templates add some
_MARGIN, _TEMPLATE = 1.25, 64
# tokens of a picture, a sound or a document, for which a request is not refused
_MEDIA: Final = 2048


class Lengths:
    """Of the answers that have ended, by model: those of the configuration and of the engines."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}
        self._longest: dict[str, int] = {}

    @property
    def models(self) -> Set[str]:
        """Of which something was learned."""
        return self._means.keys()

    def learn(self, model: str, made: int) -> None:
        """An answer of so many tokens has ended."""
        mean = self._means.get(model, float(made))
        self._means[model] = mean + _LEARN * (made - mean)
        self._longest[model] = max(made, self._longest.get(model, 0))

    def mean(self, model: str) -> float | None:
        return self._means.get(model)

    def longest(self, model: str) -> int | None:
        return self._longest.get(model)


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one request: tokens of its prompt as estimated, and as they may be; how many answers are
    made; and of each the tokens without which it is not begun, that it is given as a rule, and that
    it may have."""

    prompt: int
    longest_prompt: int
    num: int
    least: int
    usual: int
    most: int
    # tokens that an engine is asked for at most; None: the caller has said it
    cap: int | None = None
    # of the prompt beside an answer in a context
    beside: float = 0.0

    @classmethod
    def of(
        cls,
        path: str,
        body: Body,
        sites: Sequence[Site],
        size: PromptSize,
        prompt_tokens: float,
        lengths: Lengths,
        model: str,
        default: int,
    ) -> Plan:
        """``default``: tokens of an answer for which neither its caller nor its engine has a
        bound."""
        prompt = round(prompt_tokens)
        media = _MEDIA * size.media
        margin = min(round(_MARGIN * prompt_tokens) + _TEMPLATE, round(size.text) + size.ids)
        longest = max(prompt, margin) + media
        if path not in TEXT_PATHS:
            return cls(prompt, longest, 0, 0, 0, 0)
        num, told = body.num_made, body.most_tokens(path)
        if told is not None:
            return cls(prompt, longest, num, told, told, told)
        contexts = [site.max_model_len or _ANY for site in sites]
        context = max(contexts, default=_ANY)
        seen = lengths.longest(model)
        usual = max(default, seen or 0)
        # one that does not say how much it can make may refuse to be asked for more
        cap = usual if context == _ANY else context
        # some engines heed no limit: nothing is known of a model before an answer of it has ended
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

    def amounts(self, prices: Prices, places: Sequence[tuple[str, str]]) -> Want:
        """The same in money, at the dearest of places."""
        bare = self.tokens().bare - self.prompt
        return Want(
            prices.worst(places, self.prompt, self.num * self.least),
            prices.worst(places, self.longest_prompt, self.num * self.usual),
            prices.worst(places, self.longest_prompt, self.num * self.most),
            prices.worst(places, self.prompt, bare),
        )

    def granted(self, left_beside: Callable[[int], int]) -> int:
        """Tokens for all answers together of what was reserved; ``left_beside``: a prompt of so
        many tokens."""
        least = min(left_beside(self.prompt), self.num * self.least)
        return max(left_beside(self.longest_prompt), least)

    def capped(self, body: Body, granted: int) -> Body:
        """``body`` with answers of no more tokens than ``granted`` is for all of them, or than it
        was before."""
        if self.cap is None:
            return body
        each = min(self.cap, granted // self.num, self.cap if body.cap is None else body.cap)
        return body.capped(max(1, each), self.beside)


def sites_of(route: Route) -> list[Site]:
    """All to which its requests may go: a prompt that turns out too long goes to another model."""
    routes = [route] if route.longer is None else [route, route.longer]
    return [site for each in routes for tier in each.tiers for site in tier]
