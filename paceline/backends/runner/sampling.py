"""Inputs and results of sampling: the settings of rows, and the random numbers that decide draws.

A row's choice follows from these alone, whichever kind of array holds the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.outputs import TokenLogprobs
from paceline.core.sampling_params import MAX_LOGPROBS, SamplingParams
from paceline.errors import InvalidRequestError

__all__ = ["PreparedSampling", "PromptLogprobs", "Reshaping", "SampleRow", "Samples", "uniforms"]


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): SplitMix64 as a counter-based generator.

    The stream of a seed starts at a hash of it, so that neighbouring seeds do not walk the same
    stream with an offset; position i takes its i-th output. The top 53 bits make the number.
    """
    step = np.uint64(0x9E3779B97F4A7C15)

    def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    state = mix(seeds + step) + (positions + np.uint64(1)) * step
    return (mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class PreparedSampling:
    """One request's settings, prepared once when it arrives.

    Raises:
        InvalidRequestError: logit_bias names a token outside the vocabulary.
    """

    __slots__ = (
        "bias_ids",
        "bias_values",
        "ending_ids",
        "forbidden",
        "params",
        "penalizes",
        "reads_logits",
        "reshapes",
    )

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        biased = [token_id for token_id, _ in params.logit_bias]
        for name, ids in (
            ("logit_bias", biased),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}, the vocabulary has {vocab_size}", name
                    )
        self.bias_ids = biased
        self.bias_values = [bias for _, bias in params.logit_bias]
        ending = params.eos_token_ids | params.stop_token_ids
        self.ending_ids = sorted(token_id for token_id in ending if 0 <= token_id < vocab_size)
        self.penalizes = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        # tokens outside allowed_token_ids, [vocab]
        self.forbidden: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self.forbidden = np.ones(vocab_size, dtype=np.bool_)
            self.forbidden[[i for i in params.allowed_token_ids if i < vocab_size]] = False
        # whether logits change before the choice, at any position
        self.reshapes = (
            self.penalizes
            or bool(self.bias_ids)
            or self.forbidden is not None
            or bool(params.bad_words)
        )
        # whether the likeliest token is not enough, even without a grammar
        self.reads_logits = (
            params.temperature > 0.0
            or params.logprobs is not None
            or self.reshapes
            or bool(self.ending_ids and params.min_tokens)
        )


def asks_widely(params: SamplingParams) -> bool:
    """Tell whether a request wants more log-probabilities than the few that a kernel finds."""
    return params.logprobs is not None and (
        params.logprobs > MAX_LOGPROBS or bool(params.logprob_token_ids)
    )


def wide_logprobs(
    logits: NDArray[np.float32], token_id: int, params: SamplingParams
) -> TokenLogprobs:
    """Return log-probabilities for ``asks_widely``: of any number of tokens, or of named ones.

    Args:
        logits: [vocab], of one row.
    """
    row = logits.astype(np.float64)
    top = row.max()
    logprobs = row - (top + np.log(np.exp(row - top).sum()))
    if params.logprob_token_ids:
        ids = np.array(params.logprob_token_ids)
        ids = ids[np.argsort(-logprobs[ids], kind="stable")]
    else:
        ids = np.argsort(-logprobs, kind="stable")[: params.logprobs]
    rank = 1 + int((row > row[token_id]).sum())
    named = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, named)


class Reshaping(NamedTuple):
    """Changes to a row's logits before the choice, applied in the order of the fields."""

    # added once for each time that an id is named
    bias_ids: Sequence[int]
    bias_values: Sequence[float]
    # prompt and output. Positive logits are divided by the penalty and others multiplied, once per
    # token, without making finite ones infinite; 1: no change
    tokens: NDArray[np.int32]
    repetition_penalty: float
    # presence is subtracted once per token, frequency once per occurrence; 0: no change
    output: NDArray[np.int32]
    presence_penalty: float
    frequency_penalty: float
    # tokens set to minus infinity: those where a mask [vocab] is true, and these ids. Applied last,
    # since a penalty could turn infinity into NaN
    masks: Sequence[NDArray[np.bool_]]
    banned_ids: Sequence[int]

    @property
    def names_tokens(self) -> bool:
        """Tell whether more than the masks is to be applied."""
        return (
            bool(self.bias_ids)
            or bool(self.banned_ids)
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SampleRow(NamedTuple):
    """One row to sample."""

    sampling: PreparedSampling
    # prompt and output so far
    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    # tokens that the grammar forbids at this position, [vocab]; None: there is no grammar
    forbidden: NDArray[np.bool_] | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def forbids_ending(self) -> bool:
        sampling = self.sampling
        if not sampling.ending_ids or self.num_output_tokens >= sampling.params.min_tokens:
            return False
        # a grammar that is complete overrides min_tokens
        return self.forbidden is None or bool(
            np.count_nonzero(~self.forbidden)
            > np.count_nonzero(~self.forbidden[sampling.ending_ids])
        )

    @property
    def reshapes(self) -> bool:
        """Tell whether the logits change before the choice, maybe so that none is left."""
        return self.sampling.reshapes or self.forbidden is not None or self.forbids_ending

    @property
    def takes_likeliest(self) -> bool:
        """Tell whether the choice is the first of the largest raw logits."""
        return self.sampling.params.temperature == 0.0 and not self.reshapes

    def reshaping(self) -> Reshaping:
        """Return the changes to the logits at this position."""
        sampling, params = self.sampling, self.sampling.params
        output = self.tokens[self.num_prompt_tokens :]
        masks = (self.forbidden, sampling.forbidden)
        banned = [word[-1] for word in params.bad_words if _ends_with(output, word[:-1])]
        if self.forbids_ending:
            banned += sampling.ending_ids
        return Reshaping(
            sampling.bias_ids,
            sampling.bias_values,
            self.tokens,
            params.repetition_penalty,
            output,
            params.presence_penalty,
            params.frequency_penalty,
            [mask for mask in masks if mask is not None],
            banned,
        )


def _ends_with(output: NDArray[np.int32], tail: tuple[int, ...]) -> bool:
    return not tail or (
        len(output) >= len(tail) and output[len(output) - len(tail) :].tolist() == list(tail)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Chosen tokens, one entry per row."""

    # undefined where not finite; -1: no token is left to choose
    token_ids: list[int]
    # False: the row's logits hold NaN or infinity, and no token was chosen
    finite: list[bool]
    # None for rows that asked for none
    logprobs: list[TokenLogprobs | None]


class PromptLogprobs:
    """Log-probabilities of one request's prompt, from position 0 on, collected as its chunks are
    computed.

    The logits at position p predict token p + 1. A prompt whose beginning came from a prefix cache
    was not computed here, so such a request must not share blocks (``engine.fanout`` sees to it).

    Args:
        count: likeliest tokens to report for each position.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self.count = count
        self._prompt = prompt
        self._entries: list[TokenLogprobs] = []

    def wanted(self, start: int, num_tokens: int) -> range:
        """Return the positions among ``start ...`` whose logits are still needed."""
        if start > len(self._entries):
            # the beginning was not computed here, so there is no result
            return range(0)
        return range(len(self._entries), min(start + num_tokens, len(self._prompt) - 1))

    def targets(self, wanted: range) -> Sequence[int]:
        """Return the tokens that the logits of these positions predict."""
        return self._prompt[wanted.start + 1 : wanted.stop + 1]

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add the entries of the positions that ``wanted`` named."""
        self._entries += entries

    def result(self) -> tuple[TokenLogprobs, ...] | None:
        """Return one entry per prompt token but the first; None if the beginning is missing."""
        complete = len(self._entries) == len(self._prompt) - 1
        return tuple(self._entries) if complete else None
