"""Choice of an engine: those that meet the request's targets first, and among them the one
predicted to answer soonest.

Everything is in seconds, so no weights are needed: a cached prefix counts as prompt tokens that
need not be computed, a queue as the tokens ahead, a full KV cache as the wait that it was learned
to cost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from paceline.routing.engine_load import Demand, EngineView

__all__ = ["choose", "predicted_seconds"]

# factor on predicted TTFTs: first tokens scatter, and a late request yields to others
_MARGIN: Final = 2.0
# predictions within this share of the best count as equal
_TIE: Final = 0.05


def predicted_seconds(view: EngineView, demand: Demand) -> float:
    """Seconds from now to the last token."""
    return view.ttft + view.tpot * max(0.0, demand.output_tokens - 1.0)


def choose(views: Sequence[EngineView], demand: Demand, draw: random.Random) -> int:
    """Choose an index into ``views``, which are not empty."""
    let_in = [i for i, v in enumerate(views) if v.share >= 1.0 or draw.random() < v.share]
    # an engine that starts, or is slow, is better than a wait where all others are full
    if len(let_in) < len(views) and any(not views[i].wait for i in let_in):
        return let_in[choose([replace(views[i], share=1.0) for i in let_in], demand, draw)]
    among = _best_group(views, demand)
    seconds = {i: predicted_seconds(views[i], demand) for i in among}
    best = min(seconds.values())
    ties = [i for i, value in seconds.items() if value <= best * (1.0 + _TIE)]
    if len(ties) == 1:
        return ties[0]
    fewest = min(views[i].num_requests for i in ties)
    ties = [i for i in ties if views[i].num_requests == fewest]
    # next to a long answer a cached prefix saves little time, but it saves all of its computation
    most = max(views[i].cached_tokens for i in ties)
    return draw.choice([i for i in ties if views[i].cached_tokens == most])


def _best_group(views: Sequence[EngineView], demand: Demand) -> list[int]:
    """Return engines that meet the targets and have memory; else those that meet the targets; else
    those that have memory; else all."""
    everyone = range(len(views))
    own = [i for i in everyone if _may_have(views[i], demand)] or list(everyone)
    meets = [i for i in own if _meets(views[i], demand)]
    roomy = [i for i in own if not views[i].wait]
    return [i for i in meets if i in roomy] or meets or roomy or own


def _may_have(view: EngineView, demand: Demand) -> bool:
    # a cached conversation only needs memory for its new turn
    return not view.pressed or view.cached_tokens >= 0.5 * demand.prompt_tokens


def _meets(view: EngineView, demand: Demand) -> bool:
    return (demand.ttft is None or _MARGIN * view.ttft <= demand.ttft) and (
        demand.tpot is None or view.tpot <= demand.tpot
    )
