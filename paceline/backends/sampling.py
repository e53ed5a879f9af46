"""What is to be sampled and what was: the settings of rows, and the numbers that decide draws.

Whatever holds the logits, a row's choice follows from these alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidRequestError
from paceline.core.outputs import TokenLogprobs
from paceline.core.request import SamplingParams

__all__ = ["PreparedSampling", "SampleRow", "Samples", "uniforms"]


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
    """One request's settings, made once when it arrives.

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
        "reshapes",
        "restricts",
        "takes_likeliest",
    )

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        for token_id, _ in params.logit_bias:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token_id}, the vocabulary has {vocab_size}",
                    "logit_bias",
                )
        self.bias_ids = [token_id for token_id, _ in params.logit_bias]
        self.bias_values = [bias for _, bias in params.logit_bias]
        ending = params.eos_token_ids | params.stop_token_ids
        self.ending_ids = sorted(token_id for token_id in ending if 0 <= token_id < vocab_size)
        self.penalizes = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        # what allowed_token_ids leaves out, [vocab]
        self.forbidden: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            self.forbidden = np.ones(vocab_size, dtype=np.bool_)
            self.forbidden[[i for i in params.allowed_token_ids if i < vocab_size]] = False
        # some tokens may be out of the question, whatever the position
        self.restricts = self.forbidden is not None or bool(params.bad_words)
        # logits are changed before the choice, whatever the position
        self.reshapes = self.penalizes or bool(self.bias_ids) or self.restricts
        # without a grammar, the likeliest token is all there is to know of a row
        self.takes_likeliest = (
            params.temperature <= 0.0
            and params.logprobs is None
            and not self.reshapes
            and not (self.ending_ids and params.min_tokens)
        )


class SampleRow(NamedTuple):
    """One row to sample."""

    sampling: PreparedSampling
    # prompt and output so far
    tokens: NDArray[np.int32]
    num_prompt_tokens: int
    # what the grammar forbids at this position, [vocab]; None: there is no grammar
    forbidden: NDArray[np.bool_] | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def forbids_ending(self) -> bool:
        sampling = self.sampling
        if not sampling.ending_ids or self.num_output_tokens >= sampling.params.min_tokens:
            return False
        # a grammar that is at its end knows better than min_tokens
        return self.forbidden is None or bool(
            np.count_nonzero(~self.forbidden)
            > np.count_nonzero(~self.forbidden[sampling.ending_ids])
        )

    @property
    def restricts(self) -> bool:
        """Some tokens are out of the question, maybe all."""
        return self.forbidden is not None or self.sampling.restricts


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What was chosen, row for row."""

    # meaningless where not finite; -1: no token is left to choose
    token_ids: list[int]
    # False: the row's logits hold NaN or infinity, nothing was chosen
    finite: list[bool]
    # None for rows that asked for none
    logprobs: list[TokenLogprobs | None]
