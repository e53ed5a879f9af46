"""Every architecture against transformers, in float32, on tiny random models.

One forward pass of transformers over prompt and output gives the reference: its argmax at each
position must be the token we sampled there, its log-probabilities must be ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.backends.conftest import load
from tests.backends.plans import Plans, Tracked
from tests.backends.torch.models import ARCHITECTURES, VOCAB, save_model

PROMPTS = [
    [5],
    [(i * 37 + 11) % VOCAB for i in range(50)],
    [(i * 53 + 7) % VOCAB for i in range(23)],
]
LENGTH = 10
# without more, with windows, and with experts
DAILY = ("llama", "gemma3", "mixtral")
ASKS: dict[str, Any] = {"logprobs": 20}


def check(model: Any, sequence: Tracked) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([sequence.tokens])).logits[0]
    expected = logits.double().log_softmax(-1)
    for offset, (token, entry) in enumerate(
        zip(sequence.output, sequence.logprobs, strict=True), start=sequence.num_prompt_tokens - 1
    ):
        if sequence.sampling.temperature == 0.0:
            assert token == int(expected[offset].argmax())
            assert entry.rank == 1
        ids = torch.tensor([i for i, _ in entry.top])
        got = torch.tensor([value for _, value in entry.top], dtype=torch.float64)
        torch.testing.assert_close(got, expected[offset][ids], atol=2e-4, rtol=0)
        assert entry.token_id == token
        assert abs(entry.logprob - float(expected[offset][token])) < 2e-4


@pytest.mark.parametrize(
    "name",
    [
        # tests/backends/test_architectures.py compares the logits of all of them every day
        pytest.param(name, marks=() if name in DAILY else pytest.mark.thorough)
        for name in ARCHITECTURES
    ],
)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, name)
    # longrope and dynamic depend on the longest length served; up to their original length the
    # short factors and the plain frequencies are transformers'
    backend = load(tmp_path, max_model_len=64)
    plans = Plans(backend)
    whole = [plans.generate(prompt, LENGTH, **ASKS) for prompt in PROMPTS]
    for sequence in whole:
        check(model, sequence)
    for index, prompt in enumerate(PROMPTS):
        assert plans.generate(prompt, LENGTH, chunk=7, **ASKS).output == whole[index].output
        plans.add(str(index), prompt, **ASKS)
    plans.run(until=LENGTH, chunk=16)
    for index in range(len(PROMPTS)):
        assert plans.sequences[str(index)].output == whole[index].output
        check(model, plans.sequences[str(index)])
    # greedy random models repeat themselves; a sampled sequence visits other tokens
    varied = plans.generate(PROMPTS[2], 30, temperature=1.5, seed=3, **ASKS)
    check(model, varied)
    assert len(set(varied.output)) > 8
    backend.close()


@pytest.mark.parametrize(
    ("name", "positions"), [("llama-dynamic", 64), ("llama-longrope", 256), ("llama-yarn", 64)]
)
def test_beyond_the_original_length(name: str, positions: int, tmp_path: Path) -> None:
    """Served up to N tokens, a sequence of N is rotated as transformers rotates N at once."""
    model = save_model(tmp_path, name, max_position_embeddings=positions)
    backend = load(tmp_path, max_model_len=100)
    prompt = [(i * 37 + 11) % VOCAB for i in range(88)]
    sequence = Plans(backend).generate(prompt, 12, chunk=40, **ASKS)
    assert len(sequence.tokens) == 100
    check(model, sequence)
    # and the scaling matters: within the original length, frequencies are others
    short = load(tmp_path, max_model_len=64)
    if name != "llama-yarn":
        first = Plans(backend).generate(PROMPTS[1], 1, **ASKS).logprobs[0]
        other = Plans(short).generate(PROMPTS[1], 1, **ASKS).logprobs[0]
        assert first.top != other.top
    short.close()
    backend.close()


def test_sharded_and_stored_in_bfloat16(tmp_path: Path) -> None:
    model = save_model(tmp_path / "one", "qwen3")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    backend = load(tmp_path / "many")
    # read back: casting the model itself cast its rotary frequencies too
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32)
    check(model.eval(), Plans(backend).generate(PROMPTS[1], LENGTH, **ASKS))
    backend.close()
