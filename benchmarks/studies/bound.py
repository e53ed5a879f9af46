"""A machine like the one of the figures in docs/lab-log/, and a bound on any order of service.

The machine: two cores that serve a 135M model in int8, 4 ms a step, 0.39 ms a prompt token, 0.85 ms
for a row of one token.

The bound: a server that knew all arrivals and lengths, and could serve parts of requests, would
choose the feasible amounts of work p_i <= w_i for which sum(p_i / w_i) is largest. Amounts are
feasible if, for every interval, the work of requests whose windows (arrival to last token due) lie
in it is no more than its length. Feasible amounts are a polymatroid, so the greedy choice, the
smallest w_i first, is the best one (Edmonds 1970). w_i is the prompt's tokens and the rows of its
output; those of a request with a TPOT target take a share of the fixed part of their steps too,
which last no longer on average than that target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from paceline.core.outputs import SchedulerOutput
from paceline.core.slo import Slo

__all__ = ["ROW", "STEP", "TOKEN", "Asked", "Steps", "own_seconds", "share_in_time"]

STEP: Final = 0.004
TOKEN: Final = 0.00039
ROW: Final = 0.00085


def own_seconds(num_tokens: int) -> float:
    """Return the seconds that a row of ``num_tokens`` tokens adds to a step."""
    return ROW if num_tokens == 1 else TOKEN * num_tokens


class Steps:
    """Step times of the machine."""

    def another(self, seed: int) -> Steps:
        return self

    def seconds(self, plan: SchedulerOutput) -> float:
        narrow = sum(num_tokens == 1 for _, _, num_tokens, _, _ in plan.rows)
        return STEP + TOKEN * (plan.num_tokens - narrow) + ROW * narrow


class Asked(NamedTuple):
    """A request of a stream: its arrival, tokens and targets."""

    at: float
    prompt_tokens: int
    output_tokens: int
    # a deadline, or targets for both the first token and the pace
    slo: Slo


def share_in_time(stream: Sequence[Asked], seconds: float) -> float:
    """Return the bound on the share of requests in time, in any order of service, if the stream of
    ``seconds`` seconds is repeated on end; see the module's docstring."""
    total = seconds
    due, work = [], []
    for at, prompt, output, slo in stream:
        ttft, tpot, rest = slo.ttft or 0.0, slo.tpot or 0.0, output - 1
        due.append(at + (ttft + rest * tpot if slo.deadline is None else slo.deadline))
        own = TOKEN * prompt + ROW * rest
        work.append(own / (1.0 - STEP / tpot) if tpot else own)
    begins = np.array([each.at for each in stream])
    starts, ends = np.unique(begins), np.unique(due)
    # seconds of each interval that no chosen work takes; none if it ends before it begins
    left = np.maximum(0.0, ends[None, :] - starts[:, None])
    served = 0.0
    for index in np.argsort(work):
        inside = left[
            : np.searchsorted(starts, begins[index]) + 1, np.searchsorted(ends, due[index]) :
        ]
        done = min(work[index], float(inside.min()), total)
        inside -= done
        total -= done
        served += done / work[index]
    return served / len(stream)
