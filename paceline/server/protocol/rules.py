"""The server's limits and settings that requests are checked against."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.core.slo import Slo
from paceline.server.model_formats.reasoning import Thinking
from paceline.server.model_formats.tool_formats import ToolFormat, detect_format
from paceline.server.protocol.targets import CLASSES

__all__ = ["NamedAdapter", "RequestRules"]


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A name of an adapter, and the load that it stands for."""

    name: str
    # the engine's key of this load
    key: str
    # where it was loaded from, as callers may see it
    root: str
    # most ranks of a module
    rank: int = 0
    # SHA-256 of its contents
    digest: str = ""
    # factor on what it adds
    scale: float = 1.0
    # factor with which llama-server's endpoints use it for requests that name the model; 0: they
    # do not
    applied: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """Limits and settings that requests are checked against; fixed while the server runs."""

    served_model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_choices: int
    max_prompts: int
    # maximum choices of a request over all its prompts; None: any number
    max_sequences: int | None = None
    eos_token_ids: frozenset[int]
    # see ServerConfig
    default_sampling: Mapping[str, float]
    trust_request_chat_template: bool
    # arguments of the chat template where a request has none of that name
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # draws the seed of a request without one
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)
    # refuse fields that are not read
    strict_fields: bool = False
    # tokens of a block of the prefix cache; 0: no cache
    cache_block: int = 0
    # add vLLM's times to every answer
    tells_metrics: bool = False
    # targets by name
    slo_classes: Mapping[str, Slo] = field(default_factory=lambda: CLASSES)
    # how the model writes tool calls
    tool_format: ToolFormat = field(default_factory=lambda: detect_format(None))
    # the chat template needs call ids of nine letters and digits
    short_call_ids: bool = False
    # maximum log-probabilities at each position
    max_logprobs: int = MAX_LOGPROBS
    # how the model reasons; None: it does not
    thinking: Thinking | None = None
    # adapters by the names that requests may use
    adapters: Mapping[str, NamedAdapter] = field(default_factory=dict)

    def serves(self, model: str) -> bool:
        """Return whether a request may name ``model``; ``*`` in a served name is any characters."""
        names = self.served_model_names
        return (
            model in names
            or model in self.adapters
            or any(
                fnmatchcase(model, name.replace("[", "[[]").replace("?", "[?]"))
                for name in names
                if "*" in name
            )
        )

    @property
    def listed_models(self) -> tuple[str, ...]:
        """The names without a ``*``, and then those of adapters."""
        own = tuple(name for name in self.served_model_names if "*" not in name)
        return (*own, *self.adapters)
