"""Logits to tokens for a native model, without PyTorch: ``torch.sampler``'s rules and results.

Order: log-probabilities are taken from the raw logits; then logit_bias, repetition, presence and
frequency penalties; the bans of min_tokens, grammar, allowed_token_ids and bad_words; greedy rows
stop here; temperature, min_p, top_k, top_p, and one draw.

A row's token follows from its own logits and settings alone, in any batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.backends.native.library import Draw, Logprobs, check, library
from paceline.backends.native.model import NativeModel
from paceline.backends.runner.sampling import (
    Reshaping,
    SampleRow,
    Samples,
    asks_widely,
    uniforms,
    wide_logprobs,
)
from paceline.core.outputs import TokenLogprobs

__all__ = ["NativeSampler", "token_logprobs"]


class NativeSampler:
    """Sampler for a model's rows. Used from the model's thread, between its steps.

    Args:
        model: its threads share the rows, and its kernel variant is used; None: the calling
            thread and the best variant.
    """

    def __init__(self, model: NativeModel | None = None) -> None:
        self._model = model
        # copies of the rows whose logits are changed, kept for the next call
        self._changed = np.empty((0, 0), dtype=np.float32)

    def sample(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[SampleRow],
        likeliest: NDArray[np.int32],
    ) -> Samples:
        """Choose a token for each row of logits [rows, vocab], which are not changed.

        Args:
            logits: may be [0, vocab] when no row's settings read them.
            likeliest: [rows], the first of each row's largest logits, -1 where one is not finite.

        Raises:
            ValueError: the arguments differ in the number of rows.
        """
        complete = len(logits) == len(rows) or (
            len(logits) == 0
            and not any(row.sampling.reads_logits or row.forbidden is not None for row in rows)
        )
        if logits.ndim != 2 or not complete or len(likeliest) != len(rows):
            raise ValueError(
                f"logits of shape {list(logits.shape)}, {len(rows)} rows and {len(likeliest)} "
                "likeliest tokens do not go together"
            )
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        token_ids: list[int] = likeliest.tolist()
        finite = [token_id >= 0 for token_id in token_ids]
        special = [
            index for index, row in enumerate(rows) if finite[index] and not row.takes_likeliest
        ]
        if special:
            chosen = self._draw(logits, [rows[index] for index in special], special, likeliest)
            for index, token_id in zip(special, chosen, strict=True):
                token_ids[index] = token_id
        result: list[TokenLogprobs | None] = [None] * len(rows)
        asking = [
            index
            for index, row in enumerate(rows)
            if row.sampling.params.logprobs is not None and finite[index] and token_ids[index] >= 0
        ]
        for index in [i for i in asking if asks_widely(rows[i].sampling.params)]:
            asking.remove(index)
            params = rows[index].sampling.params
            result[index] = wide_logprobs(logits[index], token_ids[index], params)
        if asking:
            entries = _logprobs(
                _addresses(logits, asking),
                logits.shape[1],
                [token_ids[index] for index in asking],
                [rows[index].sampling.params.logprobs or 0 for index in asking],
                self._model,
            )
            for index, entry in zip(asking, entries, strict=True):
                result[index] = entry
        return Samples(token_ids, finite, result)

    def _draw(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[SampleRow],
        indices: Sequence[int],
        likeliest: NDArray[np.int32],
    ) -> list[int]:
        """Draw tokens for the rows at ``indices`` of the logits."""
        vocab = logits.shape[1]
        params = [row.sampling.params for row in rows]
        addresses = _addresses(logits, indices)
        known = likeliest[indices].astype(np.int32, copy=False)
        changes = {index: row.reshaping() for index, row in enumerate(rows) if row.reshapes}
        changed = [index for index, change in changes.items() if change.names_tokens]
        if changed:
            if len(self._changed) < len(changed) or self._changed.shape[1] != vocab:
                self._changed = np.empty((len(changed), vocab), dtype=np.float32)
            for copy, index in zip(self._changed, changed, strict=False):
                copy[:] = logits[indices[index]]
                _change(copy, changes[index])
            addresses[changed] = _addresses(self._changed, range(len(changed)))
            known[changed] = -1
        # referenced until the call returns, since the library gets their addresses
        masks = {index: _mask(change, vocab) for index, change in changes.items() if change.masks}
        forbidden = np.zeros(len(rows), dtype=np.uint64)
        for index, mask in masks.items():
            forbidden[index] = mask.ctypes.data
        seeds = np.array([p.seed for p in params], dtype=np.int64).astype(np.uint64)
        uniform = uniforms(seeds, np.array([row.num_output_tokens for row in rows], np.uint64))
        temperature, top_p, min_p = np.array(
            [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        )
        top_k = np.array([p.top_k for p in params], dtype=np.int64)
        tokens = np.empty(len(rows), dtype=np.int32)
        draw = Draw(
            rows=len(rows),
            vocab=vocab,
            logits=addresses.ctypes.data,
            likeliest=known.ctypes.data,
            masks=forbidden.ctypes.data,
            temperature=temperature.ctypes.data,
            top_k=top_k.ctypes.data,
            top_p=top_p.ctypes.data,
            min_p=min_p.ctypes.data,
            uniform=uniform.ctypes.data,
            tokens=tokens.ctypes.data,
        )
        check(library().paceline_draw(_handle(self._model), ctypes.byref(draw)))
        result: list[int] = tokens.tolist()
        return result


def token_logprobs(
    logits: NDArray[np.float32],
    token_ids: Sequence[int],
    counts: Sequence[int],
    model: NativeModel | None = None,
) -> list[TokenLogprobs]:
    """Return the log-probability of one given token per row, and of the row's likeliest ones.

    Args:
        logits: [rows, vocab]; the results for a row that is not finite are meaningless.
        token_ids: [rows].
        counts: [rows], how many of the likeliest are wanted, 64 at most; all where the vocabulary
            has fewer.
        model: its threads share the rows; None: the calling thread alone.

    Returns:
        One entry per row. Ranks are by the logits themselves; the likeliest are in their order,
        equal ones in the vocabulary's.

    Raises:
        ConfigError: a token outside the vocabulary, or a count above 64.
        ValueError: the arguments differ in the number of rows.
    """
    if logits.ndim != 2 or not len(logits) == len(token_ids) == len(counts):
        raise ValueError(
            f"logits of shape {list(logits.shape)}, {len(token_ids)} tokens and {len(counts)} "
            "counts do not go together"
        )
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    addresses = _addresses(logits, range(len(logits)))
    return _logprobs(addresses, logits.shape[1], token_ids, counts, model)


def _logprobs(
    addresses: NDArray[np.uint64],
    vocab: int,
    token_ids: Sequence[int],
    counts: Sequence[int],
    model: NativeModel | None,
) -> list[TokenLogprobs]:
    rows, count = len(addresses), min(max(counts, default=0), vocab)
    tokens = np.array(token_ids, dtype=np.int32)
    own = np.empty(rows)
    ranks = np.empty(rows, dtype=np.int64)
    top_tokens = np.empty((rows, count), dtype=np.int32)
    top = np.empty((rows, count))
    logprobs = Logprobs(
        rows=rows,
        vocab=vocab,
        count=count,
        logits=addresses.ctypes.data,
        tokens=tokens.ctypes.data,
        own=own.ctypes.data,
        ranks=ranks.ctypes.data,
        top_tokens=top_tokens.ctypes.data,
        top=top.ctypes.data,
    )
    check(library().paceline_logprobs(_handle(model), ctypes.byref(logprobs)))
    columns = zip(
        tokens.tolist(), own.tolist(), ranks.tolist(), top_tokens.tolist(), top.tolist(), counts,
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprobs(token_id, value, rank, tuple(zip(ids[:k], values[:k], strict=True)))
        for token_id, value, rank, ids, values, k in columns
    ]


def _addresses(logits: NDArray[np.float32], rows: Sequence[int]) -> NDArray[np.uint64]:
    """Return the addresses of rows of contiguous logits."""
    return np.array(rows, dtype=np.uint64) * np.uint64(logits.strides[0]) + np.uint64(
        logits.ctypes.data
    )


def _handle(model: NativeModel | None) -> int | None:
    return None if model is None else model.handle


def _mask(change: Reshaping, vocab: int) -> NDArray[np.bool_]:
    """Return the banned tokens, [vocab]. Raises ValueError where a mask has another size."""
    for mask in change.masks:
        if mask.shape != (vocab,) or mask.dtype != np.bool_:
            raise ValueError(
                f"a mask of shape {list(mask.shape)} and type {mask.dtype} does not go with "
                f"{vocab} logits"
            )
    first, *others = change.masks
    return np.ascontiguousarray(first) if not others else np.logical_or(first, others[0])


def _change(logits: NDArray[np.float32], change: Reshaping) -> None:
    """Apply everything but the masks to a row's logits [vocab], in place."""
    if change.bias_ids:
        np.add.at(logits, change.bias_ids, np.array(change.bias_values, dtype=np.float32))
    if change.repetition_penalty != 1.0:
        penalty = np.float32(change.repetition_penalty)
        old = logits[change.tokens]
        # in float32 a tiny penalty is zero and a large logit may become infinite
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            new = np.where(old > 0, old / penalty, old * penalty)
        logits[change.tokens] = np.minimum(new, np.finfo(np.float32).max)
    if change.presence_penalty != 0.0:
        logits[change.output] = logits[change.output] - np.float32(change.presence_penalty)
    if change.frequency_penalty != 0.0:
        np.add.at(logits, change.output, np.float32(-change.frequency_penalty))
    if change.banned_ids:
        logits[change.banned_ids] = -np.inf
