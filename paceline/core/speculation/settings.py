"""What ``speculative_config`` says, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import ConfigError

__all__ = ["MOST_TOKENS", "SpeculationSettings"]

# guesses of one row at most
MOST_TOKENS: Final = 32
_MOST_LOOKUP: Final = 32
_NAME: Final = "speculative_config"
# of the method "auto": as many guesses as a step may hold before rows cost what they would alone,
# and whatever match there is, as how often each is right is learned
_AUTO: Final = {"num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 5}


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Who may guess, and how much."""

    # guesses of one row at most
    num_tokens: int
    # what followed the last time that so many of the latest tokens occurred; None: nobody looks
    lookup_min: int | None
    lookup_max: int | None
    # tokens that a grammar leaves no choice about
    grammars: bool
    # what a request says that it expects
    predictions: bool

    @property
    def guesses_alone(self) -> bool:
        """Whether requests are guessed that bring nothing to guess from."""
        return self.lookup_min is not None or self.grammars

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> SpeculationSettings:
        """None: a request that says what it expects is guessed, and no other.

        Raises ConfigError for a key or value that is not known, or one that is missing."""
        if config is None:
            return cls(_AUTO["num_speculative_tokens"], None, None, False, True)
        known = {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"}
        for key in config:
            if key not in known:
                raise ConfigError(f"{_NAME}: {key!r} is not one of {', '.join(sorted(known))}")
        method = config.get("method")
        if method == "off":
            if len(config) > 1:
                raise ConfigError(f'{_NAME}: method "off" takes no other keys')
            return cls(0, None, None, False, False)
        if method == "auto":
            config = _AUTO | dict(config)
        elif method != "ngram":
            raise ConfigError(f'{_NAME}: method must be "auto", "ngram" or "off", got {method!r}')
        num_tokens = _number(config, "num_speculative_tokens", None, MOST_TOKENS)
        # as in vLLM, one stands for both, and 5 for none
        least = config.get("prompt_lookup_min", config.get("prompt_lookup_max", 5))
        lookup_min = _number(config, "prompt_lookup_min", least, _MOST_LOOKUP)
        lookup_max = _number(config, "prompt_lookup_max", lookup_min, _MOST_LOOKUP)
        if lookup_min > lookup_max:
            raise ConfigError(
                f"{_NAME}: prompt_lookup_min={lookup_min} must not be above "
                f"prompt_lookup_max={lookup_max}"
            )
        return cls(num_tokens, lookup_min, lookup_max, method == "auto", True)


def _number(config: Mapping[str, Any], key: str, default: Any, most: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{_NAME}: {key} must be a whole number from 1 to {most}, got {value!r}")
    return value
