"""Check that outputs match their grammars. The null backend's odd choices take any path that a
mask allows, so hundreds of outputs cost seconds and reach states that no model would."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.grammars.schemas import GRAMMARS, LEVELS, PATTERNS, matches_schema, schema
from paceline.backends.reference.null import NullBackend
from paceline.core.grammar import Grammar
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.testing import ByteTokenizer, null_core
from paceline.engine.types import GenerationRequest
from paceline.server.protocol.structured import json_grammar, parse_grammar

__all__ = ["Tally", "generate_all"]

_MAX_TOKENS = 600


@dataclass(slots=True)
class Tally:
    """Outputs of one kind."""

    asked: int = 0
    # ended by themselves; the others were cut off at the limit
    completed: int = 0
    # completed ones that do not match their grammar
    invalid: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Work:
    kind: str
    grammar: Grammar
    holds: Callable[[str], bool]


def _work(schemas: int, patterns: int, grammars: int) -> list[_Work]:
    work = []
    for number in range(schemas):
        level = 1 + number % len(LEVELS)
        made = schema(random.Random(number), level)
        holds = _holds(made)
        work.append(_Work(f"schemas, level {level}", json_grammar(made, "schema"), holds))
    for number in range(patterns):
        pattern = PATTERNS[number % len(PATTERNS)]
        work.append(_Work("regular expressions", Grammar("regex", pattern), _fits(pattern)))
    for number in range(grammars):
        case = GRAMMARS[number % len(GRAMMARS)]
        work.append(_Work("grammars", parse_grammar(case.source, "grammar"), case.holds))
    return work


def _holds(made: object) -> Callable[[str], bool]:
    return lambda text: matches_schema(text, made)


def _fits(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def generate_all(
    *, schemas: int, patterns: int, grammars: int, seed: int = 0
) -> tuple[dict[str, Tally], int]:
    """Generate under each grammar and check; return tallies by kind, and the number of preemptions.

    Memory is short on purpose, so that many requests are preempted and resumed.
    """
    work = _work(schemas, patterns, grammars)
    requests = [_request(str(i), item.grammar, seed + i) for i, item in enumerate(work)]
    backend = NullBackend(vocab_size=ByteTokenizer().vocab_size, max_model_len=1024, num_blocks=192)
    core = null_core(backend, max_num_batched_tokens=64, max_num_seqs=64)
    with LLM(core, ByteTokenizer()) as llm:
        outputs = llm.generate(requests)
        preemptions = core.stats().num_preemptions
    tallies: dict[str, Tally] = {}
    for output in outputs:
        (choice,) = output.choices
        item = work[int(output.request_id)]
        tally = tallies.setdefault(item.kind, Tally())
        tally.asked += 1
        if choice.finish_reason not in ("stop", "length"):
            tally.failed.append(f"{item.grammar.source}: {choice.error}")
        elif choice.finish_reason == "stop":
            tally.completed += 1
            if not item.holds(choice.text):
                tally.invalid.append(f"{item.grammar.source}: {choice.text!r}")
    return tallies, preemptions


def _request(name: str, grammar: Grammar, seed: int) -> GenerationRequest:
    rng = random.Random(seed)
    prompt: Sequence[int] = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(
            max_tokens=_MAX_TOKENS,
            eos_token_ids=frozenset({ByteTokenizer.IM_END}),
            grammar=grammar,
        ),
        arrival_time=0.0,
    )
