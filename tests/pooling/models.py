"""Tiny random models to pool, made by transformers with a tokenizer of bytes or of words, and what
transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core, build_tokenizer
from paceline.core.pooling import PoolingParams
from paceline.core.sampling_params import SamplingParams
from paceline.engine.llm import LLM
from paceline.engine.types import GenerationRequest

__all__ = [
    "WORDS", "add_modules", "assert_close", "hidden_states", "make_bert", "make_decoder",
    "make_roberta", "open_llm", "pool", "pooled_request",
]  # fmt: skip

WORDS = [
    "the", "a", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "what", "is", "capital",
    "of", "france", "paris", "berlin",
]  # fmt: skip
END = "<|endoftext|>"
HIDDEN = 32
_DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "vocab_size": 260,
    # a classifier in transformers looks at the last token that is no padding
    "pad_token_id": 257,
    "eos_token_id": 256,
    "bos_token_id": None,
}
_ENCODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "vocab_size": 40,
}


def _save(model: Any, folder: Path, tokenizer: Tokenizer) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and biases count too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one that ends a text, as Qwen3-Embedding's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, 256)]
            ),
        ]
    )
    return tokenizer


def word_tokenizer(*, roberta: bool = False) -> Tokenizer:
    """BERT's [CLS] a [SEP] b [SEP], or RoBERTa's <s> a </s></s> b </s>."""
    special = ["<s>", "<pad>", "</s>", "<unk>"] if roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate([*special, *WORDS])}
    unknown = "<unk>" if roberta else "[UNK]"
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = (
        processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        if roberta
        else processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    )
    return tokenizer


def make_decoder(
    folder: Path, kind: str = "Qwen3", ending: str = "Model", seed: int = 0, **changes: Any
) -> Path:
    """``ending``: "Model", "ForCausalLM" or "ForSequenceClassification"."""
    torch.manual_seed(seed)
    named = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{named}Config")(**{**_DECODER, **changes})
    kind = named if ending == "Model" else kind
    return _save(getattr(transformers, kind + ending)(config), folder, byte_tokenizer())


def make_bert(folder: Path, ending: str = "Model", seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**{**_ENCODER, **changes})
    return _save(getattr(transformers, f"Bert{ending}")(config), folder, word_tokenizer())


def make_roberta(folder: Path, ending: str = "Model", seed: int = 0, **changes: Any) -> Path:
    torch.manual_seed(seed)
    config = transformers.XLMRobertaConfig(
        **{**_ENCODER, "type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0,
           "eos_token_id": 2, **changes}
    )  # fmt: skip
    model = getattr(transformers, f"XLMRoberta{ending}")(config)
    return _save(model, folder, word_tokenizer(roberta=True))


def add_modules(
    folder: Path,
    pooling: str,
    *,
    normalize: bool = True,
    dense: Sequence[tuple[NDArray[np.float32], str]] = (),
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    max_seq_length: int | None = None,
) -> None:
    """sentence-transformers' files; ``pooling``: "lasttoken", "mean_tokens" or "cls_token"."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    _write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": HIDDEN, "include_prompt": True}
        | {f"pooling_mode_{mode}": mode == pooling for mode in modes},
    )
    for index, (weight, function) in enumerate(dense, 2):
        where = folder / f"{index}_Dense"
        _write(
            where / "config.json",
            {
                "in_features": weight.shape[1],
                "out_features": weight.shape[0],
                "bias": False,
                "activation_function": f"torch.nn.modules.activation.{function}",
            },
        )
        from safetensors.numpy import save_file

        save_file({"linear.weight": weight}, where / "model.safetensors")
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts or {}, "default_prompt_name": default_prompt},
    )
    if max_seq_length is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def hidden_states(folder: Path, prompt: Sequence[int]) -> NDArray[np.float32]:
    """Of one prompt, [tokens, hidden], by transformers."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([list(prompt)])).last_hidden_state[0]
    found: NDArray[np.float32] = states.numpy()
    return found


def logits(
    folder: Path, prompt: Sequence[int], kinds: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Of one prompt, [labels], by transformers' classifier."""
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32)
    more = {} if kinds is None else {"token_type_ids": torch.tensor([list(kinds)])}
    with torch.inference_mode():
        found: NDArray[np.float32] = model(torch.tensor([list(prompt)]), **more).logits[0].numpy()
    return found


def open_llm(folder: Path, **settings: Any) -> LLM:
    """In float32, on PyTorch unless said otherwise."""
    asked: dict[str, Any] = {"compute": "torch", "dtype": "float32", "threads": 1, "num_blocks": 64}
    engine = EngineSettings.of(model_name="tiny", model_path=str(folder), **{**asked, **settings})
    core, _ = build_core(engine)
    return LLM(core, build_tokenizer(engine))


def pooled_request(
    request_id: str, prompt: Sequence[int], *, priority: int = 0, **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=1, pooling=PoolingParams(**params)),
        arrival_time=0.0,
        detokenize=False,
        priority=priority,
    )


def pool(
    llm: LLM, prompts: Sequence[Sequence[int]], **params: Any
) -> list[NDArray[np.float32] | str]:
    """The vectors of prompts that run together, or why one failed."""
    outputs = llm.generate(
        [pooled_request(f"r{index}", prompt, **params) for index, prompt in enumerate(prompts)]
    )
    for output in outputs:
        assert output.num_output_tokens == 0 and output.finished
    return [
        str(output.choices[0].error)
        if output.pooled is None
        else np.frombuffer(output.pooled, dtype="<f4")
        for output in outputs
    ]


def assert_close(found: NDArray[np.float32] | str, expected: NDArray[np.float32]) -> None:
    """Equal within 1e-4 of the longer vector's length."""
    assert not isinstance(found, str), found
    assert found.shape == expected.shape
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-4, f"relative error {error:.2e}"
