"""The default model held to schemas, regular expressions and tools: all of it valid."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from benchmarks.grammars.schemas import schema
from paceline.core.grammar import Grammar
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.types import GenerationRequest
from paceline.server.protocol.structured import json_grammar

pytestmark = pytest.mark.slow

COUNT = 14


@pytest.fixture(scope="module")
def llm(smollm2_path: Path, threads: int | None) -> Iterator[LLM]:
    from paceline.backends.native import unavailable_reason
    from paceline.cli.flags.settings import EngineSettings
    from paceline.cli.wiring import build_core, build_tokenizer

    settings = EngineSettings.of(
        model_name="m",
        model_path=str(smollm2_path),
        compute="native" if unavailable_reason() is None else "torch",
        max_model_len=1024,
        max_num_seqs=64,
        num_blocks=1200,
        threads=threads,
    )
    core, _ = build_core(settings)
    with LLM(core, build_tokenizer(settings)) as made:
        yield made


def request(llm: LLM, name: str, grammar: Grammar, seed: int) -> GenerationRequest:
    text = llm.tokenizer.render_chat([{"role": "user", "content": f"Describe thing {seed}."}])
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=llm.tokenizer.encode(text, add_special_tokens=False),
        sampling=SamplingParams(
            max_tokens=160,
            seed=seed,
            temperature=1.0 if seed % 2 else 0.0,
            eos_token_ids=llm.tokenizer.eos_token_ids,
            grammar=grammar,
        ),
        arrival_time=0.0,
    )


def test_every_completed_output_is_valid(llm: LLM) -> None:
    schemas = [schema(random.Random(seed)) for seed in range(COUNT)]
    patterns = [r"[A-Z]{2}[0-9]{4}", r"(yes|no|maybe), because [a-z ]{5,40}\.", r"(\d{1,3}\.){3}\d"]
    requests = [request(llm, f"s{i}", json_grammar(s, "x"), i) for i, s in enumerate(schemas)]
    requests += [request(llm, f"r{i}", Grammar("regex", p), i) for i, p in enumerate(patterns)]
    ended = 0
    for output in llm.generate(requests):
        (choice,) = output.choices
        assert choice.finish_reason in ("stop", "length"), choice.error
        if choice.finish_reason == "length":
            continue
        ended += 1
        index = int(output.request_id[1:])
        if output.request_id.startswith("r"):
            assert re.fullmatch(patterns[index], choice.text), choice.text
        else:
            value = json.loads(choice.text)
            jsonschema.validate(
                value, schemas[index], format_checker=jsonschema.FormatChecker(["ipv4"])
            )
    assert ended >= 0.9 * len(requests), f"{ended} of {len(requests)} ended by themselves"
