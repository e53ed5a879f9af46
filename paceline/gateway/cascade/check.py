"""Report of what cascades lack, for ``paceline gateway --check``. No engine is asked."""

from __future__ import annotations

from paceline.gateway.cascade.judge import Judge
from paceline.gateway.settings.config import GatewayConfig, Target

__all__ = ["cascade_lacks"]


def cascade_lacks(config: GatewayConfig) -> list[str]:
    """Return a sentence for each. Raises ConfigError for a calibration that cannot be used."""
    found = []
    kinds = {engine.name: engine.kind for engine in config.engines}
    tiers = {model.name: model.tiers for model in config.models}
    for model in config.models:
        cascade = model.cascade
        if cascade is None:
            continue
        judge = Judge(model.name, cascade)
        if not judge.has_scores:
            found.append(
                f"model {model.name}: without a calibration exact faults alone decide, and nothing "
                "bounds the loss"
            )
            continue
        if cascade.mode == "route":
            continue
        first = [Target.parse(text).engine for text in tiers[cascade.small][0]]
        found += [
            f"model {model.name}: engine {name} of {cascade.small} returns no logprobs, as its "
            "kind anthropic has none: the prompt alone is scored"
            for name in first
            if kinds.get(name) == "anthropic"
        ]
        if not judge.asks_logprobs:
            found.append(
                f"model {model.name}: calibration {cascade.calibration} was made without logprobs: "
                "the prompt alone is scored"
            )
    return found
