"""One engine of the configuration, and the engines of a pool, which are named while the gateway
runs::

    PUT /admin/pools/chat
    {"epoch": 1732838400000, "version": 7,
     "engines": [{"name": "chat-4", "url": "http://10.0.0.7:41877"}],
     "draining": ["chat-2"], "move": ["chat-2"]}
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from paceline.errors import ConfigError
from paceline.http.fields import show_url
from paceline.routing.handing import Role

__all__ = [
    "NAME",
    "PAIRED",
    "EngineConfig",
    "EngineKind",
    "MemberConfig",
    "PoolConfig",
    "PoolMembers",
    "Secret",
    "SecretBytes",
    "check_engine",
    "members_at",
    "parse_members",
]

EngineKind = Literal[
    "auto", "paceline", "vllm", "sglang", "llama.cpp", "ollama", "openai", "azure", "anthropic"
]

# SGLang's own default
BOOTSTRAP_PORT: Final = 8998
# kinds whose engines can go on behind a prompt that another one has computed
PAIRED: Final = ("paceline", "vllm", "sglang")
NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# engines of a pool
_MOST_ENGINES: Final = 4096
# addresses at which clouds hand out a machine's credentials
_METADATA_HOSTS: Final = frozenset(
    {"169.254.169.254", "169.254.170.2", "fd00:ec2::254", "metadata.google.internal"}
)


class Secret(str):
    """Key that no repr, log line or error shows."""

    def __repr__(self) -> str:
        return "'***'"


class SecretBytes(bytes):
    """Bytes that contain a key, hidden in the same way."""

    def __repr__(self) -> str:
        return "b'***'"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server that runs models."""

    name: str
    # http or https, with the path before /v1 if there is one
    url: str
    kind: EngineKind = "auto"
    # environment variable that holds its key
    api_key_env: str = ""
    # version of Azure's API, such as 2024-10-21
    api_version: str = ""
    # its models, if it cannot list them (Azure's deployments); empty: it is asked
    models: tuple[str, ...] = ()
    # whether it runs off premises: a model with ``local_only`` is never sent there
    cloud: bool = False
    # concurrent requests at most; 0: unlimited
    max_concurrent: int = 0
    # how its capabilities are found out: "ask" reads what it advertises, "try" also sends one-token
    # requests, "off" does neither
    probe: Literal["ask", "try", "off"] = "ask"
    # what it is for, where prompts and answers are apart
    role: Role = "both"
    # SGLang's port at which engines for outputs meet it, for role "prompts"
    bootstrap_port: int = BOOTSTRAP_PORT


class MemberConfig(EngineConfig, frozen=True, kw_only=True):
    """An engine of a pool."""

    pool: str


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines that are named over HTTP, or found by a name, while the gateway runs; a tier says
    ``@NAME``."""

    name: str
    # environment variable that holds the key of its engines
    api_key_env: str = ""
    # HOST:PORT, of which each address is an engine; "": they are named over HTTP
    dns: str = ""
    # seconds between two lookups of ``dns``, and the kind of its engines
    every: float = 2.0
    kind: EngineKind = "paceline"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of ``dns``. Raises ConfigError."""
        host, _, port = self.dns.rpartition(":")
        if not (host and "/" not in host and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"pool {self.name}: dns must be HOST:PORT, got {self.dns[:200]!r}")
        return host, int(port)


class _Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine as ``PUT`` names it; its key comes with the pool."""

    name: str
    url: str
    kind: EngineKind = "paceline"
    max_concurrent: int = 0
    role: Role = "both"
    bootstrap_port: int = BOOTSTRAP_PORT


class PoolMembers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a pool has, as its controller says it."""

    # start of the controller: a later one takes over; and what of it is the newest
    epoch: int
    version: int
    engines: tuple[_Engine, ...]
    # names of engines that get no new requests, here or retired already; and of those whose running
    # requests go on elsewhere
    draining: tuple[str, ...] = ()
    move: tuple[str, ...] = ()

    def configs(self, pool: PoolConfig) -> dict[str, MemberConfig]:
        """Return the engines by name."""
        return {
            each.name: MemberConfig(
                name=each.name, url=each.url, kind=each.kind, max_concurrent=each.max_concurrent,
                api_key_env=pool.api_key_env, pool=pool.name, role=each.role,
                bootstrap_port=each.bootstrap_port,
            )
            for each in self.engines
        }  # fmt: skip


def members_at(
    addresses: Collection[str], port: int, pool: PoolConfig, known: tuple[int, int] | None
) -> PoolMembers:
    """Return a pool's engines, one at each address. Raises ConfigError if one is not allowed.

    Args:
        known: epoch and version before.
    """
    engines = tuple(
        _Engine(
            name=f"{address.replace(':', '-')}-{port}",
            url=f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}",
            kind=pool.kind,
        )
        for address in sorted(addresses)
    )
    epoch, version = known or (0, 0)
    found = PoolMembers(epoch=epoch, version=version, engines=engines)
    for engine in found.configs(pool).values():
        check_engine(engine)
    return found


def parse_members(data: bytes, pool: PoolConfig) -> PoolMembers:
    """Parse and check the body of a ``PUT``. Raises ConfigError."""
    try:
        found = msgspec.json.decode(data, type=PoolMembers)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"pool {pool.name}: {error}") from None
    names = [each.name for each in found.engines]
    if len(names) > _MOST_ENGINES or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "")
        raise ConfigError(
            f"pool {pool.name}: {len(names)} engines; at most {_MOST_ENGINES} are allowed, with "
            "different names" + (f", and {twice[:80]!r} occurs twice" if twice else "")
        )
    if found.epoch < 0 or found.version < 0:
        raise ConfigError(
            f"pool {pool.name}: epoch and version must be 0 or more, got {found.epoch} and "
            f"{found.version}"
        )
    for engine in found.configs(pool).values():
        check_engine(engine)
    return found


def check_engine(engine: EngineConfig) -> None:
    """Check one engine. Raises ConfigError."""
    if not NAME.fullmatch(engine.name):
        raise ConfigError(
            f"an engine's name has 1 to 64 letters, digits and _.-, got {engine.name[:80]!r}"
        )
    try:
        parts = urlsplit(engine.url)
        port = parts.port
    except ValueError:
        # do not repeat the bad part: it may be a piece of a password
        raise ConfigError(
            f"engine {engine.name}: url {show_url(engine.url)} has no valid host or port"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(
            f"engine {engine.name}: url must be http://HOST[:PORT] or https://..., got "
            f"{show_url(engine.url)}"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        # a password can appear without a user name
        raise ConfigError(
            f"engine {engine.name}: url may not hold a user, a password, a query or a fragment; a "
            "key comes from the environment variable that api_key_env names"
        )
    if parts.hostname.lower() in _METADATA_HOSTS:
        raise ConfigError(f"engine {engine.name}: {parts.hostname} hands out credentials in clouds")
    if engine.api_key_env and not os.environ.get(engine.api_key_env):
        raise ConfigError(
            f"engine {engine.name}: the environment variable {engine.api_key_env} is not set"
        )
    if (engine.kind == "azure") != bool(engine.api_version):
        raise ConfigError(
            f"engine {engine.name}: kind azure needs an api_version such as 2024-10-21, other "
            f"kinds have none; got kind {engine.kind} and {engine.api_version[:40]!r}"
        )
    if not all(engine.models) or len(set(engine.models)) < len(engine.models):
        raise ConfigError(f"engine {engine.name}: models must be different names")
    if engine.probe == "try" and (engine.cloud or engine.kind in ("azure", "anthropic")):
        raise ConfigError(
            f'engine {engine.name}: probe = "try" sends requests, which a cloud charges for: "ask" '
            'or "off"'
        )
    if engine.role != "both" and engine.kind not in ("auto", *PAIRED):
        raise ConfigError(
            f"engine {engine.name}: role {engine.role} is for kinds {', '.join(PAIRED)}, which can "
            f"hand a computed prompt over; got kind {engine.kind}"
        )
    if not 0 < engine.bootstrap_port <= 65535:
        raise ConfigError(
            f"engine {engine.name}: bootstrap_port must be 1 to 65535, got {engine.bootstrap_port}"
        )
    if engine.max_concurrent < 0:
        raise ConfigError(
            f"engine {engine.name}: max_concurrent must be 0 or more, got {engine.max_concurrent}"
        )
