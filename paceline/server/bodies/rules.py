"""What a server holds requests against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.core.slo import Slo
from paceline.server.bodies.targets import CLASSES
from paceline.server.reasoning import Thinking
from paceline.server.tool_formats import ToolFormat, detect_format

__all__ = ["RequestRules"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """What a server holds requests against; fixed while it runs."""

    served_model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_choices: int
    max_prompts: int
    # choices of all prompts of a request together; None: any number
    max_sequences: int | None = None
    eos_token_ids: frozenset[int]
    # see ServerConfig
    default_sampling: Mapping[str, float]
    trust_request_chat_template: bool
    # refuse fields that nothing reads
    strict_fields: bool = False
    # tokens of a block of the prefix cache; 0: there is none
    cache_block: int = 0
    # vLLM's times go with every answer
    tells_metrics: bool = False
    # targets by name
    slo_classes: Mapping[str, Slo] = field(default_factory=lambda: CLASSES)
    # how the model writes tool calls
    tool_format: ToolFormat = field(default_factory=lambda: detect_format(None))
    # the chat template wants ids of calls to have nine letters and digits
    short_call_ids: bool = False
    # tokens whose log-probabilities are told at each place
    max_logprobs: int = MAX_LOGPROBS
    # how it thinks; None: it does not
    thinking: Thinking | None = None

    def serves(self, model: str) -> bool:
        """Whether a request may name ``model``; a served name may hold ``*`` for any characters."""
        names = self.served_model_names
        return model in names or any(
            fnmatchcase(model, name.replace("[", "[[]").replace("?", "[?]"))
            for name in names
            if "*" in name
        )

    @property
    def listed_models(self) -> tuple[str, ...]:
        """The names without a ``*``."""
        return tuple(name for name in self.served_model_names if "*" not in name)
