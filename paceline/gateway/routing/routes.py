"""Routes: from a model's name to the endpoints that may serve it, tier by tier."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from paceline.errors import UnknownModelError
from paceline.gateway.requests.body import Body
from paceline.gateway.settings.aliases import Aliases, fill
from paceline.gateway.settings.config import GatewayConfig, ModelConfig, Target
from paceline.gateway.settings.engine_types import VECTOR_PATHS
from paceline.gateway.upstreams.upstream import Upstream, UpstreamModel
from paceline.http.errors import HttpError
from paceline.wire import fast_paths

__all__ = ["Endpoint", "Route", "Routes"]

# endpoints above which a route is kept until the next ``refresh``
_MANY: Final = 32
# routes that are kept while the engines list the same models
_MOST_LAST: Final = 256


class Endpoint(msgspec.Struct, frozen=True):
    """A model at an engine."""

    upstream: Upstream
    # the model's name at the engine
    model: str
    tier: int

    @property
    def key(self) -> tuple[str, str]:
        """Key of the endpoint among those where a request was tried."""
        return self.upstream.name, self.model

    def usable(self, now: float, path: str) -> str:
        """Return why it takes no requests; empty if it takes them, even if only after a wait."""
        return self.upstream.usable(now, self.model, path)

    def available(self, now: float, path: str) -> str:
        """Return why it may not be sent a request now; empty if it may."""
        return self.upstream.available(now, self.model, path)

    def cooldown_left(self, now: float) -> float:
        """Seconds until its cooldown ends."""
        standing = self.upstream.standings.get(self.model)
        return 0.0 if standing is None else standing.cooldown_left(now)

    def reopens_in(self, now: float, path: str) -> float:
        """Seconds until an open breaker lets a probe through; 0.0 if none is open."""
        standing = self.upstream.standings.get(self.model)
        own = 0.0 if standing is None else standing.reopens_in(path, now)
        return max(own, self.upstream.breaker.reopens_in(now))

    @property
    def max_model_len(self) -> int | None:
        models = self.upstream.models
        if models is None or self.model not in models:
            return None
        return models[self.model].max_model_len

    @property
    def lacks_model(self) -> bool:
        """Whether the engine listed its models without this one."""
        return self.upstream.models is not None and self.model not in self.upstream.models


class Route(msgspec.Struct, frozen=True):
    """Endpoints where one model's requests may go."""

    # the name in the configuration, or at an engine
    model: str
    tiers: Sequence[Sequence[Endpoint]]
    fallback: bool = True
    pressure_fallback: bool = False
    # route of prompts that prove too long for this one
    longer: Route | None = None
    # the requested name, if ``model`` has a ``*``
    asked: str = ""
    # whether no cloud may serve it, also through models that stand in for this one
    local_only: bool = False
    # path of the request
    path: str = ""
    # where there are many engines, one of each kind; they serve the same paths
    one_of_each: Sequence[Upstream] = ()
    # whether one of its engines computes prompts for others
    apart: bool = False

    @property
    def shown(self) -> str:
        """The model's name as the caller knows it."""
        return self.asked or self.model

    def serving(self, path: str, body: Body) -> Route:
        """Return the route without endpoints whose API cannot serve the request.

        Raises HttpError 400 if none is left.
        """
        reasons: dict[str, str] = {}
        some, tiers = self.one_of_each, self.tiers
        if not some or any(each.dialect.cannot(path, body) or _lacks(each, path) for each in some):
            for tier in tiers:
                for endpoint in tier:
                    upstream = endpoint.upstream
                    if why := upstream.dialect.cannot(path, body) or _lacks(upstream, path):
                        reasons[upstream.name] = why
        if reasons:
            kept = ([each for each in tier if each.upstream.name not in reasons] for tier in tiers)
            tiers = [tier for tier in kept if tier]
        if reasons and not tiers:
            told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise HttpError(400, f"no engine of {self.model} can serve this request ({told})")
        longer = self.longer
        if path == self.path and not reasons and longer is None:
            return self
        if longer is not None:
            try:
                longer = longer.serving(path, body)
            except HttpError:
                longer = None
        return Route(
            self.model, tiers, self.fallback, self.pressure_fallback, longer, self.asked,
            self.local_only, path, () if reasons else self.one_of_each, self.apart,
        )  # fmt: skip

    def usable_tiers(self, *, fallback: bool) -> Sequence[Sequence[Endpoint]]:
        """Return the tiers that may be used, in order."""
        return self.tiers if fallback else self.tiers[:1]


def _lacks(upstream: Upstream, path: str) -> str:
    """Return why an engine does not serve a vector path; empty if it may. Engines of unknown
    kind may serve all."""
    if path not in VECTOR_PATHS or upstream.kind == "auto" or path in upstream.facts.vectors:
        return ""
    return f"{upstream.kind} has no {path}"


class Pool(Protocol):
    """Engines that are named while the gateway runs."""

    @property
    def members(self) -> Mapping[str, object]:
        """Engines by name."""
        ...


# models of each engine
_Listed = Sequence[Mapping[str, UpstreamModel] | None]
_NO_LAST: Final[tuple[_Listed, Route]] = ((), Route("", ()))


class Routes:
    """Routes of a configuration, over engines whose models come and go.

    Args:
        pools: engines by name of each pool; they change while the gateway runs.
    """

    def __init__(
        self, config: GatewayConfig, upstreams: Mapping[str, Upstream], pools: Mapping[str, Pool]
    ) -> None:
        self._upstreams = upstreams
        self._pools = pools
        # routes with many endpoints, by name and whether no cloud is allowed; see ``refresh``
        self._kept: dict[tuple[str, bool], Route] = {}
        # last route of an engine's model at a path, and the lists of models that it was made of
        self._last: dict[tuple[str, str, bool], tuple[_Listed, Route]] = {}
        self._are_named = bool(config.models)
        by_name = {model.name: model for model in config.models}
        self._targets = {
            model.name: [[Target.parse(text) for text in tier] for tier in model.tiers]
            for model in config.models
        }
        self._aliases = Aliases(by_name)
        # models whose name has a ``*``, and all others
        self._aliased = {name: by_name.pop(name) for name in self._aliases.names}
        self._models = by_name

    def refresh(self) -> None:
        """Have routes made again, as engines or their models may have changed: those with many
        endpoints are kept in between."""
        self._kept.clear()

    def _keep(self, name: str, route: Route) -> Route:
        if sum(map(len, route.tiers)) > _MANY:
            kinds = {
                (each.upstream.dialect, each.upstream.kind, each.upstream.facts.vectors): each
                for tier in route.tiers
                for each in tier
            }
            route = replace(route, one_of_each=[each.upstream for each in kinds.values()])
            self._kept[name, route.local_only] = route
        return route

    def find(
        self, name: str, prompt_tokens: float, *, path: str = "", local_only: bool = False
    ) -> Route:
        """Return the route for ``name``; "" means the only model there is.

        Args:
            path: of the request; "": not known yet.
            local_only: it stands in for a model whose requests must not go to a cloud.

        Raises UnknownModelError, listing the known models.
        """
        if not name and len(entries := self.entries()) == 1:
            name = entries[0].id
        config = self._models.get(name)
        if config is not None:
            # a long prompt is no less private than a short one
            local_only = local_only or config.local_only
            route = self._configured(self._by_length(config, prompt_tokens), local_only)
            if config.length_over:
                longest = config.length_over[max(config.length_over, key=int)]
                if longest != route.model:
                    longer = self._configured(self._models[longest], local_only)
                    route = replace(route, longer=longer)
            return route
        if (found := self._aliases.find(name)) is not None:
            alias, stem = found
            return self._configured(self._aliased[alias], local_only, name, stem)
        models: _Listed = ()
        if not self._are_named:
            if (kept := self._kept.get((name, local_only))) is not None:
                return replace(kept, path=path)
            models = [upstream.models for upstream in self._upstreams.values()]
            listed, route = self._last.get((name, path, local_only), _NO_LAST)
            # the same objects: no engine came or went, or has listed its models since
            if listed and len(models) == len(listed) and all(map(operator.is_, models, listed)):
                return route
        endpoints = None if self._are_named else self._served(name, local_only)
        if endpoints is None and self._pools and not self.entries():
            raise HttpError(503, "no engine of a pool has answered yet", retry_after=1.0)
        if endpoints is None:
            served = ", ".join(self.names()[:20]) or "none, as no engine has answered yet"
            raise UnknownModelError(
                f"The model {name[:200]!r} does not exist here; served: {served}"
            )
        tiers = (endpoints,) if endpoints else ()
        apart = any(each.upstream.role == "prompts" for each in endpoints or ())
        route = Route(name, tiers, local_only=local_only, path=path, apart=apart)
        route = self._keep(name, route)
        # one with many engines is kept apart, for all paths and until the next ``refresh``
        if not route.one_of_each and fast_paths.are_on():
            if len(self._last) >= _MOST_LAST:
                self._last.clear()
            self._last[name, path, local_only] = models, route
        return route

    def names(self) -> list[str]:
        """Return the names that callers may request: configured ones, else the engines'."""
        return [*(entry.id for entry in self.entries()), *self._aliases.names]

    def entries(self) -> list[UpstreamModel]:
        """Return those models as entries, without names that have a ``*``."""
        found: dict[str, UpstreamModel] = {}
        if self._are_named:
            for name in self._models:
                endpoints = self._configured(self._models[name], False).tiers
                lengths = [s.max_model_len for tier in endpoints for s in tier if s.max_model_len]
                found[name] = UpstreamModel(name, max(lengths) if lengths else None)
        else:
            for upstream in self._upstreams.values():
                for model in (upstream.models or {}).values():
                    found.setdefault(model.id, model)
        return list(found.values())

    def _by_length(self, config: ModelConfig, prompt_tokens: float) -> ModelConfig:
        bounds = sorted((int(n) for n in config.length_over), reverse=True)
        for bound in bounds:
            if prompt_tokens > bound:
                return self._models[config.length_over[str(bound)]]
        return config

    def _configured(
        self, config: ModelConfig, local_only: bool, asked: str = "", stem: str = ""
    ) -> Route:
        """Resolve a configured model. ``local_only``: required by the model that it stands in for;
        ``asked``, ``stem``: the requested name and what its ``*`` stands for."""
        name = asked or config.name
        local_only = local_only or config.local_only
        if (kept := self._kept.get((name, local_only))) is not None:
            return kept
        tiers, apart = [], False
        for number, targets in enumerate(self._targets[config.name]):
            tier = []
            for target, upstream in self._engines(targets):
                if local_only and upstream.config.cloud:
                    continue
                model = fill(target.model, stem) or self._own_name(upstream, name)
                apart = apart or upstream.role == "prompts"
                tier.append(Endpoint(upstream, model, number))
            if tier:
                tiers.append(tier)
        route = Route(
            config.name, tiers, config.fallback, config.pressure_fallback, None, asked, local_only,
            apart=apart,
        )  # fmt: skip
        return self._keep(name, route)

    def _engines(self, targets: Sequence[Target]) -> Iterator[tuple[Target, Upstream]]:
        for target in targets:
            if not target.pool:
                yield target, self._upstreams[target.engine]
            elif (pool := self._pools.get(target.pool)) is not None:
                for name in pool.members:
                    yield target, self._upstreams[name]

    def _own_name(self, upstream: Upstream, name: str) -> str:
        """Return the model's name at a target without one: the same, or its only model."""
        models = upstream.models or {}
        return name if name in models or len(models) != 1 else next(iter(models))

    def _served(self, name: str, local_only: bool) -> list[Endpoint] | None:
        """Return the endpoints of a model of the engines; None: no engine has it."""
        found = [
            upstream for upstream in self._upstreams.values() if name in (upstream.models or {})
        ]
        if not found:
            return None
        return [
            Endpoint(upstream, name, 0)
            for upstream in found
            if not (local_only and upstream.config.cloud)
        ]
