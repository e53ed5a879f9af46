"""Log-probabilities of a prompt's own tokens, collected as the chunks of the prompt are computed.

The logits at position p predict token p + 1. A prompt whose beginning came from a prefix cache was
not computed here, so such a request must not share blocks (``engine.fanout`` sees to it).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.outputs import TokenLogprobs

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """Log-probabilities of one request's prompt, from position 0 on.

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
