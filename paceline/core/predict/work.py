"""How much of the engine's time a request will take: prompt and predicted output, in seconds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from paceline.core.predict.output_length import LengthHistory
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request

__all__ = ["WorkEstimator"]

# before anything is measured: only the ratio matters, an output token costs a step of its own
_PROMPT_SECONDS = 1e-4
_OUTPUT_SECONDS = 2e-3
# of max_tokens
_NO_LIMIT = 2**62


class WorkEstimator:
    """Combines the step-time model with the history of output lengths."""

    def __init__(self, step_time: StepTimeModel, lengths: LengthHistory) -> None:
        self._step_time = step_time
        self._lengths = lengths

    def output_tokens(self, request: Request, q: float = 0.5) -> int:
        """The q-quantile of the final number of output tokens."""
        num_output = request.num_tokens - request.num_prompt_tokens
        return self._lengths.predict(
            request.label, num_output, request.asked.sampling.max_tokens, q
        )

    def expected_tokens(self, request: Request, q: float) -> int:
        """The same, less careful where nothing is known (``LengthHistory.expect``)."""
        num_output = request.num_tokens - request.num_prompt_tokens
        return self._lengths.expect(request.label, num_output, request.asked.sampling.max_tokens, q)

    def surely_left(self, request: Request, q: float) -> int:
        """Output tokens still to come by a q-quantile; one where nothing is known."""
        num_output = request.num_tokens - request.num_prompt_tokens
        known = self._lengths.known(request.label, num_output, request.asked.sampling.max_tokens, q)
        return 1 if known is None else known - num_output

    def surely_left_each(self, requests: Iterable[Request], q: float) -> list[int]:
        """``surely_left`` of each. Of those that have no output yet, which are most of those that
        wait, the history is asked once for a label: the answer but for ``max_tokens`` is theirs."""
        known: dict[Hashable, int | None] = {}
        left: list[int] = []
        for request in requests:
            if request.num_tokens != request.num_prompt_tokens:
                left.append(self.surely_left(request, q))
                continue
            label = request.label
            if label not in known:
                known[label] = self._lengths.known(label, 0, _NO_LIMIT, q)
            length, most = known[label], request.max_total_tokens - request.num_tokens
            left.append(1 if length is None else min(length, most))
        return left

    def prompt_seconds(self, num_tokens: int) -> float:
        """Seconds to compute that many prompt tokens in one step of their own."""
        if not self._step_time.ready:
            return _PROMPT_SECONDS * num_tokens
        return self._step_time.predict(StepShape().plus(0, max(2, num_tokens)))

    def seconds(self, request: Request) -> float:
        """The share of the engine's time that a new request needs."""
        output = self.output_tokens(request) - (request.num_tokens - request.num_prompt_tokens)
        prompt, new = request.num_prompt_tokens, request.num_new_tokens
        if not self._step_time.ready:
            return _PROMPT_SECONDS * new + _OUTPUT_SECONDS * output
        idle = self._step_time.predict(StepShape())
        row = self._step_time.predict(StepShape().plus(prompt + output // 2, 1)) - idle
        return self.prompt_seconds(new) + output * row
