"""Log-probabilities of a prompt's own tokens, gathered as the chunks of the prompt are computed.

The logits at position p are about token p + 1. A prompt whose beginning came out of a prefix cache
was not computed here, so such a request must not share blocks (``engine.fanout`` sees to it).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.outputs import TokenLogprobs

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """One request's, from position 0 on.

    Args:
        count: likeliest tokens to name with each.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self.count = count
        self._prompt = prompt
        self._entries: list[TokenLogprobs] = []

    def wanted(self, start: int, num_tokens: int) -> range:
        """The positions among ``start ...`` whose logits are still needed."""
        if start > len(self._entries):
            # not computed from the beginning: nothing can be said
            return range(0)
        return range(len(self._entries), min(start + num_tokens, len(self._prompt) - 1))

    def targets(self, wanted: range) -> Sequence[int]:
        """The tokens that the logits of these positions are about."""
        return self._prompt[wanted.start + 1 : wanted.stop + 1]

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take in what was found for the positions that ``wanted`` named."""
        self._entries += entries

    def result(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry per prompt token but the first; None if the beginning was not seen."""
        complete = len(self._entries) == len(self._prompt) - 1
        return tuple(self._entries) if complete else None
