"""One of several models as a value: how it was given, its state, its leases and who awaits it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from paceline.engine.models.ledger import Account
from paceline.errors import PacelineError

__all__ = ["Model", "ModelSpec", "State", "Ticket"]

# half-life, s, of a model's rate of requests
_HALF_LIFE: Final = 600.0


class State(Enum):
    """States of a model; the values are what callers are shown."""

    KNOWN = "known"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADED = "unloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as it was given. ``account`` is what it is expected to take."""

    name: str
    account: Account
    aliases: tuple[str, ...] = ()
    weight: float = 1.0
    # loaded at start; only a caller that asks for it unloads it
    pinned: bool = False
    # seconds without a lease after which it is unloaded; None: as the server's
    keep_alive: float | None = None
    # name of the one that answers while this one is not in memory; empty: none does
    fallback: str = ""
    # most requests that wait for it; None: any number
    max_waiting: int | None = None
    # why it cannot be loaded; empty: as far as is known it can
    broken: str = ""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request for a lease. Either ``is_granted`` or ``error`` is set in the end."""

    model: Model
    since: float
    is_granted: bool = False
    error: PacelineError | None = None


@dataclass(slots=True, eq=False)
class Model:
    """A model now; ``ModelStates`` alone changes it."""

    spec: ModelSpec
    # what it takes, or is expected to
    account: Account
    state: State = State.KNOWN
    leases: set[Ticket] = field(default_factory=set)
    waiting: list[Ticket] = field(default_factory=list)
    reason: str = ""
    # until when a failed one is not tried again
    retry_at: float = -math.inf
    num_crashes: int = 0
    loaded_at: float = -math.inf
    load_seconds: float = 0.0
    last_used: float = -math.inf
    # seconds that the latest request wanted it kept; None: as given
    keep_alive: float | None = None
    # asked to load by a caller who leases nothing; to go, when unused
    wanted: bool = False
    to_go: bool = False
    # decayed number of requests, at ``last_used``
    requests: float = 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_resident(self) -> bool:
        return self.state in (State.READY, State.DRAINING)

    def rate(self, now: float) -> float:
        """Return its requests a second lately."""
        return self._decayed(now) * math.log(2.0) / _HALF_LIFE

    def use(self, now: float) -> None:
        self.requests = self._decayed(now) + 1.0
        self.last_used = now

    def _decayed(self, now: float) -> float:
        if not self.requests:
            return 0.0
        return self.requests * math.pow(0.5, max(0.0, now - self.last_used) / _HALF_LIFE)
