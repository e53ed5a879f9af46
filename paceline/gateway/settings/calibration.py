"""Calibration file: what ``paceline calibrate`` measured, and the gateway decides by.

It has a scorer for each mode, and what each label scored and would have lost, so that thresholds
for another ``max_loss`` need no new measurement. It holds for the two models that it was made with
alone: other weights, another format or another template answer with another confidence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from paceline.errors import ConfigError
from paceline.gateway.settings.cascade import CascadeConfig, Mode
from paceline.routing.cascade import ANSWER_FORM, CONFIDENCE, FORM, NUM_BUCKETS, Forest, Scorer

__all__ = [
    "Calibration", "Fitted", "Shadow", "Side", "Signals", "digest_of", "num_dense",
    "read_calibration",
]  # fmt: skip

_VERSION: Final = 2
_MAX_BYTES: Final = 64 << 20
# fields of an engine's entry of a model that change although the model stays
_PASSING: Final = frozenset({"created", "created_at", "object", "owned_by", "permission"})


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two models."""

    # its name at the engine
    model: str
    # ``digest_of`` what the engine told of it
    digest: str
    # the same, for people
    told: dict[str, Any] = {}


class Signals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Signals that are asked for beyond the prompt's text and the answer's tokens."""

    # further answers, whose agreement with the first counts
    samples: int = 0
    perplexity: bool = False
    # model that embeds prompts, and the length of its vectors; "": none does
    embeddings: str = ""
    num_values: int = 0

    def differ(self, cascade: CascadeConfig) -> str:
        """Return the first setting of a cascade that a calibration was made without, or with
        another value; empty: there is none."""
        for name in ("samples", "perplexity", "embeddings"):
            one, other = getattr(self, name), getattr(cascade, name)
            if one != other:
                return f"was made with {name} = {one!r}, and the file says {other!r}"
        return ""


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scorer of one mode, with the labels that it was not fitted on."""

    weights: bytes
    scores: list[float]
    # quality lost where the small answer is taken, 0 to 1
    losses: list[float]
    # trees over the weights' score; empty: that is the score
    forest: bytes = b""

    def scorer(self, mode: Mode, signals: Signals) -> Scorer | Forest:
        """Raises ConfigError: the weights are those of another version."""
        num_hashed, count = NUM_BUCKETS + signals.num_values, num_dense(mode, signals)
        linear = Scorer.of_bytes(self.weights, num_hashed, count)
        return Forest.of_bytes(self.forest, linear, count) if self.forest else linear


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    version: int = _VERSION
    small: Side
    large: Side
    # first tokens that have signals of their own
    prefix_tokens: int
    # labels in all, those of the fit included
    num_labels: int
    # whether checkers told what is lost, or each answer that differs from the large model's counts
    labels: Literal["checked", "shadow"] = "checked"
    signals: Signals = Signals()
    # without ``cascade`` and ``prefix`` the small engine tells no log-probabilities
    fitted: dict[Mode, Fitted]


class Shadow(msgspec.Struct, frozen=True, array_like=True):
    """Line of a file of shadow traffic: a chat, and both models' answers."""

    # ``digest_of`` what their engines listed; "": they list nothing
    small_digest: str
    large_digest: str
    # the chat's fields that a prompt is read from
    chat: Mapping[str, msgspec.Raw]
    small: msgspec.Raw
    large: msgspec.Raw


def num_dense(mode: Mode, signals: Signals) -> int:
    """Return the dense features of a mode: the prompt's form, the confidence of an answer, and the
    form and the other signals of a whole one."""
    found = len(FORM) + (0 if mode == "route" else len(CONFIDENCE))
    if mode == "cascade":
        found += len(ANSWER_FORM) + (signals.samples > 0) + signals.perplexity
    return found


def digest_of(entry: Mapping[str, Any]) -> str:
    """Return the digest of an engine's entry of a model; "": it has none, as where the file of the
    gateway names the models."""
    if isinstance(entry.get("digest"), str):
        # Paceline's: of weights, formats and template
        entry = {"digest": entry["digest"]}
    elif entry.get("owned_by") == "paceline":
        # one of several models, which has none before it was in memory
        return ""
    told = {name: value for name, value in entry.items() if name not in _PASSING}
    if not told:
        return ""
    text = msgspec.json.encode(told, order="sorted")
    return hashlib.sha256(text).hexdigest()[:32]


def read_calibration(path: Path, prefix_tokens: int) -> Calibration:
    """Read a calibration for prefixes of ``prefix_tokens``. Raises ConfigError."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"calibration {path} has {path.stat().st_size} bytes; at most {_MAX_BYTES} are read"
            )
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"calibration {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no calibration: {error}") from None
    if found.version != _VERSION:
        raise ConfigError(
            f"calibration {path} has version {found.version}, and this gateway reads {_VERSION}"
        )
    if "route" not in found.fitted:
        raise ConfigError(f"{path} is no calibration: it has no scorer of prompts")
    if "prefix" in found.fitted and found.prefix_tokens != prefix_tokens:
        raise ConfigError(
            f"calibration {path} was made for prefix_tokens {found.prefix_tokens}, not "
            f"{prefix_tokens}"
        )
    for mode, fitted in found.fitted.items():
        try:
            fitted.scorer(mode, found.signals)
        except ConfigError as error:
            raise ConfigError(f"calibration {path}, mode {mode}: {error}") from None
        values = [*fitted.scores, *fitted.losses]
        if len(fitted.scores) != len(fitted.losses) or not all(map(_is_share, values)):
            raise ConfigError(
                f"calibration {path}, mode {mode}: {len(fitted.scores)} scores and "
                f"{len(fitted.losses)} losses must be as many, each 0 to 1"
            )
    return found


def _is_share(value: float) -> bool:
    return math.isfinite(value) and 0.0 <= value <= 1.0
