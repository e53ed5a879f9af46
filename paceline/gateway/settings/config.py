"""Configuration file of ``paceline gateway config.toml``::

    host = "127.0.0.1"
    port = 8080

    [[engines]]
    name = "gpu1"
    url = "http://10.0.0.5:8000"
    api_key_env = "GPU1_KEY"

    [[models]]                       # without any, each engine's models keep their own names
    name = "chat"
    tiers = [["gpu1", "gpu2"], ["laptop:smollm2-q4"]]

A tier holds engines, each with the model's name there if it differs. Requests go to the first tier;
they go to the next one if no engine of the tier can take them and ``fallback`` is true.
``@NAME`` stands for all engines of a pool, which ``PUT /admin/pools/NAME`` names while it runs, or
which are found by ``dns = "HOST:PORT"`` of its ``[[pools]]``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from paceline.core.policies import POLICIES
from paceline.errors import ConfigError
from paceline.gateway.settings.aliases import Aliases, is_alias
from paceline.gateway.settings.cascade import CascadeConfig, check_cascade
from paceline.gateway.settings.engines import (
    NAME,
    EngineConfig,
    EngineKind,
    PoolConfig,
    Secret,
    SecretBytes,
    check_engine,
)
from paceline.gateway.settings.prices import Budget, Price, Prices, parse_amount
from paceline.http.fields import BYTE_ORDER_MARK
from paceline.http.otlp import check_endpoint
from paceline.http.rate_limits.rates import KeyLimits, Rate
from paceline.http.rate_limits.store import check_storage_url
from paceline.renamed import is_now

__all__ = [
    "EngineConfig",
    "EngineKind",
    "GatewayConfig",
    "ModelConfig",
    "PoolConfig",
    "Secret",
    "SecretBytes",
    "Target",
    "check_config",
    "key_limits",
    "parse_config",
    "pools_of",
    "read_config",
]

# what msgspec says of a key that the file may not have
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_MAX_CONFIG_BYTES: Final = 1 << 20


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Model name that callers may request, and where it is served."""

    # one ``*`` in it stands for any text: see ``aliases``
    name: str
    # in order of preference; "engine" or "engine:model", or "@pool" for all engines of a pool
    tiers: tuple[tuple[str, ...], ...]
    # whether later tiers, smaller or quantised models, may serve what earlier ones cannot
    fallback: bool = True
    # whether later tiers also serve while all engines of a tier are short of memory
    pressure_fallback: bool = False
    local_only: bool = False
    # model for prompts of more tokens than the key says: "4096" = "long"
    length_over: dict[str, str] = {}
    # a small model answers where that is good enough; None: this model does, always
    cascade: CascadeConfig | None = None


Amount = str | int | float


class PriceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Price per million tokens; the most specific row that matches an endpoint counts."""

    # "": any engine
    engine: str = ""
    # model name at the engine; "": any model
    model: str = ""
    input: Amount
    output: Amount
    # prompt tokens that the engine had in its cache; None: as ``input``
    cached_input: Amount | None = None
    # per request
    request: Amount = 0


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Permissions and budget of one key."""

    # as in the file of keys; "*": every key without an entry
    name: str
    # models that it may request; empty: all
    models: tuple[str, ...] = ()
    # "5.00/day", "100/month", "20/total"; "": none
    budget: str = ""
    # a spent budget is only logged; nothing is refused
    soft: bool = False
    # model that serves a request which the budget does not cover; "": none
    over_budget: str = ""
    # its requests never go to a cloud
    local_only: bool = False


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. Times in seconds."""

    engines: tuple[EngineConfig, ...] = ()
    # pools that no tier names, or whose engines need a key
    pools: tuple[PoolConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    prices: tuple[PriceConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()
    currency: str = "USD"
    # file with each key's spending; "": memory alone, lost when the gateway ends
    spend_storage: str = "paceline-spend.sqlite"
    host: str = "127.0.0.1"
    port: int = 8080
    # whether the page at /ui is served
    ui: bool = True
    # file of keys, as for ``paceline serve``
    api_key_file: str = ""
    # limit per key, or per caller's address without keys: "60/minute", "100000/day"; "": none
    rate_limit_requests: str = ""
    rate_limit_tokens: str = ""
    # cap on an answer under a token limit or budget, in tokens, if neither its caller sets a limit
    # nor its engine tells its context length
    default_max_tokens: int = 4096
    # concurrent requests of a key; 0: no limit
    max_concurrent_per_key: int = 0
    # redis://..., for limits that several gateways share; "": this gateway counts alone
    rate_limit_storage: str = ""
    # requests that never go to a cloud: with one of these in ``x-paceline-tags``, or with a text
    # that one of these regular expressions finds
    local_only_tags: tuple[str, ...] = ()
    local_only_patterns: tuple[str, ...] = ()
    # environment variable with the secret that each key's cache salt is derived from
    salt_env: str = ""
    poll_interval: float = 0.25
    # timeout of one poll
    poll_timeout: float = 0.5
    # an engine that neither answered a poll nor sent a byte (comments count) for this long is taken
    # for dead
    liveness_timeout: float = 1.2
    connect_timeout: float = 2.0
    # time to an answer's first byte or a stream's first token, and between two parts of a stream,
    # not counting comments and pings. An engine that answers polls may be slow, but not for ever;
    # between two blocks of an answer, an engine that pings has ``first_byte_timeout``
    first_byte_timeout: float = 600.0
    stall_timeout: float = 60.0
    # attempts of one request, over all tiers
    max_attempts: int = 3
    # resumptions of one stream
    max_resumes: int = 2
    # resume a stream behind its text if no engine can resume behind its tokens: the rest is then a
    # possible continuation, not the one that the first engine would have made
    resume_by_text: bool = False
    retry_share: float = 0.2
    retries_per_second: float = 5.0
    # share of the requests whose late first token is asked of a second engine; 0: none
    hedge_share: float = 0.0
    # earliest time that counts as late; share of the engines' capacity above which no hedge is sent
    hedge_after: float = 0.2
    hedge_below: float = 0.7
    # factor over its usual first-token times that makes an engine slow: it gets a trickle; 0: never
    slow_factor: float = 3.0
    # time until a returning engine has its full share again
    slow_start: float = 10.0
    # new tokens of a prompt from which engines of role "prompts" may compute it
    split_above: int = 256
    # queue for engines at ``max_concurrent``: order, requests of one model at most, and time limit
    queue_policy: str = "deadline"
    max_num_waiting: int = 1000
    queue_timeout: float = 120.0
    # longest wait of a request for a cooldown (Retry-After) that all engines asked for
    max_cooldown_wait: float = 5.0
    sse_keep_alive: float = 15.0
    # OTLP/HTTP collector that gets a trace of every request; "": no traces
    otlp_endpoint: str = ""
    drain_timeout: float = 30.0
    max_body_size: int = 32 * 1024 * 1024


class Target(msgspec.Struct, frozen=True):
    """Engine or ``@pool``, and a model's name there; "": the requested name."""

    engine: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        engine, _, model = text.partition(":")
        return cls(engine, model)

    @property
    def pool(self) -> str:
        """Name of the pool; "": it is an engine."""
        return self.engine[1:] if self.engine.startswith("@") else ""


def pools_of(config: GatewayConfig) -> dict[str, PoolConfig]:
    """Return the pools by name, also those that only a tier names."""
    named = (Target.parse(t).pool for model in config.models for tier in model.tiers for t in tier)
    found = {name: PoolConfig(name=name) for name in named if name}
    return found | {pool.name: pool for pool in config.pools}


def read_config(path: Path) -> GatewayConfig:
    """Read a file. Raises ConfigError if it cannot be read or is not a configuration."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes; a configuration has at most "
                f"{_MAX_CONFIG_BYTES}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return parse_config(data, str(path))


def parse_config(data: bytes, where: str = "the configuration") -> GatewayConfig:
    """Parse a file's content. Raises ConfigError, which says where."""
    try:
        config = msgspec.toml.decode(data.removeprefix(BYTE_ORDER_MARK), type=GatewayConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        unknown = _UNKNOWN.search(str(error))
        renamed = is_now(unknown.groups() if unknown else (), GatewayConfig.__struct_fields__)
        raise ConfigError(f"{where}: {renamed or error}") from None
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def check_config(config: GatewayConfig) -> None:
    """Check values and references. Raises ConfigError."""
    names = [engine.name for engine in config.engines]
    pools = pools_of(config)
    if not names and not pools:
        raise ConfigError("no [[engines]] and no [[pools]]: a gateway needs at least one")
    for engine in config.engines:
        check_engine(engine)
    for name, pool in pools.items():
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"a pool's name has 1 to 64 letters, digits and _.-, got {name[:80]!r}"
            )
        if pool.api_key_env and not os.environ.get(pool.api_key_env):
            raise ConfigError(
                f"pool {name}: the environment variable {pool.api_key_env} is not set"
            )
        if pool.dns:
            _ = pool.address
        elif (pool.every, pool.kind) != (2.0, "paceline"):
            raise ConfigError(
                f"pool {name}: every and kind are of a pool with dns, and it has none"
            )
        if not 0.1 <= pool.every <= 3600.0:
            raise ConfigError(f"pool {name}: every must be 0.1 to 3600 s, got {pool.every}")
    for kind, found in (
        ("engines", names), ("models", [m.name for m in config.models]),
        ("pools", [p.name for p in config.pools]),
    ):  # fmt: skip
        twice = sorted({name for name in found if found.count(name) > 1})
        if twice:
            raise ConfigError(f"two {kind} are named {twice[0]!r}")
    for model in config.models:
        _check_model(model, config)
        if model.cascade is not None:
            _check_small(model, model.cascade, config)
    _check_local_only(config)
    for name, low in (
        ("poll_interval", 0.01),
        ("poll_timeout", 0.01),
        ("liveness_timeout", 0.1),
        ("connect_timeout", 0.01),
        ("first_byte_timeout", 0.1),
        ("stall_timeout", 0.1),
        ("max_cooldown_wait", 0.0),
        ("sse_keep_alive", 0.0),
        ("drain_timeout", 0.0),
        ("retry_share", 0.0),
        ("retries_per_second", 0.0),
        ("hedge_share", 0.0),
        ("hedge_after", 0.0),
        ("hedge_below", 0.0),
        ("slow_factor", 0.0),
        ("slow_start", 0.0),
        ("max_concurrent_per_key", 0),
        ("max_num_waiting", 1),
        ("default_max_tokens", 1),
        ("queue_timeout", 0.1),
        ("max_attempts", 1),
        ("max_resumes", 0),
        ("split_above", 1),
        ("max_body_size", 1024),
    ):
        value = getattr(config, name)
        if not low <= value < float("inf"):
            raise ConfigError(f"{name} must be at least {low}, got {value}")
    check_spending(config)
    if config.hedge_share > 0.5 or config.hedge_below > 1.0 or 0.0 < config.slow_factor < 1.5:
        raise ConfigError(
            "hedge_share may be at most 0.5, hedge_below at most 1, and slow_factor 0 or at least "
            f"1.5; got {config.hedge_share}, {config.hedge_below} and {config.slow_factor}"
        )
    key_limits(config)
    if config.otlp_endpoint:
        check_endpoint(config.otlp_endpoint)
    if config.rate_limit_storage:
        check_storage_url(config.rate_limit_storage)
    if config.queue_policy not in POLICIES:
        raise ConfigError(
            f"queue_policy must be one of {', '.join(sorted(POLICIES))}, got "
            f"{config.queue_policy!r}"
        )
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {config.port}")


def _check_small(model: ModelConfig, cascade: CascadeConfig, config: GatewayConfig) -> None:
    if is_alias(model.name):
        raise ConfigError(f"model {model.name}: a name with a * has no cascade")
    check_cascade(model.name, cascade)
    others = {other.name: other for other in config.models if not is_alias(other.name)}
    small = others.get(cascade.small)
    if small is None or small is model:
        raise ConfigError(
            f"model {model.name}: cascade.small names {cascade.small!r}, which is not another "
            "model here"
        )
    if small.cascade is not None or small.length_over:
        raise ConfigError(
            f"model {model.name}: cascade.small names {small.name!r}, which has a cascade or "
            "length_over itself"
        )
    if cascade.embeddings and cascade.embeddings not in others:
        raise ConfigError(
            f"model {model.name}: cascade.embeddings names {cascade.embeddings!r}, which is no "
            "model here"
        )


def _check_local_only(config: GatewayConfig) -> None:
    for tag in config.local_only_tags:
        # a rule that finds nothing would let everything out
        if not tag.strip() or "," in tag:
            raise ConfigError(
                f"local_only_tags: {tag[:80]!r} is no tag: one has a character at least, and no "
                "comma"
            )
    for pattern in config.local_only_patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"local_only_patterns: {pattern[:80]!r} is no regular expression: {error}"
            ) from None


def key_limits(config: GatewayConfig) -> KeyLimits:
    """Return the limits of a key that has none of its own. Raises ConfigError."""
    requests, tokens = config.rate_limit_requests, config.rate_limit_tokens
    return KeyLimits(
        requests=Rate.parse(requests) if requests else None,
        tokens=Rate.parse(tokens) if tokens else None,
        concurrent=config.max_concurrent_per_key or None,
    )


def prices_of(config: GatewayConfig) -> Prices:
    """Return the table of prices. Raises ConfigError."""
    rows: dict[tuple[str, str], Price] = {}
    for row in config.prices:
        endpoint = (row.engine, row.model)
        if endpoint in rows:
            raise ConfigError(f"two prices of engine {row.engine!r} and model {row.model!r}")
        if row.engine and row.engine not in {engine.name for engine in config.engines}:
            raise ConfigError(f"a price names engine {row.engine!r}, which is not configured")
        what = f"the price of engine {row.engine or 'any'}, model {row.model or 'any'}"
        cached = row.input if row.cached_input is None else row.cached_input
        rows[endpoint] = Price.per_million(
            *(parse_amount(amount, what) for amount in (row.input, cached, row.output)),
            request=parse_amount(row.request, what),
        )
    return Prices(rows)


def budgets_of(config: GatewayConfig) -> dict[str, Budget]:
    """Return budgets by key. Raises ConfigError."""
    return {key.name: Budget.parse(key.budget) for key in config.keys if key.budget}


def check_spending(config: GatewayConfig) -> None:
    """Check keys, prices and budgets. Raises ConfigError, also if there are budgets and an endpoint
    has no price: an unknown price is not zero."""
    prices, budgets = prices_of(config), budgets_of(config)
    names = [key.name for key in config.keys]
    if len(set(names)) < len(names):
        raise ConfigError("two [[keys]] have the same name")
    models = {model.name for model in config.models}
    aliases = Aliases(models)
    for key in config.keys:
        unknown = [n for n in key.models if models and n not in models and not aliases.find(n)]
        if key.over_budget and models and key.over_budget not in models - {*aliases.names}:
            unknown.append(key.over_budget)
        if unknown:
            raise ConfigError(f"key {key.name}: there is no model {unknown[0]!r}")
        if key.over_budget and not key.budget:
            raise ConfigError(f"key {key.name} has over_budget but no budget")
    if not budgets:
        return
    targets = [
        Target.parse(text) for model in config.models for tier in model.tiers for text in tier
    ] or [
        Target(n)
        for n in (*(e.name for e in config.engines), *("@" + p.name for p in config.pools))
    ]
    for target in targets:
        if prices.find(target.engine, target.model) is None:
            raise ConfigError(
                "budgets need a price of "
                f"{target.engine}{':' if target.model else ''}{target.model}: give 0 if it is free"
            )


def _check_model(model: ModelConfig, config: GatewayConfig) -> None:
    if not model.name or len(model.name) > 256:
        raise ConfigError(f"a model's name has 1 to 256 characters, got {model.name[:80]!r}")
    if model.name.count("*") > 1 or (is_alias(model.name) and model.length_over):
        raise ConfigError(f"model {model.name}: may contain one *, and then no length_over")
    if not model.tiers or not all(model.tiers):
        raise ConfigError(f"model {model.name}: each tier must name at least one engine")
    # a pool's engines are not clouds
    engines = {engine.name: engine.cloud for engine in config.engines}
    engines |= dict.fromkeys((f"@{name}" for name in pools_of(config)), False)
    for tier in model.tiers:
        for text in tier:
            target = Target.parse(text)
            if target.engine not in engines:
                raise ConfigError(
                    f"model {model.name}: there is no engine {target.engine!r}; there are "
                    f"{', '.join(sorted(engines))}"
                )
            if target.model.count("*") > is_alias(model.name):
                raise ConfigError(
                    f"model {model.name}: {text!r} has a *, which repeats that of the name: one in "
                    "each"
                )
    if model.local_only and all(
        engines[Target.parse(text).engine] for tier in model.tiers for text in tier
    ):
        raise ConfigError(f"model {model.name} is local_only, but all its engines are cloud = true")
    known = {other.name for other in config.models if not is_alias(other.name)}
    for text, longer in model.length_over.items():
        if not text.isdigit() or not int(text):
            raise ConfigError(
                f"model {model.name}: length_over maps numbers of tokens to models, got {text!r}"
            )
        if longer not in known or longer == model.name:
            raise ConfigError(
                f"model {model.name}: length_over names {longer!r}, which is not another model here"
            )
        other = next(other for other in config.models if other.name == longer)
        if model.local_only and all(
            engines[Target.parse(text).engine] for tier in other.tiers for text in tier
        ):
            raise ConfigError(
                f"model {model.name} is local_only, but all engines of {longer!r} in its "
                "length_over are cloud = true"
            )
        if other.length_over:
            raise ConfigError(
                f"model {model.name}: length_over names {longer!r}, which has length_over itself"
            )
