"""What every backend promises, on every backend.

The reference for each prompt is a run of its own: alone, whole prompt in one step, cold cache. All
other ways to schedule the same request must give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.backend import ModelBackend
from paceline.core.request import FinishReason
from tests.contract.ascii import VOCAB
from tests.driving import Driver, make_request

# of the KV cache, in tokens, whatever a backend's block size
NUM_TOKENS = 384


def make_null(_: Path) -> ModelBackend:
    return NullBackend(
        vocab_size=VOCAB, num_blocks=NUM_TOKENS // 4, block_size=4, num_host_blocks=40
    )


def make_simulated(folder: Path) -> ModelBackend:
    """On a clock that only its own sleeping moves."""
    from paceline.backends.reference.simulated import SimulatedBackend

    inner = make_null(folder)
    assert isinstance(inner, NullBackend)
    time = [0.0]

    def sleep(seconds: float) -> None:
        time[0] += seconds

    return SimulatedBackend(inner, lambda plan: 0.01, clock=lambda: time[0], sleep=sleep)


def make_torch(folder: Path) -> ModelBackend:
    return load_tiny(folder, block_size=4, compute="torch")


def make_native(folder: Path) -> ModelBackend:
    from paceline.backends.native import unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return load_tiny(folder, block_size=16, compute="native")


def load_tiny(folder: Path, *, block_size: int, compute: str, **settings: Any) -> ModelBackend:
    """A tiny random Llama in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_folder(folder, block_size=block_size, compute=compute, **settings)


def load_folder(folder: Path, *, block_size: int, compute: str, **settings: Any) -> ModelBackend:
    from tests.backends.helpers import load_backend

    backend = load_backend(
        folder,
        device="cpu",
        dtype="float32",
        block_size=block_size,
        kv_cache_bytes=None,
        max_model_len=512,
        max_num_seqs=8,
        threads=1,
        compute=compute,
        **settings,
    )
    assert backend.info.num_blocks * block_size >= NUM_TOKENS
    return backend


BACKENDS: dict[str, Callable[[Path], ModelBackend]] = {
    "native": make_native,
    "null": make_null,
    "simulated": make_simulated,
    "torch": make_torch,
}


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[ModelBackend]:
    made = BACKENDS[request.param](tmp_path_factory.mktemp("model"))
    yield made
    made.close()
    made.close()


PROMPTS = {
    "one": [7],
    "short": [3, 5, 8],
    "block": list(range(20, 28)),
    "long": [(i * 37 + 11) % VOCAB for i in range(61)],
    "twin": [(i * 37 + 11) % VOCAB for i in range(50)] + [1, 2, 3],
}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "top_p": 0.95, "top_k": 40}
LENGTH = 14


def drive(backend: ModelBackend, *, num_tokens: int = NUM_TOKENS, **settings: Any) -> Driver:
    block_size = backend.info.block_size
    defaults: dict[str, Any] = {
        "num_blocks": num_tokens // block_size,
        "block_size": block_size,
        "max_model_len": 512,
        "max_num_batched_tokens": 256,
    }
    return Driver(backend=backend, **(defaults | settings))


def alone(backend: ModelBackend, sampling: dict[str, Any]) -> dict[str, list[int]]:
    tokens = {}
    for name, prompt in PROMPTS.items():
        driver = drive(backend, max_num_seqs=1)
        driver.add(make_request(name, prompt, LENGTH, **sampling))
        driver.run()
        tokens[name] = driver.tokens[name]
        assert len(tokens[name]) == LENGTH
        assert all(0 <= token < backend.info.vocab_size for token in tokens[name])
    return tokens


def together(driver: Driver, sampling: dict[str, Any]) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        driver.add(make_request(name, prompt, LENGTH, **sampling))
    driver.run()
    return {name: driver.tokens[name] for name in PROMPTS}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
class TestSameTokensEveryWay:
    def test_batched(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        assert together(drive(backend), sampling) == alone(backend, sampling)

    def test_chunked(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        driver = drive(backend, max_num_batched_tokens=9)
        assert together(driver, sampling) == alone(backend, sampling)
        assert max(row.num_tokens for plan in driver.plans for row in plan.rows) <= 9

    def test_warm_prefix_cache(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        driver = drive(backend)
        for name, prompt in PROMPTS.items():
            driver.add(make_request(f"warm {name}", prompt, 2))
        driver.run()
        assert together(driver, sampling) == alone(backend, sampling)
        block_size = backend.info.block_size
        reusable = (len(PROMPTS["twin"]) - 1) // block_size * block_size
        assert driver.finished["twin"].num_cached_tokens == reusable

    def test_preempted(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        driver = drive(backend, num_tokens=88)
        assert together(driver, sampling) == alone(backend, sampling)
        assert driver.scheduler.stats().num_preemptions > 0

    @pytest.mark.parametrize("depth", [1, 2])
    def test_swapped(self, backend: ModelBackend, sampling: dict[str, Any], depth: int) -> None:
        driver = drive(
            backend,
            num_tokens=88,
            depth=depth,
            num_host_blocks=backend.info.num_host_blocks,
            preemption="swap",
        )
        assert together(driver, sampling) == alone(backend, sampling)
        stats = driver.scheduler.stats()
        assert stats.num_swapped_out_blocks > 0
        assert stats.num_recomputed_tokens == 0

    def test_planned_ahead(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        driver = drive(backend, depth=2, max_num_batched_tokens=16, num_tokens=120)
        assert together(driver, sampling) == alone(backend, sampling)

    def test_forked(self, backend: ModelBackend, sampling: dict[str, Any]) -> None:
        driver = drive(backend)
        reference = alone(backend, sampling)
        for name in ("short", "block", "long"):
            driver.add(make_request(name, PROMPTS[name], LENGTH, **sampling))
            for index in (1, 2):
                child = make_request(
                    f"{name}/{index}", PROMPTS[name], LENGTH, fork_of=name, **sampling
                )
                driver.add(child)
        driver.run()
        assert any(plan.block_copies for plan in driver.plans)
        for name in ("short", "block", "long"):
            for made in (name, f"{name}/1", f"{name}/2"):
                assert driver.tokens[made] == reference[name]


def test_an_id_can_be_used_again_for_another_prompt(backend: ModelBackend) -> None:
    reference = alone(backend, GREEDY)
    driver = drive(backend)
    for name in ("short", "long"):
        driver.tokens.clear()
        driver.finished.clear()
        driver.add(make_request("same", PROMPTS[name], LENGTH, **GREEDY))
        driver.run()
        assert driver.tokens["same"] == reference[name]


def test_an_aborted_request_leaves_the_others_alone(backend: ModelBackend) -> None:
    reference = alone(backend, GREEDY)
    driver = drive(backend, depth=2)
    for name, prompt in PROMPTS.items():
        driver.add(make_request(name, prompt, LENGTH, **GREEDY))
    for _ in range(4):
        driver.step()
    driver.abort("short", "long")
    driver.run()
    for name in ("one", "block", "twin"):
        assert driver.tokens[name] == reference[name]
    assert driver.finished["long"].finish_reason is FinishReason.ABORT


def test_logit_bias_forces_a_token_and_min_tokens_forbids_it(backend: ModelBackend) -> None:
    driver = drive(backend)
    forced: dict[str, Any] = {"logit_bias": ((9, 1000.0),), "eos_token_ids": frozenset({9})}
    driver.add(
        make_request("ends at once", [1, 2], 6, **forced, **GREEDY),
        make_request("must wait", [1, 2], 6, min_tokens=3, **forced, **GREEDY),
    )
    driver.run()
    assert driver.tokens["ends at once"] == [9]
    waited = driver.tokens["must wait"]
    assert waited[3:] == [9]
    assert 9 not in waited[:3]


def test_logprobs_come_for_rows_that_ask(backend: ModelBackend) -> None:
    driver = drive(backend)
    driver.add(
        make_request("plain", [1, 2], 2, **GREEDY),
        make_request("asks", [1, 2], 2, logprobs=1, **GREEDY),
    )
    plan = driver.plan()
    _, result = driver._flying[0]
    by_row = dict(zip([row.request_id for row in plan.rows], result.logprobs, strict=True))
    assert by_row["plain"] is None
    (entry,) = by_row["asks"] or ()
    assert entry.logprob <= 0.0
    assert entry.rank == 1
    assert entry.top[0][0] == entry.token_id
    driver.settle()
    driver.run()
