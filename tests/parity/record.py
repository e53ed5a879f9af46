"""Writes chosen.json: what the default model says after each prompt, if transformers would too."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.batching import load_transformers
from paceline.checkpoints.hub.resolve import find_local
from paceline.engine.text.tokenizer import load_tokenizer
from tests.parity.prompts import PROMPTS
from tests.parity.test_smollm2 import NUM_TOKENS, chosen_after, generate, load


def main() -> None:
    path = find_local("smollm2-135m")
    assert path is not None, "the default model is not here: run `make model`"
    tokenizer = load_tokenizer(path)
    prompts = {f"p{index}": tokenizer.encode(text) for index, text in enumerate(PROMPTS)}
    backend = load(path, None)
    ours, _ = generate(backend, prompts, NUM_TOKENS)
    backend.close()
    model = load_transformers(path, "float32")
    with torch.inference_mode():
        for name, tokens in ours.items():
            assert chosen_after(model, prompts[name], tokens) == tokens, f"{name} differs"
    rows = ",\n".join(f'"{name}": {json.dumps(tokens)}' for name, tokens in ours.items())
    Path(__file__).with_name("chosen.json").write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
