"""Pooling: what a request gets that wants a vector instead of tokens, and what a model gives.

The scheduler does not know it: such a request has ``max_tokens=1``, and ends when its prompt is
computed, because the row that would sample brings no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InvalidRequestError

__all__ = ["CLASSIFY", "CONVERTS", "EMBED", "RUNNERS", "PoolingInfo", "PoolingParams"]

EMBED: Final = "embed"
CLASSIFY: Final = "classify"
# what may be asked of a model whose files leave it open, in vLLM's words
RUNNERS: Final = ("auto", "generate", "pooling")
CONVERTS: Final = ("auto", EMBED, CLASSIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one prompt becomes a vector. The names are vLLM's.

    Raises:
        InvalidRequestError: a value outside its range, with the field in ``param``.
    """

    # an embedding is cut to its first numbers, so many; None: it is whole
    dimensions: int | None = None
    # the model's last function is applied: an embedding is brought to length 1, and logits become
    # probabilities; None: as the model's files say
    use_activation: bool | None = None
    # position of the first token of a pair's second text, for encoders that tell them apart;
    # None: there is one text
    second_text: int | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "second_text"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """What a loaded model gives instead of tokens; fixed for its life."""

    # EMBED or CLASSIFY
    task: str
    # which tokens' hidden states the vector is made of: "last", "mean" or "cls" (the first)
    pooling: str
    # length of the vector: an embedding, or a logit for each label
    size: int
    # attention sees the whole prompt, which is computed in one step
    whole_prompts: bool = False
    # an embedding is brought to length 1, logits become probabilities, unless the request says
    # otherwise
    use_activation: bool = True
    # embeddings may be cut to their first numbers: the model was trained for that (Matryoshka).
    # () with ``is_matryoshka``: to any number of them
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    # what the logits of a classifier stand for, in order
    labels: tuple[str, ...] = ()
    # texts that go before an input, by name, and the one that goes before it unasked
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    # inputs are written in lower case first (sentence-transformers' do_lower_case)
    lower_case: bool = False
    # how a query and a document become one prompt: "tokenizer" by its chat template, "qwen3" by
    # Qwen3-Reranker's; None: as the tokenizer pairs texts
    score_template: str | None = None

    @property
    def sees_all(self) -> bool:
        """Whether a vector takes more hidden states than the last one: then none may come out of a
        prefix cache."""
        return self.whole_prompts or self.pooling != "last"
