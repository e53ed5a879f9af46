"""From a model's name to the engines that may serve it, tier by tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import UnknownModelError
from paceline.gateway.aliases import Aliases, fill
from paceline.gateway.bodies import Body
from paceline.gateway.config import GatewayConfig, ModelConfig, Target
from paceline.gateway.engine import Engine, EngineModel
from paceline.gateway.kinds import VECTOR_PATHS
from paceline.http.errors import HttpError

__all__ = ["Route", "Routes", "Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """A model at an engine."""

    engine: Engine
    # its name there
    model: str
    tier: int

    @property
    def key(self) -> tuple[str, str]:
        """What a request that was tried there remembers."""
        return self.engine.name, self.model

    def usable(self, now: float, path: str) -> str:
        """Why it takes no requests; empty where it does, if perhaps not now."""
        return self.engine.usable(now, self.model, path)

    def available(self, now: float, path: str) -> str:
        """Why it may not be sent a request now; empty where it may."""
        return self.engine.available(now, self.model, path)

    def rests_for(self, now: float) -> float:
        """Seconds until it may be sent requests again."""
        standing = self.engine.standings.get(self.model)
        return 0.0 if standing is None else standing.rests_for(now)

    def reopens_in(self, now: float, path: str) -> float:
        """Seconds until a breaker lets one request through; 0.0 where none is open."""
        standing = self.engine.standings.get(self.model)
        own = 0.0 if standing is None else standing.reopens_in(path, now)
        return max(own, self.engine.breaker.reopens_in(now))

    @property
    def max_model_len(self) -> int | None:
        models = self.engine.models or {}
        found = models.get(self.model)
        return None if found is None else found.max_model_len

    @property
    def lacks_model(self) -> bool:
        """Whether the engine said which models it has, and this one is not among them."""
        return self.engine.models is not None and self.model not in self.engine.models


@dataclass(frozen=True, slots=True)
class Route:
    """Where one model's requests may go."""

    # as the configuration or an engine names it
    model: str
    tiers: Sequence[Sequence[Site]]
    fallback: bool = True
    pressure_fallback: bool = False
    # where the longest prompts of this model go
    longer: Route | None = None
    # what its caller wrote, where ``model`` has a ``*``
    asked: str = ""
    # what goes there stays in the house, also by other models that serve it instead
    local_only: bool = False
    # of the endpoint that is asked for
    path: str = ""

    @property
    def shown(self) -> str:
        """As its caller knows the model."""
        return self.asked or self.model

    def serving(self, path: str, body: Body) -> Route:
        """Without the places whose API cannot be asked that.

        Raises HttpError 400 where none is left.
        """
        reasons: dict[str, str] = {}
        tiers = []
        for tier in self.tiers:
            kept = []
            for site in tier:
                if why := site.engine.dialect.cannot(path, body) or _lacks(site.engine, path):
                    reasons[site.engine.name] = why
                else:
                    kept.append(site)
            if kept:
                tiers.append(kept)
        if reasons and not tiers:
            told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise HttpError(400, f"no engine of {self.model} can serve this request ({told})")
        longer = self.longer
        if longer is not None:
            try:
                longer = longer.serving(path, body)
            except HttpError:
                longer = None
        # for each request: ``replace`` takes twice as long
        return Route(
            self.model, tiers, self.fallback, self.pressure_fallback, longer, self.asked,
            self.local_only, path,
        )  # fmt: skip

    def sites(self, *, fallback: bool) -> Iterator[Sequence[Site]]:
        """The tiers that may be used, in their order."""
        return iter(self.tiers if fallback else self.tiers[:1])


def _lacks(engine: Engine, path: str) -> str:
    """Why an engine of its kind is not asked for vectors there; empty where it may be. An engine of
    a kind that is not known yet may have all."""
    if path not in VECTOR_PATHS or engine.kind == "auto" or path in engine.facts.vectors:
        return ""
    return f"{engine.kind} has no {path}"


class Routes:
    """Of a configuration, over engines whose models come and go."""

    def __init__(self, config: GatewayConfig, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._are_named = bool(config.models)
        by_name = {model.name: model for model in config.models}
        self._aliases = Aliases(by_name)
        # those with a ``*``, and all others
        self._aliased = {name: by_name.pop(name) for name in self._aliases.names}
        self._models = by_name

    def find(self, name: str, prompt_tokens: float, *, local_only: bool = False) -> Route:
        """Where a request for ``name`` goes; "" means the only model there is.

        Args:
            local_only: it serves for another model, whose requests stay in the house.

        Raises UnknownModelError, listing what there is.
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
        sites = [] if self._are_named else self._served(name)
        if not sites:
            served = ", ".join(self.names()[:20]) or "none, as no engine has answered yet"
            raise UnknownModelError(
                f"The model {name[:200]!r} does not exist here; served: {served}"
            )
        return Route(name, (sites,))

    def names(self) -> list[str]:
        """What callers may ask for: what is configured, else what the engines have."""
        return [*(entry.id for entry in self.entries()), *self._aliases.names]

    def entries(self) -> list[EngineModel]:
        """The same, but for names with a ``*``: nobody can say what they stand for."""
        found: dict[str, EngineModel] = {}
        if self._are_named:
            for name in self._models:
                sites = self._configured(self._models[name], False).tiers
                lengths = [s.max_model_len for tier in sites for s in tier if s.max_model_len]
                found[name] = EngineModel(name, max(lengths) if lengths else None)
        else:
            for engine in self._engines.values():
                for model in (engine.models or {}).values():
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
        """``local_only``: of the model that it serves for; ``asked``: where its name has a ``*``,
        what was asked for, and what that stands for."""
        name = asked or config.name
        local_only = local_only or config.local_only
        tiers = []
        for number, texts in enumerate(config.tiers):
            tier = []
            for target in map(Target.parse, texts):
                engine = self._engines[target.engine]
                if local_only and engine.config.cloud:
                    continue
                model = fill(target.model, stem) or self._own_name(engine, name)
                tier.append(Site(engine, model, number))
            if tier:
                tiers.append(tier)
        return Route(
            config.name, tiers, config.fallback, config.pressure_fallback, None, asked, local_only
        )

    def _own_name(self, engine: Engine, name: str) -> str:
        """Of a target that names none: the same, or the only one that the engine has."""
        models = engine.models or {}
        return name if name in models or len(models) != 1 else next(iter(models))

    def _served(self, name: str) -> list[Site]:
        return [
            Site(engine, name, 0)
            for engine in self._engines.values()
            if name in (engine.models or {})
        ]
