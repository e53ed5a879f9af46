"""Step times and overheads fitted to a recording of a live server.

A step's time is the wall time it added: from the later of its plan and the previous result, to its
own result. It is fitted as a sum of terms that are never negative, weighted by 1 / time so that
relative errors count::

    t = a + f(T) + g(R) + b * SUM_wide n*(s + n/2) + c * SUM_narrow s + d * samples + e * wide rows
        + h * B + i * P

T tokens in all, R rows of one token, s tokens before a row, n in it, B bytes of the step's
adapters, P products of their rows; f and g are monotone and piecewise linear in powers of two,
since matrix kernels are flat until a tile is full and linear beyond it. ``core.predict.step_time``
lacks them, since it must be cheap enough for every step. The remainder is noise: ratios of measured
to fitted time, drawn from those of the recording.

Outside the steps: a request's time to the engine's inbox while the engine is idle, and the engine
thread's time from a result to the next plan.

This module does not know the scheduler.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.core.outputs import SchedulerOutput
from paceline.errors import ConfigError
from paceline.sim.config import Delays
from paceline.sim.recording import RecordedStep, Recording

__all__ = ["FitQuality", "RecordedStepTimes", "fit_delays", "step_intervals"]

_KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_MIN_STEPS: Final = 32
# ratio to the first fit above which a step is left out of the second (but not of the noise)
_OUTLIER: Final = 3.0
_SWEEPS: Final = 3000
# longest time between a result and the next plan, s; a longer gap means there was nothing to do
_LOOP_MOST: Final = 0.005


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Errors of a fit on a recording."""

    num_steps: int
    # mean of |fitted / measured - 1|
    mean_abs_error: float
    # sum of fitted / sum of measured - 1
    bias: float


def step_intervals(steps: Sequence[RecordedStep]) -> list[float]:
    """Return the seconds of wall time that each step added; see the module."""
    before = float("-inf")
    seconds = []
    for step in steps:
        seconds.append(max(1e-9, step.done - max(before, step.planned)))
        before = step.done
    return seconds


class RecordedStepTimes:
    """Step times fitted to a recording; see the module.

    Args:
        recording: a recording with at least 32 steps.
        seed: seed of the noise; None: steps take exactly the fitted time.

    Raises:
        ConfigError: too few steps.
    """

    def __init__(self, recording: Recording, *, seed: int | None = 0) -> None:
        steps = recording.steps
        if len(steps) < _MIN_STEPS:
            raise ConfigError(
                f"the recording has {len(steps)} steps, at least {_MIN_STEPS} are needed to fit"
            )
        measured = np.array(step_intervals(steps))
        features = np.array([_features_of(step) for step in steps])
        weights = _fit(features, measured)
        usual = measured < _OUTLIER * np.maximum(features @ weights, 1e-9)
        weights = _fit(features[usual], measured[usual])
        fitted = np.maximum(features @ weights, 1e-9)
        self._weights: list[float] = weights.tolist()
        ratios = measured / fitted
        is_wide = np.array([bool(s.wide) for s in steps])
        # ratios by kind of step; those of the other kind where one was never recorded
        self._ratios: list[list[float]] = [
            sorted(ratios[is_wide == kind].tolist()) or sorted(ratios.tolist())
            for kind in (False, True)
        ]
        self._rng = None if seed is None else random.Random(seed)
        # of a step's adapters, which a plan does not show: seconds of a byte, and of a product
        self.adapter_rates = tuple(1e-8 * w for w in self._weights[-2:])
        self._means = [float(np.mean(found)) for found in self._ratios]
        self.quality = _quality(fitted * np.where(is_wide, *self._means[::-1]), measured)

    def another(self, seed: int) -> RecordedStepTimes:
        """Return the same fit for another replica, with noise, if any, from its own seed."""
        other = copy(self)
        other._rng = None if self._rng is None else random.Random(seed)
        return other

    def judge(self, recording: Recording) -> FitQuality:
        """Return the errors of the same fit on another recording, to show what has changed."""
        measured = np.array(step_intervals(recording.steps))
        fitted = np.array(
            [
                self._means[bool(s.wide)]
                * sum(w * x for w, x in zip(self._weights, _features_of(s), strict=True))
                for s in recording.steps
            ]
        )
        return _quality(fitted, measured)

    def seconds(self, plan: SchedulerOutput) -> float:
        wide_tokens = wide_rows = narrow_rows = narrow_keys = samples = 0
        wide_keys = 0.0
        for _, start, num_tokens, _, sampled in plan.rows:
            samples += sampled
            if num_tokens == 1:
                narrow_rows += 1
                narrow_keys += start
            else:
                wide_rows += 1
                wide_tokens += num_tokens
                wide_keys += num_tokens * (start + 0.5 * num_tokens)
        features = _features(wide_tokens, wide_keys, wide_rows, narrow_rows, narrow_keys, samples)
        fitted = sum(w * x for w, x in zip(self._weights, features, strict=True))
        kind = wide_rows > 0
        ratio = self._means[kind] if self._rng is None else self._rng.choice(self._ratios[kind])
        return max(1e-9, fitted * ratio)


def _quality(fitted: NDArray[np.float64], measured: NDArray[np.float64]) -> FitQuality:
    return FitQuality(
        num_steps=len(measured),
        mean_abs_error=float(np.mean(np.abs(fitted / measured - 1.0))),
        bias=float(fitted.sum() / measured.sum() - 1.0),
    )


def _features_of(step: RecordedStep) -> list[float]:
    return _features(
        step.wide_tokens,
        step.wide_keys,
        len(step.wide),
        step.narrow_rows,
        step.narrow_keys,
        step.samples,
        step.adapters,
    )


def _features(
    wide_tokens: int,
    wide_keys: float,
    wide_rows: int,
    narrow_rows: int,
    narrow_keys: int,
    samples: int,
    adapters: tuple[int, int] = (0, 0),
) -> list[float]:
    """Return features that are about 1 in a busy step."""
    tokens = wide_tokens + narrow_rows
    features = [1.0, 1e-6 * wide_keys, 1e-5 * narrow_keys, 1e-1 * wide_rows, 1e-2 * samples]
    for knot in _KNOTS:
        # linear up to the knot, flat beyond it: sums of these are all monotone curves
        features.append(min(tokens, knot) / knot)
        features.append(max(0, tokens - knot) * 1e-3)
    for knot in _KNOTS[:9]:
        features.append(min(narrow_rows, knot) / knot)
    features += [1e-8 * each for each in adapters]
    return features


def _fit(features: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative least squares of relative errors, by coordinate descent."""
    scaled = features / measured[:, None]
    gram = scaled.T @ scaled
    moment = scaled.T @ np.ones(len(measured))
    gram[np.diag_indices_from(gram)] += 1e-6 * len(measured) * np.mean(1.0 / measured**2) * 1e-3
    weights = np.zeros(len(moment))
    diagonal = gram.diagonal()
    for _ in range(_SWEEPS):
        before = weights.copy()
        for i in range(len(weights)):
            if diagonal[i] > 0.0:
                rest = gram[i] @ weights - diagonal[i] * weights[i]
                weights[i] = max(0.0, (moment[i] - rest) / diagonal[i])
        if np.max(np.abs(weights - before)) <= 1e-7 * np.max(weights):
            break
    return weights


def fit_delays(recording: Recording) -> Delays:
    """Return the overheads outside the steps; zero where the recording does not show them."""
    steps, depth = recording.steps, recording.config.pipeline_depth
    idle: list[float] = []
    index = 0
    for request in recording.requests:
        while index < len(steps) and steps[index].done < request.arrival:
            index += 1
        if index == len(steps) or steps[index].planned >= request.taken:
            # no step ran while it was on its way
            idle.append(request.taken - request.arrival)
    if not idle:
        # the quickest: others waited for a step's end, which the simulation models by itself
        waits = sorted(r.taken - r.arrival for r in recording.requests)
        idle = waits[: max(1, len(waits) // 20)]
    # the plan that waited for a result: at depth 2 it is the next one, and usually made before
    # the result
    after = steps[1:] if depth == 2 else steps[depth:]
    loop = [
        step.planned - before.done
        for before, step in zip(steps, after, strict=False)
        if 0.0 <= step.planned - before.done < _LOOP_MOST
    ]
    return Delays(
        inbound=max(0.0, float(np.median(idle))) if idle else 0.0,
        loop=float(np.median(loop)) if loop else 0.0,
    )
