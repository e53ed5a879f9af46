"""Judge of one model: scores and thresholds, by its calibration and the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from paceline.errors import ConfigError
from paceline.gateway.cascade.answer import Said, fault_of, features_of
from paceline.gateway.cascade.prompt import Prompt
from paceline.gateway.routing.routes import Endpoint, Route
from paceline.gateway.settings.calibration import (
    Calibration,
    Fitted,
    Signals,
    digest_of,
    read_calibration,
)
from paceline.gateway.settings.cascade import CascadeConfig, Mode
from paceline.gateway.upstreams.upstream import UpstreamModel
from paceline.routing.cascade import (
    Audit,
    Conversations,
    Drift,
    Easing,
    exact_fault,
    is_refusal,
    pick_threshold,
)

__all__ = ["Decision", "Judge"]

# digits of scores and thresholds that callers see
_DIGITS: Final = 4


class Decision(msgspec.Struct, frozen=True):
    """Whether the small model's answer is good enough, and why."""

    small: bool
    # "score", a fault of the answer, or what left no choice
    why: str
    score: float | None = None
    threshold: float | None = None

    def note(self, by: str, model: str) -> Mapping[str, object]:
        """Return what the caller is told; ``by``: "small", "escalated" or "routed"; ``model``: who
        wrote the answer."""
        told: dict[str, object] = {"by": by, "model": model, "why": self.why}
        for name, value in (("score", self.score), ("threshold", self.threshold)):
            if value is not None:
                told[name] = _shown(value)
        return told


def _shown(value: float | None) -> float | None:
    """Round a score or threshold; no score reaches 2, which stands for infinity: JSON has none."""
    return None if value is None else round(min(value, 2.0), _DIGITS)


class _Scale:
    """Scorer of one mode, and its threshold."""

    def __init__(self, config: CascadeConfig, mode: Mode, fitted: Fitted, signals: Signals) -> None:
        self._scorer, self._mode = fitted.scorer(mode, signals), mode
        self._signals = signals
        strict = pick_threshold(fitted.scores, fitted.losses, config.max_loss)
        under = config.under_load
        most = config.max_loss if under is None else under.max_loss
        eased = pick_threshold(fitted.scores, fitted.losses, most)
        self._easing = Easing(strict, eased, 1.0 if under is None else under.full_wait)
        self._first, self._bounds = config.prefix_tokens, (config.max_loss, most)
        # a label with a fault has the score 0, and no such answer is scored here
        self.drift = Drift([score for score in fitted.scores if score] or fitted.scores)

    @property
    def max_loss(self) -> float:
        """The bound that holds now, as the large engines are busy or not."""
        strict, eased = self._bounds
        return strict + self._easing.share * (eased - strict)

    def score(self, prompt: Prompt, said: Said | None) -> float:
        if said is not None:
            signals = self._signals
            said = said.scored_by(agreement=signals.samples > 0, perplexity=signals.perplexity)
        return self._scorer.score(features_of(prompt, said, self._mode, self._first))

    def threshold(self, wait: float) -> float:
        return self._easing.threshold(wait)


class Judge:
    """Judge of one model. Raises ConfigError if its calibration cannot be used.

    Args:
        model: its name in the configuration.
    """

    def __init__(self, model: str, config: CascadeConfig) -> None:
        self.model, self.config = model, config
        self.conversations = Conversations()
        self._calibration: Calibration | None = None
        self._scales: dict[Mode, _Scale] = {}
        self.audit = Audit()
        # predicted wait for the large model, and the decision by a score, as they were last
        self._wait = 0.0
        self._last: Decision | None = None
        # models of engines that fit the calibration, as they were last listed
        self._fitting: dict[tuple[str, str], UpstreamModel] = {}
        # log-probabilities are used, and the small engine tells them as far as is known
        self.asks_logprobs = False
        self._signals = Signals()
        if config.calibration:
            self._calibration = read_calibration(Path(config.calibration), config.prefix_tokens)
            self._signals = self._calibration.signals
            if why := self._signals.differ(config):
                raise ConfigError(
                    f"model {model}: calibration {config.calibration} {why}: calibrate again"
                )
            for mode, fitted in self._calibration.fitted.items():
                try:
                    self._scales[mode] = _Scale(config, mode, fitted, self._signals)
                except ConfigError as error:
                    raise ConfigError(
                        f"model {model}: calibration {config.calibration}, mode {mode}: {error}"
                    ) from None
            if config.adaptive and self._calibration.labels != "shadow":
                raise ConfigError(
                    f"model {model}: adaptive needs a calibration by shadow traffic, and "
                    f"{config.calibration} is by checkers: there another answer is no loss"
                )
            self.asks_logprobs = "cascade" in self._scales

    def follow(self, before: Judge) -> None:
        """Keep what the judge before a reload has learned, as far as it still holds."""
        self.conversations = before.conversations
        if (self.config, self._calibration) == (before.config, before._calibration):
            self.audit = before.audit

    @property
    def has_scores(self) -> bool:
        """Whether scores decide too, and not exact faults alone."""
        return bool(self._scales)

    def status(self) -> dict[str, Any]:
        """Return the mode, the bound that holds now, and the latest score and threshold."""
        last = self._last or Decision(False, "")
        return {
            "small": self.config.small,
            "mode": self.config.mode,
            "max_loss": round(self._max_loss, _DIGITS),
            "score": _shown(last.score),
            "threshold": _shown(last.threshold),
        }

    def mode_for(self, *, stream: bool) -> Mode:
        """Return how a request is decided: a whole answer has no prefix that is worth holding."""
        mode = self.config.mode
        return "cascade" if mode == "prefix" and not stream else mode

    def take_drift(self) -> float | None:
        """Return how unlike the labels' the recent scores are, now and then; None: not now."""
        found = [drift for scale in self._scales.values() if (drift := scale.drift.take())]
        return max(found, default=None)

    def by_prompt(self, prompt: Prompt, wait: float) -> Decision:
        """Decide from the prompt alone."""
        return self._decide("route", prompt, None, wait)

    def is_grey(self, prompt: Prompt, wait: float) -> bool:
        """Whether a prompt alone leaves it open which model will answer."""
        scale = self._scales.get("route")
        if scale is None or not self.config.early_prefill or not self._is_embedded(prompt):
            return False
        distance = abs(scale.score(prompt, None) - scale.threshold(wait))
        return distance <= self.config.early_prefill

    def by_answer(
        self, prompt: Prompt, said: Said, wait: float, known: Decision | None = None
    ) -> Decision:
        """Decide from a whole answer; ``known``: the decision by its prompt, if it was made."""
        if fault := exact_fault(said.answer):
            return Decision(False, fault)
        return self._by_tokens("cascade", prompt, said, wait, known)

    def by_prefix(
        self,
        prompt: Prompt,
        said: Said,
        wait: float,
        known: Decision | None = None,
        *,
        is_whole: bool,
    ) -> Decision:
        """Decide from the beginning of an answer; ``is_whole``: there is no more of it."""
        if is_whole and (fault := exact_fault(said.answer)):
            return Decision(False, fault)
        if said.answer.refusal or is_refusal(said.answer.text):
            return Decision(False, "refusal")
        return self._by_tokens("prefix", prompt, said, wait, known)

    def _by_tokens(
        self, mode: Mode, prompt: Prompt, said: Said, wait: float, known: Decision | None
    ) -> Decision:
        if not self._scales:
            return Decision(True, "no fault")
        if self._is_complete(said, mode):
            return self._decide(mode, prompt, said, wait)
        # each score is seen once
        return known or self.by_prompt(prompt, wait)

    def _decide(self, mode: Mode, prompt: Prompt, said: Said | None, wait: float) -> Decision:
        scale, self._wait = self._scales[mode], wait
        if not self._is_embedded(prompt):
            return Decision(False, "no embedding")
        score, threshold = scale.score(prompt, said), self._threshold(mode)
        scale.drift.saw(score)
        self._last = Decision(score >= threshold, "score", score, threshold)
        return self._last

    def _is_embedded(self, prompt: Prompt) -> bool:
        return len(prompt.embedding) == self._signals.num_values

    def _is_complete(self, said: Said, mode: Mode) -> bool:
        """Whether an answer came with all signals that its mode is scored by."""
        if not said.tokens or mode not in self._scales:
            return False
        lacks = (self._signals.samples and said.agreement is None) or (
            self._signals.perplexity and said.prompt_logprob is None
        )
        return mode != "cascade" or not lacks

    def _threshold(self, mode: Mode) -> float:
        shift = self.audit.shift if self.config.adaptive else 0.0
        return self._scales[mode].threshold(self._wait) + shift

    # ---------------------------------------------------------------- audits

    @property
    def _max_loss(self) -> float:
        scales = self._scales.values()
        return max((scale.max_loss for scale in scales), default=self.config.max_loss)

    def audited(self, mode: Mode, prompt: Prompt, said: Said, *, differs: bool) -> None:
        """Take in a request that both models answered. ``mode`` says how it was decided, and
        ``differs`` that the two answers are not the same."""
        stays = not fault_of(said, mode, self.config.prefix_tokens)
        if stays and self._scales and not self._is_embedded(prompt):
            stays = False
        elif stays and self._scales:
            mode = mode if self._is_complete(said, mode) else "route"
            told = None if mode == "route" else said
            stays = self._scales[mode].score(prompt, told) >= self._threshold(mode)
        self.audit.add(float(differs and stays), self._max_loss)

    def digests(self, small: Route, large: Route) -> tuple[str, str]:
        """Return the digests of what the first engines of both models list; "": nothing."""
        found = [
            (endpoint.upstream.models or {}).get(endpoint.model)
            for endpoint in (_first_tier(small)[0], _first_tier(large)[0])
        ]
        one, other = ("" if listed is None else digest_of(listed.entry) for listed in found)
        return one, other

    # ---------------------------------------------------------------- the calibration's models

    def misfit(self, small: Route, large: Route) -> str:
        """Return why the calibration does not hold for these routes; empty: it does, as far as
        their engines have told what they have."""
        if self._calibration is None:
            return ""
        for side, route in ((self._calibration.small, small), (self._calibration.large, large)):
            for endpoint in _first_tier(route):
                listed = (endpoint.upstream.models or {}).get(endpoint.model)
                if listed is None or self._fitting.get(endpoint.key) is listed:
                    continue
                digest = digest_of(listed.entry)
                if digest and side.digest and digest != side.digest:
                    return (
                        f"model {self.model}: calibration {self.config.calibration} was made with "
                        f"{side.model} of digest {side.digest}, and engine "
                        f"{endpoint.upstream.name} has {endpoint.model} of digest "
                        f"{digest}: calibrate again"
                    )
                self._fitting[endpoint.key] = listed
        return ""


def _first_tier(route: Route) -> Sequence[Endpoint]:
    """Return the endpoints of the configuration's first tier: later ones are other models."""
    return [endpoint for tier in route.tiers for endpoint in tier if not endpoint.tier]
