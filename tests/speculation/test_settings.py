"""What ``--speculative-config`` may say."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.speculation.settings import SpeculationSettings


def test_settings_are_checked() -> None:
    good = {"method": "ngram", "num_speculative_tokens": 3}
    for wrong, said in (
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "min=5 is above max=4"),
        ({"num_speculative_tokens": 33}, "from 1 to 32, got 33"),
        ({"num_speculative_tokens": True}, "got True"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be"),
        ({"method": "eagle"}, "method must be one of auto, ngram, draft_model, self, off"),
        ({"method": 3}, "method must be .* got 3"),
        ({"model": "x"}, "'ngram' takes .*, not 'model'"),
        ({"method": "off"}, "takes no other keys, not 'num_speculative_tokens'"),
        ({"method": "self", "model": "x"}, "not 'model'"),
        ({"method": "draft_model"}, "lacks the model"),
        ({"method": "auto", "quantization": "q4"}, "lacks the model"),
        ({"method": "self", "prompt_lookup_max": 3}, "not 'prompt_lookup_max'"),
        ({"method": "eagle3"}, "'eagle3' lacks the model"),
        ({"method": "eagle3", "model": "x", "quantization": "q4"}, "not 'quantization'"),
        ({"method": "mtp", "model": "x"}, "'mtp' takes num_speculative_tokens, not 'model'"),
        ({"finished_answers_bytes": 0}, "'ngram' takes .*, not 'finished_answers_bytes'"),
    ):
        with pytest.raises(ConfigError, match=said):
            SpeculationSettings.of(good | wrong)

    def of(config: dict[str, Any] | None) -> tuple[Any, ...]:
        settings = SpeculationSettings.of(config)
        lookup = settings.lookup_min, settings.lookup_max
        return settings.num_tokens, *lookup, settings.grammars, settings.predictions

    assert of({"method": "auto"}) == (8, 1, 5, True, True)
    assert of(good | {"method": "auto"}) == (3, 1, 5, True, True)
    # one that is longer than what is usual stands for both; a shorter one for itself
    assert of({"method": "auto", "prompt_lookup_min": 7}) == (8, 7, 7, True, True)
    assert of({"method": "auto", "prompt_lookup_min": 2}) == (8, 2, 5, True, True)
    assert of({"method": "auto", "prompt_lookup_max": 3}) == (8, 1, 3, True, True)
    assert of(good) == (3, 5, 5, False, True)
    assert of(good | {"prompt_lookup_min": 2}) == (3, 2, 2, False, True)
    assert of(good | {"prompt_lookup_max": 4}) == (3, 4, 4, False, True)
    assert of(None) == (8, None, None, False, True)
    assert of({"method": "off"}) == (0, None, None, False, False)
    assert of({"model": "x"}) == (8, None, None, False, True)
    assert of({"method": "self"}) == of({"model": "x"})
    assert of({"method": "auto", "model": "x"}) == (8, 1, 5, True, True)
    assert of({"method": "eagle3", "model": "x"}) == of({"model": "x"})
    assert of({"method": "mtp"}) == of({"model": "x"})
    assert of({"method": "auto", "finished_answers_bytes": 0}) == of({"method": "auto"})


def test_who_needs_a_draft_model() -> None:
    def models(**config: Any) -> bool:
        return SpeculationSettings.of(config).models

    assert models(model="x", num_speculative_tokens=3)
    assert models(method="draft_model", model="x", quantization="int8")
    assert models(method="auto", model="self")
    assert models(method="self")
    assert models(method="eagle3", model="x", num_speculative_tokens=3)
    assert models(method="mtp", num_speculative_tokens=3)
    assert not models(method="auto")
    assert not models(method="ngram", num_speculative_tokens=3)
    assert SpeculationSettings.of({"method": "self"}).drafts_alone
