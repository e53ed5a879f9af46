"""The default model in float32 says exactly what ``transformers`` says, however it is scheduled.

``transformers`` judges by teacher forcing: one forward pass over prompt + output shows, at every
position, which token it would have chosen. If that is the token we chose at every position, its own
greedy generation would have been the same (by induction over the positions), at a fraction of the
time. What it chose is written down in chosen.json, so only ``make test-all`` has to ask it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.core.backend import ModelBackend
from paceline.engine.text.tokenizer import load_tokenizer
from tests.driving import Driver, make_request
from tests.parity.prompts import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# of each answer that chosen.json has
NUM_TOKENS = 64
# of PROMPTS, in the order in which they come: long ones first, as the last are preempted
FEW = (22, 21, 12, 0, 6, 18)
# what transformers chooses after each prompt; where the model or the prompts change,
# ``python -m tests.parity.record`` writes it anew
CHOSEN: dict[str, list[int]] = {}
if (_PATH := Path(__file__).with_name("chosen.json")).exists():
    CHOSEN = json.loads(_PATH.read_text())


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.thorough)])
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path, which: str) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(smollm2_path)
    assert len(PROMPTS) >= 24
    chosen = FEW if which == "few" else range(len(PROMPTS))
    return {f"p{index}": tokenizer.encode(PROMPTS[index]) for index in chosen}


@pytest.fixture(scope="module")
def num_tokens(which: str) -> int:
    """Tokens of each answer."""
    return NUM_TOKENS // 2 if which == "few" else NUM_TOKENS


@pytest.fixture(scope="module")
def fewer(num_tokens: int) -> int:
    """Tokens where what came before the answer is in question, which its beginning shows."""
    return num_tokens // 2


def load(path: Path, threads: int | None) -> ModelBackend:
    from tests.backends.helpers import load_backend

    return load_backend(
        path,
        device="cpu",
        dtype="float32",
        block_size=16,
        kv_cache_bytes=1 << 30,
        max_model_len=2048,
        max_num_seqs=32,
        threads=threads,
    )


@pytest.fixture(scope="module")
def backend(smollm2_path: Path, threads: int | None) -> Iterator[ModelBackend]:
    made = load(smollm2_path, threads)
    yield made
    made.close()


@pytest.fixture(scope="module")
def transformers_model(smollm2_path: Path) -> Any:
    from tests.parity.record import load_transformers

    return load_transformers(smollm2_path, "float32")


def chosen_after(transformers_model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers would have chosen in the place of each token of ``output``."""
    import torch

    with torch.inference_mode():
        logits = transformers_model(torch.tensor([prompt + output[:-1]])).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return chosen


def add(driver: Driver, prompts: dict[str, list[int]], num_tokens: int) -> dict[str, list[int]]:
    """Have ``driver`` answer all of them, and take what it said."""
    driver.tokens.clear()
    driver.finished.clear()
    for name, tokens in prompts.items():
        driver.add(make_request(name, tokens, num_tokens, temperature=0.0))
    driver.run()
    return {name: driver.tokens[name] for name in prompts}


def generate(
    backend: ModelBackend,
    prompts: dict[str, list[int]],
    num_tokens: int,
    **settings: Any,
) -> tuple[dict[str, list[int]], Driver]:
    defaults: dict[str, Any] = {
        "num_blocks": backend.info.num_blocks,
        "block_size": 16,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
    }
    driver = Driver(backend=backend, **(defaults | settings))
    return add(driver, prompts, num_tokens), driver


class Together(NamedTuple):
    """All prompts at once, and all of them once more with the first time's blocks in the cache."""

    cold: dict[str, list[int]]
    warm: dict[str, list[int]]
    num_cached: int


@pytest.fixture(scope="module")
def together(backend: ModelBackend, prompts: dict[str, list[int]], num_tokens: int) -> Together:
    cold, driver = generate(backend, prompts, num_tokens)
    # before another driver writes to the same blocks
    warm = add(driver, prompts, num_tokens)
    num_cached = sum(update.num_cached_tokens for update in driver.finished.values())
    return Together(cold, warm, num_cached)


@pytest.fixture(scope="module")
def batched(together: Together) -> dict[str, list[int]]:
    return together.cold


def test_the_tokens_are_those_that_transformers_chooses(
    prompts: dict[str, list[int]], batched: dict[str, list[int]], num_tokens: int
) -> None:
    """As it is written down; ``make test-all`` asks transformers."""
    lengths = [len(tokens) for tokens in prompts.values()]
    assert min(lengths) <= 3
    assert max(lengths) >= 500
    assert batched.keys() <= CHOSEN.keys()
    for name, tokens in batched.items():
        assert tokens == CHOSEN[name][:num_tokens], f"{name}: {PROMPTS[int(name[1:])][:40]!r}"


@pytest.mark.thorough
def test_every_weight_is_what_transformers_reads(
    smollm2_path: Path, transformers_model: Any
) -> None:
    theirs = transformers_model.state_dict()
    checkpoint = open_gguf(smollm2_path)
    # the output head is the embedding
    assert set(checkpoint.tensor_names()) == set(theirs) - {"lm_head.weight"}
    for name in checkpoint.tensor_names():
        np.testing.assert_array_equal(checkpoint.tensor(name), theirs[name].numpy())


@pytest.mark.thorough
def test_transformers_chooses_what_is_written_down(
    transformers_model: Any, prompts: dict[str, list[int]]
) -> None:
    for name, prompt in prompts.items():
        chosen = chosen_after(transformers_model, prompt, CHOSEN[name])
        assert chosen == CHOSEN[name], f"{name}: {PROMPTS[int(name[1:])][:40]!r}"


def test_alone(
    backend: ModelBackend, prompts: dict[str, list[int]], batched: dict[str, list[int]], fewer: int
) -> None:
    for index, name in enumerate(prompts):
        # a row that is alone all the time takes a minute for all of them
        count = fewer if index % 8 == 0 else 4
        tokens, _ = generate(backend, {name: prompts[name]}, count, max_num_seqs=1)
        assert tokens[name] == batched[name][:count]


def test_chunked(
    backend: ModelBackend, prompts: dict[str, list[int]], batched: dict[str, list[int]], fewer: int
) -> None:
    tokens, driver = generate(backend, prompts, fewer, max_num_batched_tokens=64)
    assert tokens == {name: expected[:fewer] for name, expected in batched.items()}
    assert sum(not row.samples for plan in driver.plans for row in plan.rows) >= 10
    # chunks and single tokens in one step
    assert any({row.samples for row in plan.rows} == {True, False} for plan in driver.plans)


def test_warm_prefix_cache(together: Together, prompts: dict[str, list[int]]) -> None:
    assert together.warm == together.cold
    assert together.num_cached > 0.8 * sum(map(len, prompts.values()))


def test_preempted(
    backend: ModelBackend, prompts: dict[str, list[int]], batched: dict[str, list[int]], fewer: int
) -> None:
    # less than all of them need
    num_blocks = sum(len(tokens) // 16 + 1 for tokens in prompts.values())
    tokens, driver = generate(backend, prompts, fewer, num_blocks=num_blocks, depth=2)
    assert tokens == {name: expected[:fewer] for name, expected in batched.items()}
    assert driver.scheduler.stats().num_preemptions >= 2
