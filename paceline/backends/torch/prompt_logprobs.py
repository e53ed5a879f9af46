"""Log-probabilities of a prompt's own tokens, gathered as the chunks of the prompt are computed.

The logits at position p are about token p + 1. A prompt whose beginning came out of a prefix cache
was not computed here, so such a request must not share blocks (``engine.fanout`` sees to it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from paceline.core.outputs import TokenLogprobs

__all__ = ["PromptLogprobs"]

# rows turned into probabilities at once
_ROWS: Final = 64


class PromptLogprobs:
    """One request's, from position 0 on."""

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt = prompt
        self._count = count
        self._entries: list[TokenLogprobs] = []

    def wanted(self, start: int, num_tokens: int) -> range:
        """The positions among ``start ...`` whose logits are still needed."""
        if start > len(self._entries):
            # not computed from the beginning: nothing can be said
            return range(0)
        return range(len(self._entries), min(start + num_tokens, len(self._prompt) - 1))

    def add(self, logits: torch.Tensor) -> None:
        """Take in the logits [positions, vocab] of what ``wanted`` named."""
        first = len(self._entries) + 1
        for begin in range(0, len(logits), _ROWS):
            logprobs = logits[begin : begin + _ROWS].float().log_softmax(-1)
            ids = self._prompt[first + begin : first + begin + len(logprobs)]
            own = logprobs.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1))
            ranks = (logprobs > own).sum(-1).add_(1).tolist()
            top, top_ids = logprobs.topk(min(max(1, self._count), logits.shape[1]), dim=-1)
            for token_id, value, rank, names, values in zip(
                ids, own.squeeze(1).tolist(), ranks, top_ids.tolist(), top.tolist(), strict=True
            ):
                likeliest = tuple(zip(names, values, strict=True))[: self._count]
                self._entries.append(TokenLogprobs(token_id, value, rank, likeliest))

    def result(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry per prompt token but the first; None if the beginning was not seen."""
        complete = len(self._entries) == len(self._prompt) - 1
        return tuple(self._entries) if complete else None
