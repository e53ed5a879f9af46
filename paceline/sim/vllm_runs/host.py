"""Time of a recorded run's steps besides their operators, measured on the run itself.

The profiles hold kernels. Steps that no captured graph covers take longer than the sum of their
kernels, by about the same time whatever they compute, and by about twice as much with twice the
layers. So it is counted per layer.

Single steps are measured. A request's ``scheduled_ts`` is when its first step was planned, and with
asynchronous scheduling that is when the previous step started; ``first_token_ts`` is when its step
ended. Where no other prompt is computed in between, two steps passed whose rows are known::

    scheduled                                            first token
        | step of one token for each row | the prompt, and a token for each row |

and the time between the stamps minus the operators of both steps is the time sought. The result is
the median over all such requests: steps that recompute a preempted request cannot be recognised by
the stamps, and lengthen some of the distances. A negative median counts as 0: such a run shows that
its kernels are quicker than the profile's, and nothing about the host.

A run is never judged with its own time: ``for_run`` takes the mean of the *other* runs on the same
hardware, and 0 where there are none, since the host is a part of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from paceline.sim.step_times.profile import ProfileStepTimes
from paceline.sim.vllm_runs.runs import Measured, VllmRun

__all__ = ["HostTime", "for_run", "measure"]

# stamps at most this many seconds apart belong to the same step
_SAME: Final = 1e-4
# fewest steps whose median is used
_FEWEST_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class HostTime:
    """Result for one run."""

    run: str
    hardware: str
    # time per layer of a step that no captured graph covers
    seconds_per_layer: float
    # number of steps in the median
    num_steps: int


def measure(run: VllmRun, times: ProfileStepTimes) -> HostTime | None:
    """Return the time of the run's steps besides their operators.

    Args:
        times: operators alone, of the run's profile.

    Returns:
        None where it cannot be measured: fewer than eight steps whose rows are known, no
        asynchronous scheduling, or engines whose requests cannot be told apart.
    """
    if run.num_engines > 1 or not run.async_scheduling:
        return None
    left = [left for m in run.requests if (left := _left_over(run, times, m)) is not None]
    if len(left) < _FEWEST_STEPS:
        return None
    per_layer = max(0.0, statistics.median(left)) / run.model.num_layers
    return HostTime(run.name, run.hardware, per_layer, len(left))


def for_run(run: VllmRun, measured: Iterable[HostTime]) -> float:
    """Return a large step's seconds in ``run`` by other runs on its hardware; 0 without any."""
    others = [
        other.seconds_per_layer
        for other in measured
        if other.run != run.name and other.hardware == run.hardware
    ]
    return run.model.num_layers * statistics.mean(others) if others else 0.0


def _left_over(run: VllmRun, times: ProfileStepTimes, request: Measured) -> float | None:
    """Return the seconds between a request's stamps that no operator accounts for; None where other
    prompts were computed meanwhile, or a captured graph covers the step."""
    begin, end = request.scheduled, request.first_token
    if begin is None:
        return None
    others = [other for other in run.requests if other is not request]
    rows = []
    for other in others:
        if other.scheduled is None:
            return None
        if other.scheduled < end - _SAME and other.first_token > begin + _SAME:
            return None
        if other.first_token <= begin + _SAME and other.last_token >= end - _SAME:
            rows.append(_keys_at(other, begin))
    chunk = request.arrival.prompt_tokens
    if (
        not rows
        or chunk + len(rows) > run.max_num_batched_tokens
        or times.is_captured(chunk + len(rows))
    ):
        return None
    before = times.of(0, 0.0, rows, len(rows))
    return end - begin - before - times.of(chunk, 0.0, rows, len(rows) + 1)


def _keys_at(request: Measured, at: float) -> int:
    """Return a running request's tokens at a time, as if they had come evenly."""
    share = (at - request.first_token) / max(_SAME, request.last_token - request.first_token)
    arrival = request.arrival
    return arrival.prompt_tokens + max(1, round(share * arrival.output_tokens))
