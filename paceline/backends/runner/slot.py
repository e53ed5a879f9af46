"""State that a model runner keeps of one request, next to its row in the arrays."""

from __future__ import annotations

from typing import Final

from paceline.backends.runner.constraint import OutputConstraint
from paceline.backends.runner.sampling import PreparedSampling, PromptLogprobs
from paceline.core.outputs import NewRequest
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidRequestError

__all__ = ["Slot"]

# settings in place of a refused request's; its rows run, their tokens are dropped
_REFUSED: Final = SamplingParams(max_tokens=1, temperature=0.0)


class Slot:
    """State of one request; its tokens and block table are row ``index`` of the arrays."""

    __slots__ = (
        "adapter",
        "adapter_scale",
        "constraint",
        "draft_sampling",
        "drafting_failed",
        "error",
        "index",
        "is_new",
        "num_blocks",
        "num_prompt_tokens",
        "prompt_logprobs",
        "sampling",
    )

    def __init__(self, index: int, new: NewRequest, vocab_size: int) -> None:
        self.index = index
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_blocks = len(new.block_ids)
        self.adapter, self.adapter_scale = new.adapter, new.adapter_scale
        # whether none of its rows has run yet
        self.is_new = True
        # reason for which its rows yield no tokens; None: they do
        self.error: str | None = None
        self.constraint: OutputConstraint | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        # settings for drafts, made with the first one; then whether drafting failed
        self.draft_sampling: PreparedSampling | None = None
        self.drafting_failed = False
        wanted = new.sampling.prompt_logprobs
        if wanted is not None:
            prompt = new.token_ids[: new.num_prompt_tokens]
            self.prompt_logprobs = PromptLogprobs(prompt, wanted)
        try:
            self.sampling = PreparedSampling(new.sampling, vocab_size)
        except InvalidRequestError as error:
            self.sampling = PreparedSampling(_REFUSED, vocab_size)
            self.error = str(error)
