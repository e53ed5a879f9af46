"""Pooling: parameters of requests for a vector instead of tokens, and abilities of such a model.

The scheduler does not know about it: such a request has ``max_tokens=1`` and ends when its prompt
is computed, because the row that would sample yields no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.errors import InvalidRequestError

__all__ = ["CLASSIFY", "CONVERTS", "EMBED", "RUNNERS", "PoolingInfo", "PoolingParams"]

EMBED: Final = "embed"
CLASSIFY: Final = "classify"
# choices for a model whose files do not say how it is to be used, in vLLM's words
RUNNERS: Final = ("auto", "generate", "pooling")
CONVERTS: Final = ("auto", EMBED, CLASSIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one prompt becomes a vector. The names are vLLM's.

    Raises:
        InvalidRequestError: a value outside its range, with the field in ``param``.
    """

    # numbers to keep of an embedding, from its start; None: all
    dimensions: int | None = None
    # apply the model's last function: normalize an embedding to length 1, turn logits into
    # probabilities; None: as the model's files say
    use_activation: bool | None = None
    # position of a pair's second text, for encoders that mark segments; None: there is one text
    second_text: int | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "second_text"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Vectors that a loaded pooling model makes; fixed for its life."""

    # EMBED or CLASSIFY
    task: str
    # tokens whose hidden states make up the vector: "last", "mean" or "cls" (the first)
    pooling: str
    # length of the vector: an embedding, or a logit for each label
    size: int
    # attention is bidirectional, so a prompt is computed in one step
    whole_prompts: bool = False
    # the default of ``PoolingParams.use_activation``
    use_activation: bool = True
    # embeddings may be cut to their first numbers, as the model was trained for it (Matryoshka);
    # ``dimensions`` are the allowed lengths, () with ``is_matryoshka``: any length
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    # names of a classifier's logits, in order
    labels: tuple[str, ...] = ()
    # texts to put before an input, by name, and the name of the one used by default
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    # inputs are lower-cased first (sentence-transformers' do_lower_case)
    lower_case: bool = False
    # how a query and a document become one prompt: "tokenizer" by its chat template, "qwen3" by
    # Qwen3-Reranker's; None: as the tokenizer joins pairs
    score_template: str | None = None

    @property
    def sees_all(self) -> bool:
        """Whether a vector needs hidden states before the last, so that no prefix may be cached."""
        return self.whole_prompts or self.pooling != "last"
