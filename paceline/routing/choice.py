"""Which engine gets a request: those that meet its targets first, and of them the one predicted to
answer soonest.

Everything is in seconds, so nothing has to be weighed against anything else: a prefix that an
engine holds counts as the prompt tokens it need not compute, a queue as the tokens ahead, a full KV
cache as the wait it was learned to cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from paceline.routing.engine_load import Demand, EngineView

__all__ = ["choose", "predicted_seconds"]

# predictions that differ by less are the same
_TIE: Final = 0.05


def predicted_seconds(view: EngineView, demand: Demand) -> float:
    """From now to the last token."""
    return view.ttft + view.tpot * max(0.0, demand.output_tokens - 1.0)


def choose(views: Sequence[EngineView], demand: Demand, draw: random.Random) -> int:
    """An index into ``views``, of which there is at least one."""
    candidates = [i for i, view in enumerate(views) if _has_room(view, demand)] or list(
        range(len(views))
    )
    meeting = [i for i in candidates if _meets(views[i], demand)]
    among = meeting or candidates
    seconds = {i: predicted_seconds(views[i], demand) for i in among}
    best = min(seconds.values())
    ties = [i for i, value in seconds.items() if value <= best * (1.0 + _TIE)]
    if len(ties) == 1:
        return ties[0]
    fewest = min(views[i].num_requests for i in ties)
    return draw.choice([i for i in ties if views[i].num_requests == fewest])


def _has_room(view: EngineView, demand: Demand) -> bool:
    # a conversation that is there already costs the memory of its new turn alone
    return not view.pressed or view.cached_tokens >= 0.5 * demand.prompt_tokens


def _meets(view: EngineView, demand: Demand) -> bool:
    return (demand.ttft is None or view.ttft <= demand.ttft) and (
        demand.tpot is None or view.tpot <= demand.tpot
    )
