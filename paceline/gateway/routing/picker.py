"""Choice of an engine for a request: filters here, the rest by ``routing``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.gateway.routing.routes import Route, Site
from paceline.http.errors import HttpError
from paceline.routing import TRICKLE, Demand, EngineView, choose, slow_ones

__all__ = ["AllRestError", "Pick", "Picker", "Tried"]

# tokens are estimated from bytes: beyond this multiple of the context they are probably too many
_PROBABLE: Final = 1.5
# seconds without a request after which an engine gets one, so that its estimates stay current
_FORGOTTEN: Final = 15.0
_Only = Callable[[Site], bool]
# engines, or (engine, model) pairs, where a request was tried
Tried = Collection[str | tuple[str, str]]


class AllRestError(HttpError):
    """Every engine that could take the request has asked for a cooldown."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(429, message, retry_after=seconds)
        # until the first cooldown ends
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Pick:
    site: Site
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
        self.slow_factor = slow_factor

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
    ) -> Pick:
        """Pick an engine, one that was not tried if possible.

        Args:
            fallback: whether later tiers may serve the request.
            only: further condition on a site.
            late: whether to try an engine without a sign of life if there is no other: it may only
                be late.

        Raises:
            AllRestError: the engines that could take it have asked for a cooldown.
            HttpError: 503, no engine can take it now, with each one's reason; 400, none ever can.
        """
        reasons: dict[str, str] = {}
        pressed: Pick | None = None
        doubtful: list[Site] = []
        tiers = list(route.sites(fallback=fallback))
        for tier in tiers:
            sites = self._fit(tier, route.path, demand, now, tried, only, reasons)
            roomy = [site for site in sites if not _probably_too_long(site, demand)]
            if not roomy:
                # probably too long everywhere: the engine itself counts the tokens
                doubtful = doubtful or sites
                continue
            pick = self._choose(roomy, demand, now)
            if pick.view.pressed and route.pressure_fallback and tier is not tiers[-1]:
                pressed = pressed or pick
                reasons[pick.site.engine.name] = "short of memory"
                continue
            return pick
        if pressed is not None:
            return pressed
        if doubtful:
            return self._choose(doubtful, demand, now)
        # breakers count past failures: an engine that answers is better than none
        last = [
            site
            for tier in tiers
            for site in tier
            if (only is None or only(site))
            and not site.engine.draining
            and not (site.engine.is_unreachable if late else site.engine.trouble)
            and not _was_tried(site, tried)
            and not _too_long(site, demand)
            and not site.lacks_model
        ]
        awake = [site for site in last if not site.rests_for(now)]
        if awake:
            sure = [site for site in awake if not site.engine.trouble]
            return self._choose(sure or awake, demand, now)
        if last:
            seconds = min(site.rests_for(now) for site in last)
            raise AllRestError(
                f"every engine of {route.model} has asked for a pause; the first one's is over in "
                f"{seconds:.1f} s",
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
    ) -> bool:
        """Whether ``pick`` would find an engine that was not tried."""
        try:
            self.pick(route, demand, now, tried=tried, fallback=fallback, only=only)
        except HttpError:
            return False
        return True

    def free_slots(self, route: Route, demand: Demand, now: float) -> float:
        """Return the free slots of a route's usable engines; infinite if no engine has a bound, or
        none is usable."""
        sites = [site for tier in route.sites(fallback=route.fallback) for site in tier]
        if not any(site.engine.config.max_concurrent for site in sites):
            return math.inf
        usable = [
            site.engine
            for site in sites
            if not site.lacks_model
            and not _too_long(site, demand)
            and not site.usable(now, route.path)
        ]
        return sum(engine.free_slots for engine in usable) if usable else math.inf

    def _fit(
        self,
        tier: Sequence[Site],
        path: str,
        demand: Demand,
        now: float,
        tried: Tried,
        only: _Only | None,
        reasons: dict[str, str],
    ) -> list[Site]:
        fit = []
        for site in tier:
            why = (
                "tried"
                if _was_tried(site, tried)
                else "cannot go on with it"
                if only is not None and not only(site)
                else f"has no model {site.model}"
                if site.lacks_model
                else _too_long(site, demand)
                # a stream that is resumed has waited in the queue before
                or (site.available(now, path) if only is None else site.usable(now, path))
            )
            if why:
                reasons[site.engine.name] = why
            else:
                fit.append(site)
        return fit

    def _choose(self, sites: Sequence[Site], demand: Demand, now: float) -> Pick:
        if len(sites) == 1:
            load = sites[0].engine.load
            return Pick(sites[0], load.view(demand, now))
        slow = slow_ones(
            {site.engine.name: site.engine.load.pace for site in sites}, self.slow_factor, now
        )
        views = [
            site.engine.load.view(
                demand,
                now,
                TRICKLE if site.engine.name in slow else site.engine.share_of(site.model, now),
            )
            for site in sites
        ]
        index = _forgotten(sites, views, demand, now)
        if index is None:
            index = choose(views, demand, self._draw)
        return Pick(sites[index], views[index])

    def _none(
        self,
        route: Route,
        tiers: Sequence[Sequence[Site]],
        demand: Demand,
        now: float,
        reasons: dict[str, str],
    ) -> HttpError:
        sites = [site for tier in tiers for site in tier]
        too_long = [_too_long(site, demand) for site in sites]
        if sites and all(too_long):
            return HttpError(400, f"model {route.model}: {too_long[0]}, at every engine of it")
        told = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:8])
        waits = [site.reopens_in(now, route.path) for site in sites] or [1.0]
        return HttpError(
            503,
            f"no engine can take a request for {route.model} now ({told or 'there is none'})",
            retry_after=max(1.0, min(waits)),
        )


def _was_tried(site: Site, tried: Tried) -> bool:
    return site.engine.name in tried or site.key in tried


def _forgotten(
    sites: Sequence[Site], views: Sequence[EngineView], demand: Demand, now: float
) -> int | None:
    """Return an idle engine without requests for so long that its estimates may be outdated; None
    if there is none, or if the request has a target that this would risk."""
    if len(sites) < 2 or demand.ttft is not None:
        return None
    found = [
        (site.engine.load.sent_at, index)
        for index, site in enumerate(sites)
        if now - site.engine.load.sent_at > _FORGOTTEN
        and not views[index].num_requests
        and not views[index].pressed
    ]
    # if all were idle that long, none of them is worth testing
    return min(found)[1] if 0 < len(found) < len(sites) else None


def _too_long(site: Site, demand: Demand) -> str:
    """Return why a prompt certainly exceeds the context; empty if that is for the engine to say."""
    most = site.max_model_len
    if most is None:
        return ""
    if demand.least_prompt > most:
        return f"at least {demand.least_prompt:.0f} tokens of prompt, and the context has {most}"
    # an engine that truncates silently gets no prompt that may be too long
    if site.engine.facts.truncates and demand.longest_prompt > most:
        return f"about {demand.longest_prompt:.0f} tokens of prompt, and the context has {most}"
    return ""


def _probably_too_long(site: Site, demand: Demand) -> bool:
    most = site.max_model_len
    return most is not None and demand.longest_prompt > _PROBABLE * most
