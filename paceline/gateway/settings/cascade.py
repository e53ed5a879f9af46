"""``[models.cascade]``: a small model answers where that is good enough::

[[models]]
name = "chat"                    # the large one: its own tiers
tiers = [["cloud:big"]]

[models.cascade]
small = "small"                  # another model of the file
calibration = "chat.json"        # of ``paceline calibrate``
"""

from __future__ import annotations

import re
from typing import Final, Literal

import msgspec

from paceline.errors import ConfigError

__all__ = ["CascadeConfig", "Mode", "UnderLoad", "check_cascade"]

Mode = Literal["route", "cascade", "prefix"]

_MOST_PREFIX: Final = 256
_MOST_SAMPLES: Final = 8
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class UnderLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Second bound, for while the large engines are busy."""

    max_loss: float
    # predicted seconds to the large model's first token at which this bound holds
    full_wait: float = 2.0


class CascadeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cascade of one model."""

    # model of the file that answers first
    small: str
    # whether the prompt decides, the whole answer, or its first tokens
    mode: Mode = "cascade"
    # quality lost at most, as a share of the answers, on requests like those of the calibration
    max_loss: float = 0.05
    # file of ``paceline calibrate``; "": exact faults alone decide, and nothing bounds the loss
    calibration: str = ""
    # tokens that are held back in mode ``prefix``
    prefix_tokens: int = 24
    under_load: UnderLoad | None = None
    # share of the chats that both models are asked, after the caller has its answer, to compare
    shadow: float = 0.0
    # file of these answers, for ``paceline calibrate --shadow``; "": none is kept
    shadow_file: str = ""
    # the threshold grows while answers of ``shadow`` lose more than the bound
    adaptive: bool = False
    # distance of a prompt's score from its threshold up to which the large model begins while a
    # prefix is held, out of ``hedge_share``; 0: it never does
    early_prefill: float = 0.0
    # further answers of the small model, drawn at a temperature, whose agreement counts
    samples: int = 0
    # the small model's log-probabilities of the prompt count
    perplexity: bool = False
    # model of the file whose embedding of the prompt counts; "": none
    embeddings: str = ""
    # header that names a conversation; "": its system prompt and first question do
    conversation_header: str = ""


def check_cascade(model: str, cascade: CascadeConfig) -> None:
    """Check the values of a cascade. Raises ConfigError."""
    where, under = f"model {model}: cascade", cascade.under_load
    if not 0.0 < cascade.max_loss < 1.0:
        raise ConfigError(f"{where}.max_loss must lie between 0 and 1, got {cascade.max_loss:g}")
    if under is not None and not cascade.max_loss <= under.max_loss < 1.0:
        raise ConfigError(
            f"{where}.under_load.max_loss must be at least max_loss {cascade.max_loss:g} and below "
            f"1, got {under.max_loss:g}"
        )
    if under is not None and not 0.0 < under.full_wait < 3600.0:
        raise ConfigError(
            f"{where}.under_load.full_wait must be above 0 and below 3600 s, got "
            f"{under.full_wait:g}"
        )
    if not 1 <= cascade.prefix_tokens <= _MOST_PREFIX:
        raise ConfigError(
            f"{where}.prefix_tokens must be 1 to {_MOST_PREFIX}, got {cascade.prefix_tokens}"
        )
    for name, share in (("shadow", cascade.shadow), ("early_prefill", cascade.early_prefill)):
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"{where}.{name} must be 0 to 1, got {share:g}")
    if cascade.early_prefill and cascade.mode != "prefix":
        raise ConfigError(f"{where}: early_prefill needs mode prefix, got {cascade.mode}")
    if (cascade.shadow_file or cascade.adaptive) and not cascade.shadow:
        name = "shadow_file" if cascade.shadow_file else "adaptive"
        raise ConfigError(f"{where}: {name} needs shadow, the share of chats that both are asked")
    if cascade.shadow and not (cascade.shadow_file or cascade.calibration):
        raise ConfigError(f"{where}: shadow needs a shadow_file, a calibration or both")
    if not 0 <= cascade.samples <= _MOST_SAMPLES:
        raise ConfigError(f"{where}.samples must be 0 to {_MOST_SAMPLES}, got {cascade.samples}")
    of_answers = "samples" if cascade.samples else "perplexity" if cascade.perplexity else ""
    if of_answers and cascade.mode != "cascade":
        raise ConfigError(f"{where}: {of_answers} needs mode cascade, got {cascade.mode}")
    if cascade.samples and cascade.shadow:
        raise ConfigError(f"{where}: samples go with no shadow, whose answers are compared alone")
    header = cascade.conversation_header
    if header and not _HEADER.fullmatch(header):
        raise ConfigError(f"{where}.conversation_header: {header[:80]!r} is no name of a header")
    needs = under is not None or cascade.adaptive
    if not cascade.calibration and (cascade.mode != "cascade" or needs):
        what = "under_load" if under is not None else f"mode {cascade.mode}"
        what = "adaptive" if cascade.adaptive else what
        raise ConfigError(f"{where}: {what} needs a calibration, a file of paceline calibrate")
