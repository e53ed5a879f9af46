"""The default model says the same with guesses and without, in the format that it is served in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation.asked import GROUPS
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.types import GenerationRequest
from paceline.server.protocol.structured import json_grammar
from tests.parity.prompts import PROMPTS

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "delivery_address": {"type": "string", "maxLength": 20},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["customer_name", "delivery_address", "number_of_items"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "frequency_penalty": 0.2, "logprobs": 1},
    "schema": {"temperature": 0.0, "grammar": json_grammar(SCHEMA, "response_format")},
}


def _answers(
    path: Path, threads: int | None, config: dict[str, Any], dtype: str = "int8", every: int = 1
) -> tuple[list[Any], Any]:
    from paceline.cli.flags.settings import EngineSettings
    from paceline.cli.wiring import build_core, build_tokenizer

    settings = EngineSettings.of(
        model_name="m",
        model_path=str(path),
        dtype=dtype,
        max_model_len=512,
        num_blocks=400,
        threads=threads,
        speculative_config=config,
    )
    core, _ = build_core(settings)
    found: list[Any] = []
    with LLM(core, build_tokenizer(settings)) as llm:
        texts = [*PROMPTS, *(text for group in GROUPS.values() for text in group)][::every]
        for way, sampling in WAYS.items():
            requests = []
            for number, text in enumerate(texts):
                chat = llm.tokenizer.render_chat([{"role": "user", "content": text}])
                prompt = llm.tokenizer.encode(chat, add_special_tokens=False)
                requests.append(
                    GenerationRequest(
                        request_id=f"{way} {number}",
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(
                            max_tokens=48,
                            seed=number,
                            eos_token_ids=llm.tokenizer.eos_token_ids,
                            **sampling,
                        ),
                        arrival_time=0.0,
                        # as if the caller expected the prompt itself
                        prediction=tuple(prompt) if number % 2 else (),
                    )
                )
            # alone, and a few at a time
            for first in range(0, len(requests), 3):
                for output in llm.generate(requests[first : first + 1 + 2 * (first % 2)]):
                    choice = output.choices[0]
                    found.append((choice.token_ids, choice.text, choice.finish_reason))
        stats = core.stats()
    return found, stats


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_answers_are_the_same(smollm2_path: Path, threads: int | None, every: int) -> None:
    from paceline.backends.native import unavailable_reason

    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    off, _ = _answers(smollm2_path, threads, {"method": "off"}, every=every)
    on, stats = _answers(smollm2_path, threads, {"method": "auto"}, every=every)
    assert on == off
    for source, count in stats.drafted:
        assert count > 20 // every, source
    assert {source for source, _ in stats.drafted} == {
        "ngram", "prediction", "grammar", "finished_answers",
    }  # fmt: skip
    accepted = dict(stats.accepted)
    assert accepted["grammar"] == dict(stats.drafted)["grammar"]


@pytest.mark.thorough
def test_answers_are_the_same_with_the_same_weights_in_fewer_bits(
    smollm2_path: Path, threads: int | None
) -> None:
    from paceline.backends.native import unavailable_reason

    if unavailable_reason() is not None:
        pytest.skip(str(unavailable_reason()))
    off, _ = _answers(smollm2_path, threads, {"method": "off"}, "bfloat16", 10)
    config = {"method": "auto", "model": "self"}
    on, stats = _answers(smollm2_path, threads, config, "bfloat16", 10)
    assert on == off
    drafted, accepted = dict(stats.drafted), dict(stats.accepted)
    assert drafted["draft_model"] > 100
    assert accepted["draft_model"] > 0.6 * drafted["draft_model"]
