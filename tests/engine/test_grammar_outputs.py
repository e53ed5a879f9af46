"""Hundreds of schemas and grammars: whatever ends by itself is valid.

The null backend's odd choices take every turn that a mask allows, from any byte.
"""

from __future__ import annotations

import json
import random
import re

import jsonschema

from paceline.backends.null import NullBackend
from paceline.core.grammar import Grammar
from paceline.core.request import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationRequest
from paceline.server.structured import json_grammar
from tests.schemas import schema

SCHEMAS = 250
PATTERNS = [
    r"[A-Z]{2}[0-9]{4}",
    r"(yes|no|maybe), because [a-z ]{5,40}\.",
    r"(\d{1,3}\.){3}\d{1,3}",
    r"(ab?c|d[ef]+){2,5}",
    r"<(b|i)>[^<]{0,9}</(b|i)>",
]


def request(name: str, grammar: Grammar, seed: int) -> GenerationRequest:
    rng = random.Random(seed)
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=[rng.randrange(256) for _ in range(rng.randint(1, 20))],
        sampling=SamplingParams(
            max_tokens=600,
            eos_token_ids=frozenset({ByteTokenizer.IM_END}),
            grammar=grammar,
        ),
        arrival_time=0.0,
    )


def test_every_completed_output_is_valid() -> None:
    schemas = [schema(random.Random(seed)) for seed in range(SCHEMAS)]
    requests = [request(f"s{i}", json_grammar(s, "x"), i) for i, s in enumerate(schemas)]
    requests += [
        request(f"r{i}", Grammar("regex", PATTERNS[i % len(PATTERNS)]), i) for i in range(50)
    ]
    backend = NullBackend(vocab_size=ByteTokenizer().vocab_size, max_model_len=1024, num_blocks=192)
    # not "date": the checker knows no year 0, RFC 3339 does
    checker = jsonschema.FormatChecker(["ipv4"])
    ended = 0
    # little memory: many are preempted and go on where they were
    core = null_core(backend, max_num_batched_tokens=64, max_num_seqs=64)
    with LLM(core, ByteTokenizer()) as llm:
        outputs = llm.generate(requests)
        assert core.stats().num_preemptions > 0
    for output in outputs:
        (choice,) = output.choices
        assert choice.finish_reason in ("stop", "length"), choice.error
        if choice.finish_reason == "length":
            continue
        ended += 1
        index = int(output.request_id[1:])
        if output.request_id.startswith("r"):
            assert re.fullmatch(PATTERNS[index % len(PATTERNS)], choice.text), choice.text
        else:
            jsonschema.validate(json.loads(choice.text), schemas[index], format_checker=checker)
    assert ended >= 0.95 * len(requests), f"{ended} of {len(requests)} ended by themselves"
