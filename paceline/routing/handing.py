"""Prompts and answers apart: whether a prompt is computed at one engine and its answer made at
another one.

Prompts that an engine computes between the tokens of its streams delay these, or wait for what the
streams leave over. An engine that does nothing else computes them sooner, at the price of one
transfer of the prompt's keys and values. Whether that pays is decided for each request, from what
the engines are predicted to need. Pure: the gateway and the simulator ask the same object.
"""

from __future__ import annotations

from typing import Final, Literal

from paceline.routing.engine_load import Demand, EngineView

__all__ = ["HandOvers", "Role"]

# an engine computes prompts, makes answers, or does both
Role = Literal["both", "prompts", "outputs"]

# factor on predicted TTFTs, as in ``choice``: first tokens scatter
_MARGIN: Final = 2.0
# weight of one hand-over in what they are known to take
_STEP: Final = 0.1


class HandOvers:
    """What hand-overs took so far, and the decision on the next one."""

    def __init__(self) -> None:
        # seconds between the two engines' tokens, for each token of the prompt
        self._per_token = 0.0
        self._num = 0

    def saw(self, prompt_tokens: float, seconds: float) -> None:
        """Learn from a hand-over; ``seconds``: from the last token here to the first one there."""
        self._num += 1
        share = max(_STEP, 1.0 / self._num)
        self._per_token += share * (seconds / max(1.0, prompt_tokens) - self._per_token)

    def gap(self, prompt_tokens: float) -> float:
        """Predict the seconds between the two engines' tokens; 0.0 until one was seen."""
        return self._per_token * prompt_tokens

    def pays(self, demand: Demand, prompts: EngineView, outputs: EngineView, least: float) -> bool:
        """Whether to compute a prompt at ``prompts`` and hand it over.

        Args:
            prompts: the best engine for prompts, as this request sees it.
            outputs: the best engine for its answer, which could compute the prompt, too.
            least: new prompt tokens below which it is never handed over.
        """
        new = demand.prompt_tokens - outputs.cached_tokens
        if new < least or demand.max_tokens <= 1.0 or prompts.pressed:
            return False
        if demand.tpot is not None:
            # the gap counts among the times of the tokens after the first
            own = self.gap(demand.prompt_tokens) / max(1.0, demand.output_tokens - 1.0)
            if outputs.tpot <= demand.tpot < outputs.tpot + own:
                return False
        if demand.ttft is not None:
            late = [_MARGIN * view.ttft > demand.ttft for view in (prompts, outputs)]
            if late[0] != late[1]:
                return late[1]
        # computing it between the tokens of running streams delays each of them
        own = outputs.ttft * min(1.0, new / max(1.0, outputs.prefill_tokens))
        return prompts.ttft < outputs.ttft + own * outputs.num_requests
