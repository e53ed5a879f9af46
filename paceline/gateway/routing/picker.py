"""Choice of an engine for a request: filters here, the rest by ``routing``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.gateway.routing.routes import Endpoint, Route
from paceline.http.errors import HttpError
from paceline.routing import TRICKLE, Demand, EngineView, HandOvers, choose, slow_ones
from paceline.wire import fast_paths

__all__ = ["AllCoolingDownError", "Pick", "Picker", "Tried"]

# tokens are estimated from bytes: beyond this multiple of the context they are probably too many
_PROBABLE: Final = 1.5
# seconds without a request after which an engine gets one, so that its estimates stay current
_FORGOTTEN: Final = 15.0
# interval at which the engines of a tier are compared, s
_JUDGE_SECONDS: Final = 0.1
# endpoints of a tier above which a choice is among some of them: those with the longest prefixes of
# the prompt, and others at random, together so many
_MANY: Final = 32
_CANDIDATES: Final = 16
_WITH_PREFIX: Final = 4
_Only = Callable[[Endpoint], bool]
# engines, or (engine, model) pairs, where a request was tried
Tried = Collection[str | tuple[str, str]]


class AllCoolingDownError(HttpError):
    """Every engine that could take the request has asked for a cooldown."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(429, message, retry_after=seconds)
        # until the first cooldown ends
        self.seconds = seconds


class Pick(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    # the engine as the choice saw it
    view: EngineView


class Picker:
    """Picker of one gateway.

    Args:
        draw: breaks ties between equally good engines.
        slow_factor: factor over its usual first-token times that makes an engine slow; 0: never.
    """

    def __init__(self, draw: random.Random, slow_factor: float = 0.0) -> None:
        self._draw = draw
        self._slow_factor = slow_factor
        # hand-overs between the engines of all routes
        self.hand_overs = HandOvers()
        # (model, tier) -> when its engines were last compared, and the slow ones
        self._slow: dict[tuple[str, int], tuple[float, frozenset[str]]] = {}
        self._may_skip = fast_paths.are_on()

    def change(self, slow_factor: float) -> None:
        """Apply another ``slow_factor``."""
        self._slow_factor = slow_factor

    def pick(
        self,
        route: Route,
        demand: Demand,
        now: float,
        *,
        tried: Tried = (),
        fallback: bool = True,
        only: _Only | None = None,
        late: bool = False,
        drained: bool = False,
        prompts: bool = False,
    ) -> Pick:
        """Pick an engine, one that was not tried if possible.

        Args:
            fallback: whether later tiers may serve the request.
            only: further condition on an endpoint.
            late: whether to try an engine without a sign of life if there is no other: it may only
                be late.
            drained: whether to use a drained engine if there is no other: a stream that has begun
                goes on there rather than not at all.
            prompts: whether to pick one whose role is to compute prompts; these make answers only
                where no other engine does.

        Raises:
            AllCoolingDownError: the engines that could take it have asked for a cooldown.
            HttpError: 503, no engine can take it now, with each one's reason; 400, none ever can.
        """
        if self._may_skip and not tried and only is None and not route.apart:
            lone = _lone(route, demand, now)
            if lone is not None:
                return lone
        reasons: dict[str, str] = {}
        pressed: Pick | None = None
        doubtful: list[Endpoint] = []
        tiers = route.usable_tiers(fallback=fallback)
        slow: frozenset[str] = frozenset()
        # a stream that is resumed has waited in the queue before
        queues = only is None or prompts
        if route.apart:
            only = _in_part(only, prompts=prompts)
        for tier in tiers:
            if len(tier) > 1:
                slow |= self._slow_of(route, tier, now)
            endpoints: list[Endpoint] = []
            if route.apart and not prompts:
                first = [each for each in tier if each.upstream.role != "prompts"]
                endpoints = self._fit(first, route.path, demand, now, tried, only, queues, reasons)
            endpoints = endpoints or self._fit(
                tier, route.path, demand, now, tried, only, queues, reasons
            )
            roomy = [endpoint for endpoint in endpoints if not _probably_too_long(endpoint, demand)]
            if not roomy:
                # probably too long everywhere: the engine itself counts the tokens
                doubtful = doubtful or endpoints
                continue
            pick = self._choose(roomy, demand, now, slow)
            if pick.view.pressed and route.pressure_fallback and tier is not tiers[-1]:
                pressed = pressed or pick
                reasons[pick.endpoint.upstream.name] = "short of memory"
                continue
            return pick
        if pressed is not None:
            return pressed
        if doubtful:
            return self._choose(doubtful, demand, now, slow)
        return self._past_breakers(
            route, demand, now, tried=tried, only=only, late=late, drained=drained,
            tiers=tiers, slow=slow, reasons=reasons,
        )  # fmt: skip

    def _past_breakers(
        self,
        route: Route,
        demand: Demand,
        now: float,
        *,
        tried: Tried,
        only: _Only | None,
        late: bool,
        drained: bool,
        tiers: Sequence[Sequence[Endpoint]],
        slow: frozenset[str],
        reasons: dict[str, str],
    ) -> Pick:
        """Pick an engine that its breaker, or a cooldown, keeps requests from, where there is no
        other: breakers count past failures, and an engine that answers is better than none. Raises
        as ``pick``."""
        last = [
            endpoint
            for tier in tiers
            for endpoint in tier
            if (only is None or only(endpoint))
            and (drained or not endpoint.upstream.draining)
            and not (endpoint.upstream.is_unreachable if late else endpoint.upstream.trouble)
            and not _was_tried(endpoint, tried)
            and not _too_long(endpoint, demand)
            and not endpoint.lacks_model
        ]
        ready = [endpoint for endpoint in last if not endpoint.cooldown_left(now)]
        if ready:
            sure = [endpoint for endpoint in ready if not endpoint.upstream.trouble]
            return self._choose(sure or ready, demand, now, slow)
        if last:
            seconds = min(endpoint.cooldown_left(now) for endpoint in last)
            raise AllCoolingDownError(
                f"all engines of {route.model} requested a cooldown; one ends in {seconds:.1f} s",
                seconds,
            )
        raise self._none(route, tiers, demand, now, reasons)

    def can_pick(
        self,
        route: Route,
        demand: Demand,
        now: float,
        tried: Tried,
        only: _Only,
        *,
        fallback: bool = True,
        drained: bool = False,
    ) -> bool:
        """Whether ``pick`` would find an engine that was not tried."""
        try:
            self.pick(
                route, demand, now, tried=tried, fallback=fallback, only=only, drained=drained
            )
        except HttpError:
            return False
        return True

    def free_slots(self, route: Route, demand: Demand, now: float) -> float:
        """Return the free slots of a route's usable engines; infinite if no engine has a bound, or
        none is usable."""
        endpoints = [
            endpoint for tier in route.usable_tiers(fallback=route.fallback) for endpoint in tier
        ]
        if route.apart:
            answers = _in_part(None, prompts=False)
            endpoints = [endpoint for endpoint in endpoints if answers(endpoint)]
        if not any(endpoint.upstream.config.max_concurrent for endpoint in endpoints):
            return math.inf
        usable = [
            endpoint.upstream
            for endpoint in endpoints
            if not endpoint.lacks_model
            and not _too_long(endpoint, demand)
            and not endpoint.usable(now, route.path)
        ]
        return sum(upstream.free_slots for upstream in usable) if usable else math.inf

    def _fit(
        self,
        tier: Sequence[Endpoint],
        path: str,
        demand: Demand,
        now: float,
        tried: Tried,
        only: _Only | None,
        queues: bool,
        reasons: dict[str, str],
    ) -> list[Endpoint]:
        fit: list[Endpoint] = []
        many = len(tier) > _MANY
        for endpoint in self._candidates(tier, demand) if many else tier:
            why = (
                "tried"
                if tried and _was_tried(endpoint, tried)
                else ("computes prompts alone" if queues else "cannot resume the stream")
                if only is not None and not only(endpoint)
                else f"has no model {endpoint.model}"
                if endpoint.lacks_model
                else _too_long(endpoint, demand)
                or (endpoint.available(now, path) if queues else endpoint.usable(now, path))
            )
            if why:
                reasons[endpoint.upstream.name] = why
            else:
                fit.append(endpoint)
                if many and len(fit) == _CANDIDATES:
                    break
        return fit

    def _candidates(self, tier: Sequence[Endpoint], demand: Demand) -> Iterator[Endpoint]:
        """Yield a tier's endpoints, each once: a few that have the longest prefix of the prompt,
        then all others in an order that differs from choice to choice."""
        count, chain = len(tier), demand.prefix
        best: Sequence[int] = ()
        if chain:
            first = chain[0]
            have = [i for i, each in enumerate(tier) if first in each.upstream.load.prefixes.runs]
            if len(have) > _MANY:
                # a common beginning, such as a system prompt
                have = self._draw.sample(have, _MANY)
            length = {i: tier[i].upstream.load.prefixes.matched(chain) for i in have}
            best = sorted(have, key=length.__getitem__, reverse=True)[:_WITH_PREFIX]
        yield from (tier[i] for i in best)
        # a step that has no factor in common with the count visits every place
        at, step = self._draw.randrange(count), self._draw.randrange(1, count)
        while math.gcd(step, count) > 1:
            step = self._draw.randrange(1, count)
        for _ in range(count):
            if at not in best:
                yield tier[at]
            at = (at + step) % count

    def _slow_of(self, route: Route, tier: Sequence[Endpoint], now: float) -> frozenset[str]:
        """Return a tier's slow engines, compared once in ``_JUDGE_SECONDS``."""
        key = route.model, tier[0].tier
        judged_at, slow = self._slow.get(key, (-math.inf, frozenset()))
        if not 0.0 <= now - judged_at < _JUDGE_SECONDS:
            paces = {each.upstream.name: each.upstream.load.pace for each in tier}
            slow = frozenset(slow_ones(paces, self._slow_factor, now))
            self._slow[key] = now, slow
        return slow

    def _choose(
        self, endpoints: Sequence[Endpoint], demand: Demand, now: float, slow: Collection[str]
    ) -> Pick:
        if len(endpoints) == 1:
            return Pick(endpoints[0], _view(endpoints[0], demand, now, 1.0))
        views = [
            _view(
                endpoint,
                demand,
                now,
                TRICKLE
                if endpoint.upstream.name in slow
                else endpoint.upstream.share_of(endpoint.model, now),
            )
            for endpoint in endpoints
        ]
        index = _forgotten(endpoints, views, demand, now)
        if index is None:
            index = choose(views, demand, self._draw)
        return Pick(endpoints[index], views[index])

    def _none(
        self,
        route: Route,
        tiers: Sequence[Sequence[Endpoint]],
        demand: Demand,
        now: float,
        reasons: dict[str, str],
    ) -> HttpError:
        endpoints = [endpoint for tier in tiers for endpoint in tier]
        too_long = [_too_long(endpoint, demand) for endpoint in endpoints]
        if endpoints and all(too_long):
            return HttpError(400, f"model {route.model}: {too_long[0]}, at all of its engines")
        told = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:8])
        waits = [endpoint.reopens_in(now, route.path) for endpoint in endpoints] or [1.0]
        return HttpError(
            503,
            f"no engine can take a request for {route.model} now ({told or 'it has no engines'})",
            retry_after=max(1.0, min(waits)),
        )


def _in_part(only: _Only | None, *, prompts: bool) -> _Only:
    """Return ``only`` with the condition that an engine computes prompts, or makes answers: one of
    SGLang's that computes prompts does nothing else."""

    def plays(endpoint: Endpoint) -> bool:
        is_for_prompts = endpoint.upstream.role == "prompts"
        fits = (
            is_for_prompts
            if prompts
            else not (is_for_prompts and endpoint.upstream.kind == "sglang")
        )
        return fits and (only is None or only(endpoint))

    return plays


def _lone(route: Route, demand: Demand, now: float) -> Pick | None:
    """Fast path of a first attempt: pick the route's only engine; None: there are others, or it may
    not fit."""
    tiers = route.tiers
    if len(tiers) != 1 or len(tiers[0]) != 1:
        return None
    endpoint = tiers[0][0]
    if (
        endpoint.lacks_model
        or endpoint.available(now, route.path)
        or _too_long(endpoint, demand)
        or _probably_too_long(endpoint, demand)
    ):
        return None
    return Pick(endpoint, _view(endpoint, demand, now, 1.0))


def _was_tried(endpoint: Endpoint, tried: Tried) -> bool:
    return endpoint.upstream.name in tried or endpoint.key in tried


def _view(endpoint: Endpoint, demand: Demand, now: float, share: float) -> EngineView:
    """Return an engine as a choice sees it: one that has the adapter comes before one that would
    have to load it."""
    view = endpoint.upstream.load.view(demand, now, share)
    load = endpoint.upstream.load_seconds(endpoint.model)
    return replace(view, ttft=view.ttft + load) if load else view


def _forgotten(
    endpoints: Sequence[Endpoint], views: Sequence[EngineView], demand: Demand, now: float
) -> int | None:
    """Return an idle engine without requests for so long that its estimates may be outdated; None
    if there is none, or if the request has a target that this would risk."""
    if len(endpoints) < 2 or demand.ttft is not None:
        return None
    found = [
        (endpoint.upstream.load.sent_at, index)
        for index, endpoint in enumerate(endpoints)
        if now - endpoint.upstream.load.sent_at > _FORGOTTEN
        and not views[index].num_requests
        and not views[index].pressed
        # measured with a load it would say nothing of others
        and not endpoint.upstream.load_seconds(endpoint.model)
    ]
    # if all were idle that long, none of them is worth testing
    return min(found)[1] if 0 < len(found) < len(endpoints) else None


def _too_long(endpoint: Endpoint, demand: Demand) -> str:
    """Return why a prompt certainly exceeds the context; empty if that is for the engine to say."""
    most = endpoint.max_model_len
    if most is None:
        return ""
    if demand.least_prompt > most:
        return f"at least {demand.least_prompt:.0f} prompt tokens, and the context has {most}"
    # an engine that truncates silently gets no prompt that may be too long
    if endpoint.upstream.facts.truncates and demand.longest_prompt > most:
        return f"about {demand.longest_prompt:.0f} prompt tokens, and the context has {most}"
    return ""


def _probably_too_long(endpoint: Endpoint, demand: Demand) -> bool:
    most = endpoint.max_model_len
    return most is not None and demand.longest_prompt > _PROBABLE * most
