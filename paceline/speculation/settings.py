"""Settings in ``speculative_config``, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.request import MOST_DRAFT_TOKENS
from paceline.errors import ConfigError

__all__ = ["SpeculationSettings"]

_MOST_LOOKUP: Final = 32
_NAME: Final = "speculative_config"
# number of draft tokens that a step holds before rows cost their full price
_AUTO_TOKENS: Final = 8
# default number of tokens to look up, as in vLLM
_LOOKUP: Final = 5
_LOOKUPS: Final = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
# by method, keys other than ``method``
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (*_LOOKUPS, "model", "quantization", "finished_answers_bytes"),
    "ngram": _LOOKUPS,
    "draft_model": ("num_speculative_tokens", "model", "quantization"),
    "self": ("num_speculative_tokens", "quantization"),
    "off": (),
    "eagle3": ("num_speculative_tokens", "model"),
    "mtp": ("num_speculative_tokens",),
}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The sources of drafts, and their size."""

    # most draft tokens of one row
    num_tokens: int
    # lengths of the latest tokens to look for in the text, and draft what followed; None: no lookup
    lookup_min: int | None
    lookup_max: int | None
    # draft the tokens that a grammar forces
    grammars: bool
    # draft from a request's expected output
    predictions: bool
    # whether the backend has a draft model
    models: bool = False

    @property
    def drafts_alone(self) -> bool:
        """Whether requests get drafts that bring no source of their own."""
        return self.lookup_min is not None or self.grammars or self.models

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> SpeculationSettings:
        """Read the settings; None: only requests with an expected output get drafts.

        Raises ConfigError for an unknown key or value, or a missing one."""
        if config is None:
            return cls(_AUTO_TOKENS, None, None, False, True)
        method = _method(config)
        if method == "off":
            return cls(0, None, None, False, False)
        models = method in ("self", "mtp") or "model" in config
        if not models and (method in ("draft_model", "eagle3") or "quantization" in config):
            raise ConfigError(f"{_NAME}: method {method!r} lacks the model that drafts")
        auto = method == "auto"
        usual = None if method == "ngram" else _AUTO_TOKENS
        num_tokens = _number(config, "num_speculative_tokens", usual, MOST_DRAFT_TOKENS)
        if method in ("self", "draft_model", "eagle3", "mtp"):
            return cls(num_tokens, None, None, False, True, models=True)
        # as in vLLM, one stands for both; auto takes a match of any length, as it learns how often
        # each is right
        least = 1 if auto else config.get("prompt_lookup_max", _LOOKUP)
        lookup_min = _number(config, "prompt_lookup_min", least, _MOST_LOOKUP)
        longest = max(lookup_min, _LOOKUP) if auto else lookup_min
        lookup_max = _number(config, "prompt_lookup_max", longest, _MOST_LOOKUP)
        if lookup_min > lookup_max:
            raise ConfigError(f"{_NAME}: prompt_lookup_min={lookup_min} is above max={lookup_max}")
        return cls(num_tokens, lookup_min, lookup_max, auto, True, models)


def _method(config: Mapping[str, Any]) -> str:
    method = config.get("method", "draft_model" if "model" in config else None)
    if not isinstance(method, str) or method not in _KEYS:
        raise ConfigError(f"{_NAME}: method must be one of {', '.join(_KEYS)}, got {method!r}")
    for key in config.keys() - {"method", *_KEYS[method]}:
        known = ", ".join(_KEYS[method]) or "no other keys"
        raise ConfigError(f"{_NAME}: method {method!r} takes {known}, not {key!r}")
    return method


def _number(config: Mapping[str, Any], key: str, default: Any, most: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{_NAME}: {key} must be a whole number from 1 to {most}, got {value!r}")
    return value
