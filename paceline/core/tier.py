"""Tiers: how much a request loses by waiting, and the only moves that change it.

*Demote*: the request can no longer meet a target, so requests that can meet theirs go first.
*Rejoin*: no request that can meet its target gains by that any more: the request is ordinary again,
without the target that it missed. It asked for more than others did, and gets no less.
*Restore*: a best-effort request with a deadline was demoted, and there is time for it after all.
*Boost*: the tenant has far less than an equal share when the request arrives.

This module does not know requests, queues or when a move is due.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.slo import Slo

__all__ = ["Move", "Tier", "after", "tier_of"]


class Tier(enum.IntEnum):
    """Order in which requests are served: the more a request loses by waiting, the sooner."""

    # the request is not best effort, with or without targets
    ORDINARY = 0
    # it is best effort with targets that can still be met
    DEADLINE_BATCH = 1
    # a target of the request was missed or cannot be met any more
    DEMOTED = 2
    # it is best effort without targets
    BACKGROUND = 3


class Move(enum.Enum):
    """Changes of a request's tier."""

    DEMOTE = "demote"
    REJOIN = "rejoin"
    RESTORE = "restore"
    BOOST = "boost"


_ORDINARY, _DEADLINE_BATCH, _DEMOTED, _BACKGROUND = Tier
# where each move leads from a tier: demote, rejoin, restore, boost
_AFTER: Final[Mapping[Tier, Sequence[Tier | None]]] = {
    _ORDINARY: (_DEMOTED, None, None, _ORDINARY),
    _DEADLINE_BATCH: (_DEMOTED, None, None, _DEADLINE_BATCH),
    _DEMOTED: (None, _ORDINARY, _DEADLINE_BATCH, None),
    _BACKGROUND: (None, None, None, _BACKGROUND),
}


def tier_of(slo: Slo) -> Tier:
    """Return the tier of a request that arrives with these targets."""
    if not slo.best_effort:
        return Tier.ORDINARY
    return Tier.DEADLINE_BATCH if slo.has_targets else Tier.BACKGROUND


def after(tier: Tier, move: Move) -> Tier:
    """Return the tier after a move; raise ValueError if the table has no such move from here."""
    found = dict(zip(Move, _AFTER[tier], strict=True))[move]
    if found is None:
        raise ValueError(f"a request of tier {tier.name} cannot {move.value}")
    return found
