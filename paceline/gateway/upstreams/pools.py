"""Pools: engines that a controller names while the gateway runs, each pool as a whole and again
and again, so that a word that was lost or came twice changes nothing. Pure: times are arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.gateway.settings.config import GatewayConfig, pools_of
from paceline.gateway.settings.engines import MemberConfig, PoolConfig, PoolMembers
from paceline.http.errors import HttpError

__all__ = ["UNHEARD_SECONDS", "Change", "PoolState", "Pools"]

# seconds without a word of its controller after which a pool counts as unheard; it stays as it is
UNHEARD_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Change:
    """Changes that a new word brings; true if there are any."""

    # names whose draining begins or ends
    redrained: frozenset[str]
    is_new: bool = True

    def __bool__(self) -> bool:
        return self.is_new


@dataclass(slots=True)
class PoolState:
    """One pool."""

    config: PoolConfig
    # (epoch, version) of the last word; None: nothing was said yet
    known: tuple[int, int] | None = None
    told_at: float = -math.inf
    members: Mapping[str, MemberConfig] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    # whether it was reported as unheard
    is_unheard: bool = False

    def tell(self, told: PoolMembers, now: float) -> Change:
        """Take in a word. Raises HttpError 409 if a later one is known."""
        news = (told.epoch, told.version)
        if self.known is not None and news < self.known:
            raise HttpError(
                409,
                f"pool {self.config.name}: epoch {told.epoch}, version {told.version} is "
                f"older than epoch {self.known[0]}, version {self.known[1]}, which is known",
            )
        # an engine that is to move takes no new requests either
        draining = frozenset((*told.draining, *told.move))
        members = told.configs(self.config)
        is_new = news != self.known or members != self.members or draining != self.draining
        change = Change(draining ^ self.draining, is_new)
        self.known, self.told_at, self.is_unheard = news, now, False
        self.members, self.draining = members, draining
        return change


class Pools(dict[str, PoolState]):
    """The pools of a gateway, by name."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__((name, PoolState(pool)) for name, pool in pools_of(config).items())

    def members(self) -> dict[str, MemberConfig]:
        """Return the engines of all pools, by name."""
        return {name: each for pool in self.values() for name, each in pool.members.items()}

    def change(self, config: GatewayConfig) -> list[str]:
        """Apply another configuration and return what changed; pools keep their engines.

        Raises ConfigError if an engine has the name of one in a pool.
        """
        wanted = pools_of(config)
        kept = self.members()
        taken = [engine.name for engine in config.engines if engine.name in kept]
        if taken and kept[taken[0]].pool in wanted:
            raise ConfigError(
                f"engine {taken[0]}: pool {kept[taken[0]].pool} has an engine of that name"
            )
        told = [f"pool {name} removed" for name in self if name not in wanted]
        for name in [name for name in self if name not in wanted]:
            del self[name]
        for name, pool in wanted.items():
            if name not in self:
                self[name] = PoolState(pool)
                told.append(f"pool {name} added")
            elif self[name].config != pool:
                state = self[name]
                if pool.dns != state.config.dns:
                    # whoever names its engines from now on begins anew
                    state.known = None
                state.config = pool
                state.members = {
                    n: replace(each, pool=name, api_key_env=pool.api_key_env)
                    for n, each in state.members.items()
                }
                told.append(f"pool {name} changed")
        return told

    def unheard(self, now: float) -> Iterator[str]:
        """Yield pools, each once, that were heard of ``UNHEARD_SECONDS`` ago at last."""
        for name, pool in self.items():
            if not pool.is_unheard and UNHEARD_SECONDS <= now - pool.told_at < math.inf:
                pool.is_unheard = True
                yield name
