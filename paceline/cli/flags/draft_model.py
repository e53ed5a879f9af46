"""The model named by ``speculative_config`` that guesses tokens for the served one.

This module does not know how models are computed, or how guesses are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.speculation.settings import SpeculationSettings

__all__ = ["check_vocabulary", "draft_of", "drafts_by_mtp"]

# method, and value of "model", for the served model in another weight format
_SELF: Final = "self"
_FEWER_BITS: Final = "q4"
# method of a head that reads another model's hidden states, which has no tokenizer
_HEAD: Final = "eagle3"
# method of layers in the served model's own checkpoint
_OWN_LAYERS: Final = "mtp"


def drafts_by_mtp(config: Mapping[str, Any] | None) -> bool:
    """Whether layers of the served model's checkpoint guess, so that no model is named."""
    return config is not None and config.get("method") == _OWN_LAYERS


def draft_of(config: Mapping[str, Any] | None, model_path: str | None) -> tuple[str, str] | None:
    """Return path and format of the draft model's weights, fetched if needed; None: none is named.

    Raises ConfigError for values that are not names, CheckpointError for an unknown model.
    """
    if config is None or not SpeculationSettings.of(config).models or drafts_by_mtp(config):
        return None
    name = config.get("model", _SELF)
    quantization = config.get("quantization", _FEWER_BITS if name == _SELF else "auto")
    for key, value in (("model", name), ("quantization", quantization)):
        if not isinstance(value, str) or not value:
            raise ConfigError(f"speculative_config: {key} must be a name, got {value!r}")
    if name == _SELF and config.get("method") != _HEAD:
        return (model_path, quantization) if model_path is not None else None
    from paceline.checkpoints.hub.resolve import resolve_model

    path = str(resolve_model(name).path)
    if _is_head(config, Path(path)):
        return path, quantization
    if path != model_path and model_path is not None:
        check_vocabulary(Path(model_path), Path(path))
    return path, quantization


def _is_head(config: Mapping[str, Any], path: Path) -> bool:
    """Whether it is a head. Raises ConfigError where a head is named as a model or vice versa."""
    from paceline.checkpoints.heads.eagle3 import is_eagle3

    method, is_head = config.get("method"), is_eagle3(path)
    if is_head and method not in (_HEAD, "auto"):
        raise ConfigError(
            f"speculative_config: {path} is an EAGLE-3 head, which reads the served model's hidden "
            f'states: give "method": "{_HEAD}", or "auto" to use it with other drafts'
        )
    if is_head and "quantization" in config:
        raise ConfigError(
            f"speculative_config: {path} is an EAGLE-3 head, which is computed in the formats of "
            "the served model: leave quantization out"
        )
    if method == _HEAD and not is_head:
        raise ConfigError(
            f"speculative_config: {path} is not an EAGLE-3 head: its config.json does not name "
            'one and has no draft_vocab_size. A whole model drafts with "method": "draft_model"'
        )
    return is_head


def check_vocabulary(served: Path, draft: Path) -> None:
    """Raise ConfigError, with the numbers, unless all tokens of two models have the same ids."""
    from paceline.engine.text.tokenizer import load_tokenizer

    ours, theirs = (load_tokenizer(path).vocabulary for path in (served, draft))
    other = sorted(token for token in ours.keys() | theirs if ours.get(token) != theirs.get(token))
    if other:
        first = other[0]
        raise ConfigError(
            f"speculative_config: the draft model {draft} names {len(theirs)} tokens, the served "
            f"one {len(ours)}; {len(other)} of them differ, such as {first!r} (id "
            f"{theirs.get(first)} and {ours.get(first)}): both must have the same vocabulary"
        )
