"""What a sampler may choose, in float64 and from the rules, for one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.backends.runner.sampling import PreparedSampling, SampleRow, uniforms
from paceline.core.sampling_params import SamplingParams

__all__ = ["allowed_tokens", "likeliest_of", "make_row", "reshaped", "uniform_of", "weights_of"]

# how far a sampler may be off, in shares of the whole distribution
_EPSILON = 1e-6


def make_row(
    tokens: Sequence[int] | NDArray[np.int32] = (1, 2, 3),
    prompt: int = 3,
    *,
    vocab: int,
    forbidden: NDArray[np.bool_] | None = None,
    **params: Any,
) -> SampleRow:
    settings = SamplingParams(**({"max_tokens": 100_000, "temperature": 0.0} | params))
    prepared = PreparedSampling(settings, vocab)
    return SampleRow(prepared, np.asarray(tokens, dtype=np.int32), prompt, forbidden)


def likeliest_of(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The first of each row's largest, -1 where one is not finite."""
    finite = np.isfinite(logits).all(-1)
    safe = np.where(finite[:, None], logits, 0)
    return np.where(finite, safe.argmax(-1), -1).astype(np.int32)


def uniform_of(row: SampleRow) -> float:
    seed = np.array([row.sampling.params.seed], dtype=np.int64).astype(np.uint64)
    return float(uniforms(seed, np.array([row.num_output_tokens], dtype=np.uint64))[0])


def reshaped(logits: NDArray[np.float32], row: SampleRow) -> NDArray[np.float32]:
    """What the row's settings make of its logits [vocab], token by token, in float32."""
    params, vocab = row.sampling.params, len(logits)
    result = logits.copy()
    tokens = row.tokens.tolist()
    output = tokens[row.num_prompt_tokens :]
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        for token, bias in params.logit_bias:
            result[token] += np.float32(bias)
        for token in set(tokens):
            penalty, old = np.float32(params.repetition_penalty), result[token]
            result[token] = min(old / penalty if old > 0 else old * penalty, largest)
        for token in set(output):
            result[token] -= np.float32(params.presence_penalty)
        for token in output:
            result[token] -= np.float32(params.frequency_penalty)
    may = np.ones(vocab, dtype=np.bool_) if row.forbidden is None else ~row.forbidden
    ending = [id_ for id_ in params.eos_token_ids | params.stop_token_ids if id_ < vocab]
    others = may.copy()
    others[ending] = False
    # a grammar that leaves nothing but the end knows better than min_tokens
    if len(output) < params.min_tokens and (row.forbidden is None or others.any()):
        may = others
    if params.allowed_token_ids is not None:
        may &= np.isin(np.arange(vocab), list(params.allowed_token_ids))
    for *tail, last in params.bad_words:
        if len(output) >= len(tail) and output[len(output) - len(tail) :] == tail:
            may[last] = False
    result[~may] = -np.inf
    return result


def weights_of(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Weights by temperature alone, 1 for the likeliest."""
    shifted = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        return np.exp(shifted / params.temperature)


def allowed_tokens(
    logits: NDArray[np.float32], params: SamplingParams, uniform: float, *, stable: bool
) -> set[int]:
    """Tokens that a sampler may draw from reshaped logits [vocab]; {-1} where none is left.

    The token whose interval of the cumulative distribution holds ``uniform``, and those that would
    if sums were off by a share of 1e-6, filters met a value 1e-6 beside their limit, or tokens that
    float32 can hardly tell apart changed places. The distribution runs through the vocabulary
    without filters, from the likeliest on with them.

    Args:
        stable: equal logits keep the vocabulary's order; False: they may come in any.
    """
    if logits.max() == -np.inf:
        return {-1}
    if params.temperature == 0.0:
        return {int(logits.argmax())}
    weights, vocab = weights_of(logits, params), len(logits)
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    order = np.argsort(-logits, kind="stable") if filtered else np.arange(vocab)
    ordered = weights[order]
    ends = ordered.cumsum()
    counts = {vocab}
    if params.min_p > 0.0:
        counts = {
            max(1, int((ordered >= params.min_p * (1 + side)).sum()))
            for side in (-_EPSILON, 0.0, _EPSILON)
        }
    if params.top_k > 0:
        counts = {min(count, params.top_k) for count in counts}
    if params.top_p < 1.0:
        counts = {
            min(count, 1 + int(np.searchsorted(ends, (params.top_p + side) * ends[count - 1])))
            for count in counts
            for side in (-_EPSILON, 0.0, _EPSILON)
        }
    places: set[int] = set()
    for count in counts:
        first, last = (
            int(np.searchsorted(ends[:count], (uniform + side) * ends[count - 1], side="right"))
            for side in (-_EPSILON, _EPSILON)
        )
        places |= {p for p in range(first, min(last, count - 1) + 1) if ordered[p] > 0}
        if first >= count - 1:
            # rounding leads past the end: the last that has weight
            places.add(int(np.flatnonzero(ordered[:count])[-1]))
    tokens = {int(order[place]) for place in places}
    if not filtered:
        return tokens
    for token in tuple(tokens):
        size = max(abs(float(logits[token])), abs(float(logits.max())))
        # differences that float32 loses in the logits, or in their weights
        least = max(size, params.temperature) * 2.0**-21
        near = np.abs(logits.astype(np.float64) - logits[token]) <= least
        if stable:
            near &= logits != logits[token]
        tokens |= set(np.flatnonzero(near).tolist())
    return tokens
