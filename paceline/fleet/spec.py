"""File of ``paceline fleet up fleet.toml``::

[fleet]
gateways = ["http://127.0.0.1:8080"]
admin_key_env = "FLEET_KEY"          # a key of scope admin at these gateways

[[pools]]
name = "chat"                        # a tier of the gateway says "@chat"
replicas = 3
serve = ["smollm2-135m", "--max-num-seqs", "64"]
resources = {CPU = 2}
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from paceline import __version__
from paceline.errors import ConfigError
from paceline.fleet.controller import Scale, Spec

__all__ = ["FleetFile", "FleetSettings", "PoolSettings", "parse_fleet", "read_fleet", "unplaceable"]

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,56}")
_MAX_BYTES: Final = 1 << 20
# replicas of a pool: a gateway knows no more engines of one
_MOST_REPLICAS: Final = 4096
# flags that the fleet sets itself
_OWN_FLAGS: Final = ("--port", "--exit-unwatched")


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings that all pools share. Times in seconds."""

    gateways: tuple[str, ...]
    # environment variable with the key for the gateways' /admin/; it is kept from the replicas
    admin_key_env: str
    # address of a Ray cluster, such as "auto"; "": processes of this host
    ray: str = ""
    # folder of what runs; "": one of the user's, by this file's path
    state_dir: str = ""
    # a replica that neither a gateway nor its host asked for this long ends itself
    exit_unwatched: float = 120.0


class ScaleSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of a pool that grows and shrinks."""

    min: int
    max: int
    # predicted seconds of waiting for a first token at which a replica counts as full
    first_token: float = 1.0


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool. Times in seconds."""

    name: str
    # a number, or {min = 1, max = 8}
    replicas: int | ScaleSettings
    # arguments of ``paceline serve``
    serve: tuple[str, ...]
    # what its replicas are for, where prompts and answers are apart
    role: Literal["both", "prompts", "outputs"] = "both"
    # resources that each replica takes of its host: {CPU = 2, GPU = 1}
    resources: dict[str, float] = {}
    # labels that its node of the Ray cluster must have
    labels: dict[str, str] = {}
    # replicas beyond ``replicas`` while an update runs
    surge: int = 1
    start_timeout: float = 120.0
    # how long a drained replica's requests go on there before they move
    drain_seconds: float = 30.0
    # how long a replica of which nothing is heard counts as alive
    lease: float = 60.0

    @property
    def version(self) -> str:
        """Name of this version: it changes with the arguments, what is taken, and the software."""
        what = [
            __version__,
            self.serve,
            sorted(self.resources.items()),
            sorted(self.labels.items()),
        ]
        return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:12]

    def spec(self) -> Spec:
        """Return what its controller is to reach."""
        number, scale = self.replicas, None
        if isinstance(number, ScaleSettings):
            scale = Scale(number.min, number.max, number.first_token)
            number = number.min
        return Spec(
            number, self.serve, self.version, self.surge, self.start_timeout, self.drain_seconds,
            self.lease, scale, self.role,
        )  # fmt: skip

    @property
    def most(self) -> int:
        """Replicas that it has at most, without those of an update."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max


class FleetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    fleet: FleetSettings
    pools: tuple[PoolSettings, ...]

    def state_folder(self, path: Path) -> Path:
        """Return the folder of what runs; ``path``: of this file."""
        if self.fleet.state_dir:
            # whole: actors of Ray have working folders of their own
            return path.resolve().parent / Path(self.fleet.state_dir).expanduser()
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        whole = str(path.resolve())
        name = f"{path.stem}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
        return Path(home) / "paceline" / "fleet" / name


def read_fleet(path: Path) -> FleetFile:
    """Read a file. Raises ConfigError if it cannot be read or is wrong."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, at most {_MAX_BYTES}")
        return parse_fleet(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def parse_fleet(data: bytes, where: str = "the file") -> FleetFile:
    """Parse and check a file's content. Raises ConfigError, which says where."""
    try:
        found = msgspec.toml.decode(data, type=FleetFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        _check(found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return found


def _check(found: FleetFile) -> None:
    fleet, names = found.fleet, [pool.name for pool in found.pools]
    if not fleet.gateways or not names:
        raise ConfigError("a fleet has at least one of gateways and one of [[pools]]")
    for url in fleet.gateways:
        if not _is_http(url):
            raise ConfigError(f"gateways: {url[:200]!r} is not http://HOST[:PORT] or https://...")
    if not os.environ.get(fleet.admin_key_env):
        raise ConfigError(
            f"admin_key_env: the environment variable {fleet.admin_key_env!r} is not set; it has a "
            "key of scope admin at the gateways"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"two pools are named {max(names, key=names.count)!r}")
    if not 1.0 <= fleet.exit_unwatched < float("inf"):
        raise ConfigError(f"exit_unwatched must be 1 or more seconds, got {fleet.exit_unwatched}")
    for pool in found.pools:
        if not _NAME.fullmatch(pool.name):
            raise ConfigError(
                f"a pool's name has 1 to 56 letters, digits and _.-, got {pool.name[:80]!r}"
            )
        scale = pool.replicas
        if isinstance(scale, ScaleSettings) and not (
            1 <= scale.min <= scale.max and 0.0 < scale.first_token < float("inf")
        ):
            raise ConfigError(
                f"pool {pool.name}: replicas needs 1 <= min <= max and first_token above 0, got "
                f"{scale.min}, {scale.max} and {scale.first_token}"
            )
        for name, low in (
            ("most", 0), ("surge", 1), ("start_timeout", 1.0), ("drain_seconds", 0.0),
            ("lease", 5.0),
        ):  # fmt: skip
            value = getattr(pool, name)
            name = "replicas" if name == "most" else name
            if not low <= value < float("inf"):
                raise ConfigError(f"pool {pool.name}: {name} must be {low} or more, got {value}")
        if pool.most + pool.surge > _MOST_REPLICAS:
            raise ConfigError(
                f"pool {pool.name}: {pool.most} replicas and a surge of {pool.surge} are more than "
                f"{_MOST_REPLICAS}, the most that a gateway takes"
            )
        has_port = any(word.partition("=")[0] == "--kv-port" for word in pool.serve)
        if pool.role != "both" and not has_port:
            raise ConfigError(
                f"pool {pool.name}: role {pool.role} needs --kv-port in serve: one replica fetches "
                "what another one has computed"
            )
        for flag in _OWN_FLAGS:
            if any(word == flag or word.startswith(f"{flag}=") for word in pool.serve):
                raise ConfigError(
                    f"pool {pool.name}: serve has {flag}, which the fleet sets itself"
                )
        if wrong := [f"{n} = {v:g}" for n, v in pool.resources.items() if not 0.0 <= v < 1e9]:
            raise ConfigError(f"pool {pool.name}: resources are 0 or more, got {wrong[0]}")


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # no valid port or IPv6 address
        return False


def unplaceable(
    pools: Sequence[PoolSettings], nodes: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return a sentence for each replica that no node has room for.

    Args:
        nodes: what each node has in total, by resource.
    """
    free = {node: dict(has) for node, has in nodes.items()}
    told = []
    for pool in pools:
        for number in range(1, pool.most + 1):
            needs = {name: amount for name, amount in pool.resources.items() if amount}
            node = next((n for n, has in free.items() if not lacks(needs, has)), None)
            if node is None:
                # the node that comes nearest
                least = min(
                    (lacks(needs, has) for has in free.values()), key=len, default=["nodes"]
                )
                told.append(f"replica {number} of pool {pool.name} lacks {', '.join(least)}")
                continue
            for name, amount in needs.items():
                free[node][name] -= amount
    return told


def lacks(needs: Mapping[str, float], has: Mapping[str, float]) -> list[str]:
    """Return what is missing, for people."""
    return [
        f"{name} (it needs {amount:g}, and {has.get(name, 0.0):g} is free)"
        for name, amount in needs.items()
        if amount > has.get(name, 0.0) + 1e-9
    ]
