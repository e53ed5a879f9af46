"""Logits to tokens beside a native model, without PyTorch: ``torch.sampler``'s rules and results.

Order: log-probabilities are taken from the raw logits; then logit_bias, repetition, presence and
frequency penalties; what min_tokens, grammar, allowed_token_ids and bad_words forbid; greedy rows
stop here; temperature, min_p, top_k, top_p, and one draw.

A row's token follows from its own logits and settings alone, whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.backends.native.model import NativeModel
from paceline.backends.sampling import SampleRow, Samples, uniforms
from paceline.core.outputs import TokenLogprobs
from paceline.core.request import MAX_LOGPROBS

__all__ = ["NativeSampler", "token_logprobs"]


class NativeSampler:
    """Chooses tokens for a model's rows. Used from the model's thread, between its steps."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model

    def sample(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[SampleRow],
        likeliest: NDArray[np.int32],
    ) -> Samples:
        """Choose a token for each row of logits [rows, vocab], which are left as they are.

        Args:
            likeliest: [rows], the first of each row's largest logits, -1 where one is not finite.

        Raises:
            ValueError: the arguments are not about the same number of rows.
        """
        if not len(logits) == len(rows) == len(likeliest):
            raise ValueError(
                f"logits of shape {list(logits.shape)}, {len(rows)} rows and {len(likeliest)} "
                "likeliest tokens do not go together"
            )
        finite: list[bool] = (likeliest >= 0).tolist()
        token_ids: list[int] = likeliest.tolist()
        for index, row in enumerate(rows):
            if finite[index] and not row.takes_likeliest:
                token_ids[index] = _choose(logits[index], row)
        result: list[TokenLogprobs | None] = [None] * len(rows)
        asking = [
            index
            for index, row in enumerate(rows)
            if finite[index] and token_ids[index] >= 0 and row.sampling.params.logprobs is not None
        ]
        if asking:
            entries = token_logprobs(
                logits[asking],
                [token_ids[index] for index in asking],
                [rows[index].sampling.params.logprobs or 0 for index in asking],
            )
            for index, entry in zip(asking, entries, strict=True):
                result[index] = entry
        return Samples(token_ids, finite, result)


def token_logprobs(
    logits: NDArray[np.float32],
    token_ids: Sequence[int],
    counts: Sequence[int],
    model: NativeModel | None = None,
) -> list[TokenLogprobs]:
    """Log-probabilities of one given token a row, and of the row's likeliest ones.

    Args:
        logits: [rows, vocab], finite.
        token_ids: [rows].
        counts: [rows], how many of the likeliest are wanted, at most ``MAX_LOGPROBS``; all where
            the vocabulary has fewer.
        model: whose threads share the rows; None: the calling thread alone.

    Returns:
        One entry a row. Ranks are by the logits themselves; the likeliest are in their order, equal
        ones in the vocabulary's.
    """
    entries = []
    for row, token_id, count in zip(logits, token_ids, counts, strict=True):
        best = float(row.max())
        log_total = best + float(np.log(np.exp(row - row.max()).sum(dtype=np.float64)))
        order = np.argsort(-row, kind="stable")[: min(count, MAX_LOGPROBS)]
        top = tuple((int(i), float(row[i]) - log_total) for i in order)
        own = float(row[token_id]) - log_total
        rank = 1 + int(np.count_nonzero(row > row[token_id]))
        entries.append(TokenLogprobs(int(token_id), own, rank, top))
    return entries


def _choose(logits: NDArray[np.float32], row: SampleRow) -> int:
    """A token by the row's settings, -1 where none is left."""
    params = row.sampling.params
    if row.reshapes:
        logits = logits.copy()
        reshape(logits, row)
    likeliest = int(logits.argmax())
    best = logits[likeliest]
    if best == -np.inf:
        return -1
    if params.temperature == 0.0:
        return likeliest
    scaled = (logits - best) / np.float32(max(params.temperature, 1e-30))
    weights = np.exp(scaled).astype(np.float64)
    seed = np.array([params.seed], dtype=np.int64).astype(np.uint64)
    position = np.array([row.num_output_tokens], dtype=np.uint64)
    uniform = float(uniforms(seed, position)[0])
    weights[weights < params.min_p] = 0.0
    order = np.arange(len(weights))
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        order = np.argsort(-weights, kind="stable")
        order = order[: params.top_k or len(order)]
        kept = weights[order]
        if params.top_p < 1.0:
            order = order[kept.cumsum() - kept < params.top_p * kept.sum()]
    ends = weights[order].cumsum()
    index = int(np.searchsorted(ends, uniform * ends[-1], side="right"))
    # rounding must not lead to a token without weight
    index = min(index, int(np.flatnonzero(weights[order])[-1]))
    return int(order[index])


def reshape(logits: NDArray[np.float32], row: SampleRow) -> None:
    """Apply ``row.reshaping()`` to the row's logits [vocab], in place."""
    change = row.reshaping()
    if change.bias_ids:
        np.add.at(logits, change.bias_ids, np.array(change.bias_values, dtype=np.float32))
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if change.repetition_penalty != 1.0:
            penalty = np.float32(change.repetition_penalty)
            old = logits[change.tokens]
            new = np.where(old > 0, old / penalty, old * penalty)
            logits[change.tokens] = np.minimum(new, np.finfo(np.float32).max)
    if change.presence_penalty != 0.0:
        logits[change.output] = logits[change.output] - np.float32(change.presence_penalty)
    if change.frequency_penalty != 0.0:
        np.add.at(logits, change.output, np.float32(-change.frequency_penalty))
    for mask in change.masks:
        logits[mask] = -np.inf
    if change.banned_ids:
        logits[change.banned_ids] = -np.inf
