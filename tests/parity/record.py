"""Writes chosen.json: what the default model says after each prompt, if transformers would too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.hub.resolve import find_local
from paceline.engine.text.tokenizer import load_tokenizer
from tests.parity.prompts import PROMPTS
from tests.parity.test_smollm2 import NUM_TOKENS, chosen_after, generate, load


def load_transformers(path: Path, dtype: str) -> Any:
    """Load the same weights in transformers, by its own GGUF loader.

    ``from_pretrained(gguf_file=...)`` is not used, as it needs one more package.
    """
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    # the output head is the embedding
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model.eval()


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
