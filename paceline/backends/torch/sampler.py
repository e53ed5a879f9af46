"""Logits to tokens for a whole batch, each row by its own settings.

Order, as in vLLM: log-probabilities are taken from the raw logits; then logit_bias, repetition,
presence and frequency penalties; the bans of min_tokens, grammar, allowed_token_ids and bad_words;
greedy rows stop here; temperature, min_p, top_k, top_p, and one draw.

A draw walks the cumulative distribution to one uniform number that depends on (seed, output
position) alone, see ``uniforms``. So neither the batch, nor preemption, nor resuming changes it.

Work is proportional to the features that rows use: a greedy batch is one argmax, no array of the
size of the vocabulary is made for a feature that no row uses, and nothing is sorted when the
likeliest ``_CANDIDATES`` tokens decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.backends.runner.sampling import (
    SampleRow,
    Samples,
    asks_widely,
    uniforms,
    wide_logprobs,
)
from paceline.core.outputs import TokenLogprobs
from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams

__all__ = ["sample", "token_logprobs"]

# candidates examined: the first for top_k up to it, otherwise the second, and all if those do not
# decide. The number must depend on the row alone, since it affects the order of ties
_CANDIDATES: Final = (64, 1024)
# cumulative sums are taken over chunks first, then inside one
_CHUNK: Final = 256
# rows drawn at once, which bounds memory at this many float32 vocabularies, a few times
_ROWS: Final = 64


def sample(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    likeliest: NDArray[np.int32] | None = None,
) -> Samples:
    """Choose a token for each row of logits [rows, vocab], which are not changed.

    Args:
        likeliest: [rows], the first of each row's largest logits, -1 where one is not finite; None:
            it is computed here.
    """
    finite: list[bool]
    if likeliest is None:
        # one pass; NaN and infinities survive a sum, and opposite infinities make NaN
        finite = torch.isfinite(logits.sum(-1, dtype=torch.float32)).tolist()
    else:
        finite = (likeliest >= 0).tolist()
    special = [index for index, row in enumerate(rows) if finite[index] and not row.takes_likeliest]
    token_ids: list[int]
    if likeliest is not None:
        token_ids = likeliest.tolist()
    elif len(special) == len(rows):
        token_ids = [0] * len(rows)
    else:
        token_ids = _argmax(logits).tolist()
    for start in range(0, len(special), _ROWS):
        chunk = special[start : start + _ROWS]
        chosen = _sample_special(logits[chunk].float(), [rows[index] for index in chunk])
        for index, token_id in zip(chunk, chosen, strict=True):
            token_ids[index] = token_id
    return Samples(token_ids, finite, _logprobs(logits, rows, token_ids, finite))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first of the largest columns, [rows].

    Chunk maxima first: on the CPU, PyTorch finds largest values with vector instructions, but
    their indices one by one, which takes eight times as long for a whole vocabulary.
    """
    rows, columns = logits.shape
    whole = columns - columns % _CHUNK
    if whole == 0:
        return logits.argmax(-1)
    chunks = logits[:, :whole].view(rows, -1, _CHUNK)
    chunk = chunks.amax(-1).argmax(-1)
    inside = chunks[torch.arange(rows, device=logits.device), chunk]
    found = chunk * _CHUNK + inside.argmax(-1)
    if whole == columns:
        return found
    rest, place = logits[:, whole:].max(-1)
    return torch.where(rest > inside.amax(-1), place + whole, found)


def _sample_special(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Choose from float32 logits [rows, vocab], which are overwritten; -1 where none is left."""
    _reshape(logits, rows)
    reshaped = [i for i, row in enumerate(rows) if row.reshapes]
    left = torch.isfinite(logits[reshaped].amax(-1)).tolist() if reshaped else []
    empty = [i for i, has in zip(reshaped, left, strict=True) if not has]
    if empty:
        # any number will do, since it is not used
        logits[empty] = 0.0
    token_ids = _choose(logits, rows)
    for i in empty:
        token_ids[i] = -1
    return token_ids


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    drawn = [i for i, row in enumerate(rows) if row.sampling.params.temperature > 0.0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    token_ids: list[int] = _argmax(logits).tolist()
    if drawn:
        chosen = _draw(logits[drawn], [rows[i] for i in drawn])
        for i, token_id in zip(drawn, chosen, strict=True):
            token_ids[i] = token_id
    return token_ids


class _Entries:
    """Scattered elements of [rows, vocab], collected row by row."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.int64]] = []
        self.columns: list[NDArray[np.int64]] = []
        self.values: list[NDArray[np.float32]] = []

    def add(self, row: int, columns: Sequence[int] | NDArray[np.int32], values: object) -> None:
        count = len(columns)
        self.rows.append(np.full(count, row, dtype=np.int64))
        self.columns.append(np.asarray(columns, dtype=np.int64))
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), (count,)))

    def to(
        self, device: torch.device
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Return indices and values, or None when none were collected."""
        if not self.rows:
            return None
        rows = torch.from_numpy(np.concatenate(self.rows)).to(device)
        columns = torch.from_numpy(np.concatenate(self.columns)).to(device)
        return (rows, columns), torch.from_numpy(np.concatenate(self.values)).to(device)


def _reshape(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply bans, bias and penalties, which change the order of tokens, in place."""
    bias, repetition, presence, frequency, banned = (_Entries() for _ in range(5))
    masks: list[tuple[int, NDArray[np.bool_]]] = []
    for i, row in enumerate(rows):
        if not row.reshapes:
            continue
        change = row.reshaping()
        if change.bias_ids:
            bias.add(i, change.bias_ids, change.bias_values)
        if change.repetition_penalty != 1.0:
            repetition.add(i, change.tokens, change.repetition_penalty)
        if change.presence_penalty != 0.0:
            presence.add(i, change.output, change.presence_penalty)
        if change.frequency_penalty != 0.0:
            frequency.add(i, change.output, -change.frequency_penalty)
        masks.extend((i, mask) for mask in change.masks)
        if change.banned_ids:
            banned.add(i, change.banned_ids, -np.inf)
    device = logits.device
    if (entries := bias.to(device)) is not None:
        logits.index_put_(*entries, accumulate=True)
    # a token that occurs twice gets the same value twice, so duplicates need no care here ...
    if (entries := repetition.to(device)) is not None:
        index, penalty = entries
        old = logits[index]
        new = torch.where(old > 0, old / penalty, old * penalty)
        # a tiny penalty must not make infinity, which no distribution can hold
        logits.index_put_(index, new.clamp_(max=torch.finfo(torch.float32).max))
    if (entries := presence.to(device)) is not None:
        index, penalty = entries
        logits.index_put_(index, logits[index] - penalty)
    # ... and here they add up, as they should
    if (entries := frequency.to(device)) is not None:
        logits.index_put_(*entries, accumulate=True)
    for i, mask in masks:
        logits[i].masked_fill_(torch.from_numpy(mask).to(device), -torch.inf)
    if (entries := banned.to(device)) is not None:
        logits.index_put_(*entries)


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw a token per row of float32 logits [rows, vocab]; all rows have a temperature."""
    params = [row.sampling.params for row in rows]
    vocab = logits.shape[1]
    seeds = np.array([p.seed for p in params], dtype=np.int64).astype(np.uint64)
    positions = np.array([row.num_output_tokens for row in rows], dtype=np.uint64)
    device = logits.device
    uniform = torch.from_numpy(uniforms(seeds, positions)).to(device)
    likeliest = _argmax(logits)
    best = logits.gather(1, likeliest.unsqueeze(1))
    temperature = torch.tensor(
        [p.temperature for p in params], dtype=torch.float32, device=device
    ).unsqueeze(1)
    # e to the power of these are weights with 1 for the likeliest token
    scaled = (logits - best).div_(temperature)
    by_candidates: dict[int, list[int]] = {}
    for i, p in enumerate(params):
        candidates = 0
        if p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0:
            candidates = _CANDIDATES[0 if 0 < p.top_k <= _CANDIDATES[0] else 1]
        by_candidates.setdefault(min(candidates, vocab), []).append(i)
    chosen = likeliest
    for candidates, group in by_candidates.items():
        part = scaled if len(group) == len(rows) else scaled[group]
        if candidates == 0:
            chosen[group] = _invert(part.exp(), uniform[group], chosen[group])
            continue
        settings = [params[i] for i in group]
        drawn, decided = _draw_filtered(part, uniform[group], settings, candidates)
        undecided = [j for j, done in enumerate(decided.tolist()) if not done]
        if undecided:
            rest = [group[j] for j in undecided]
            drawn[undecided], _ = _draw_filtered(
                scaled[rest], uniform[rest], [params[i] for i in rest], vocab
            )
        chosen[group] = drawn
    result: list[int] = chosen.tolist()
    return result


def _invert(weights: torch.Tensor, uniform: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Return the first column whose cumulative weight exceeds ``uniform`` of the total, [rows].

    Sums are float64: over a whole vocabulary, float32 loses the tail. ``fallback`` is taken if
    rounding leads past the last column with weight.
    """
    rows, columns = weights.shape
    if columns % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, -columns % _CHUNK))
    padded = weights.view(rows, -1, _CHUNK)
    sums = padded.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = (uniform * ends[:, -1]).unsqueeze(1)
    chunk = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    target = target - (ends.gather(1, chunk) - sums.gather(1, chunk))
    inside = padded[torch.arange(rows, device=weights.device), chunk.squeeze(1)]
    offset = torch.searchsorted(inside.double().cumsum(-1), target, right=True)
    offset.clamp_(max=_CHUNK - 1)
    found = (chunk * _CHUNK + offset).squeeze(1)
    has_weight = inside.gather(1, offset).squeeze(1) > 0
    return torch.where(has_weight, found, fallback)


def _draw_filtered(
    scaled: torch.Tensor,
    uniform: torch.Tensor,
    params: Sequence[SamplingParams],
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw after min_p, top_k and top_p, looking at the likeliest ``candidates`` tokens only.

    Returns the tokens [rows] and whether the candidates decided [rows]; a token is only valid if
    they did. With ``candidates`` = vocab they always do.
    """
    device, vocab = scaled.device, scaled.shape[1]
    weights, token_ids = torch.topk(scaled, candidates, dim=-1)
    weights = weights.exp_().double()

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    top_k = column([float(min(p.top_k or vocab, vocab)) for p in params])
    min_p = column([p.min_p for p in params])
    rank = torch.arange(candidates, device=device)
    kept = (rank < top_k) & (weights >= min_p)
    # min_p and top_k leave a prefix of the candidates; does it extend beyond them?
    goes_on = kept[:, -1:] & (top_k > candidates)
    weights = weights * kept
    # top_p is a share of what min_p and top_k left
    total = weights.sum(-1, keepdim=True)
    decided = ~goes_on
    if candidates < vocab and any(p.top_p < 1.0 for p in params):
        everything = scaled.exp()
        everything.masked_fill_(everything < min_p, 0.0)
        total = torch.where(goes_on, everything.sum(-1, keepdim=True, dtype=torch.float64), total)
    top_p = column([p.top_p if p.top_p < 1.0 else np.inf for p in params])
    kept &= weights.cumsum(-1) - weights < top_p * total
    weights = weights * kept
    # top_p may decide after all, unless a top_k beyond the candidates left its total unknown
    decided |= ~kept[:, -1:] & (top_k >= vocab)
    ends = weights.cumsum(-1)
    target = uniform.unsqueeze(1) * ends[:, -1:]
    index = torch.searchsorted(ends, target, right=True)
    # kept tokens are a prefix, so stepping back to its end never selects a masked one
    index = torch.minimum(index, kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return token_ids.gather(1, index).squeeze(1), decided.squeeze(1)


def _logprobs(
    logits: torch.Tensor,
    rows: Sequence[SampleRow],
    token_ids: Sequence[int],
    finite: Sequence[bool],
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(rows)
    asking = [
        index
        for index, row in enumerate(rows)
        if finite[index] and token_ids[index] >= 0 and row.sampling.params.logprobs is not None
    ]
    for index in [i for i in asking if asks_widely(rows[i].sampling.params)]:
        asking.remove(index)
        row = logits[index].float().cpu().numpy()
        result[index] = wide_logprobs(row, token_ids[index], rows[index].sampling.params)
    for start in range(0, len(asking), _ROWS):
        chunk = asking[start : start + _ROWS]
        entries = token_logprobs(
            logits[chunk],
            [token_ids[index] for index in chunk],
            [rows[index].sampling.params.logprobs or 0 for index in chunk],
        )
        for index, entry in zip(chunk, entries, strict=True):
            result[index] = entry
    return result


@torch.inference_mode()
def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """A ``interface.Scorer`` of tensors; ``counts`` are ``MAX_LOGPROBS`` at most."""
    result: list[TokenLogprobs] = []
    # fixed, not the largest of the counts: the order of ties must not depend on other rows
    most = min(MAX_LOGPROBS, logits.shape[1])
    for start in range(0, len(logits), _ROWS):
        part = slice(start, start + _ROWS)
        logprobs = logits[part].float().log_softmax(-1)
        given = torch.tensor(token_ids[part], device=logits.device)
        own = logprobs.gather(1, given.unsqueeze(1))
        ranks = (logprobs > own).sum(-1).add_(1).tolist()
        top, top_ids = logprobs.topk(most, dim=-1)
        columns = zip(
            token_ids[part], counts[part], own.squeeze(1).tolist(), ranks,
            top_ids.tolist(), top.tolist(), strict=True,
        )  # fmt: skip
        for token_id, count, value, rank, ids, values in columns:
            likeliest = tuple(zip(ids[:count], values[:count], strict=True))
            result.append(TokenLogprobs(token_id, value, rank, likeliest))
    return result
