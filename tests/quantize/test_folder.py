"""Folders of safetensors: what is written of them is read back as the folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import processors

from paceline.backends.runner.rope import rotary_tables
from paceline.checkpoints.gguf.checkpoint import open_gguf
from paceline.checkpoints.gguf.container import GGUFType
from paceline.checkpoints.gguf.sampling import sampling_keys
from paceline.checkpoints.gguf.tokenizer import build_tokenizer
from paceline.checkpoints.hf.checkpoint import HFCheckpoint, open_folder
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.errors import ConfigError
from paceline.quantize.folder import FolderSource
from paceline.quantize.layers import RoundedTensor
from paceline.quantize.output import GGUFOutput, matrices_of
from paceline.quantize.quantize import quantize
from paceline.quantize.rounding import as_blocks, levels_of, round_nearest
from tests.backends.torch.models import save_model
from tests.engine.text.test_tokenizer_kinds import (
    PATTERNS,
    as_read,
    texts,
    train_byte_level,
    train_sentencepiece,
)

KIND = GGUFType.Q5_1
# whole blocks of 32 weights, and more rows than the tokenizers have tokens
SIZES = {"hidden_size": 96, "intermediate_size": 128, "vocab_size": 424}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"norm_topk_prob": True, "moe_intermediate_size": 64},
}
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def write_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<|begin|>", "$A"], pair=None, special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def folder_of(path: Path, name: str = "llama", pre: str = "llama-bpe", **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_model(path, name, **SIZES, **CHANGES.get(name, {}), **changes)
    write_tokenizer(path, train_byte_level(pre))
    return path


def written(folder: Path) -> Path:
    """Write a folder's file, each matrix rounded by itself."""
    checkpoint = open_folder(folder)
    assert isinstance(checkpoint, HFCheckpoint)

    def rounded(name: str) -> RoundedTensor:
        weight = torch.from_numpy(checkpoint.tensor(name))
        return RoundedTensor(KIND, as_blocks(round_nearest(weight, levels_of(KIND)), KIND))

    target = folder.with_suffix(".gguf")
    GGUFOutput(FolderSource(checkpoint), dict.fromkeys(matrices_of(checkpoint), KIND)).write(
        target, rounded
    )
    return target


@pytest.mark.parametrize(
    "name",
    [
        "llama-llama3", "llama-biases", "llama-yarn", "mistral", "mixtral", "olmo2", "qwen2",
        "qwen3", "qwen3-moe", "smollm3", "granite-biases",
    ],
)  # fmt: skip
def test_every_tensor_and_the_config(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path / "model", name)
    before, after = open_folder(folder), open_gguf(written(folder))
    assert set(after.tensor_names()) == set(before.tensor_names())
    for tensor in before.tensor_names():
        values, found = before.tensor(tensor), after.tensor(tensor)
        if after.tensor_type(tensor) == "F32":
            assert np.array_equal(found, values), tensor
        else:
            # half a step of a group at most, and what float16 cuts off scale and minimum
            steps = np.ptp(values.reshape(-1, 32), 1, keepdims=True) / levels_of(KIND)
            assert (np.abs(found - values).reshape(-1, 32) <= 0.6 * steps).all(), tensor
    one, other = asdict(before.config), asdict(after.config)
    differing = {key for key in one if one[key] != other[key]}
    # a file of Mistral's is one of Llama, and end and start are the tokenizer's
    assert differing <= {"model_type", "rope", "stored_dtype", "eos_token_ids", "bos_token_id",
                         "rms_norm_eps", "attention_scale"}  # fmt: skip
    for one, other in zip(
        rotary_tables(before.config, 64), rotary_tables(after.config, 64), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pre", list(PATTERNS))
def test_the_tokenizer_and_its_template(tmp_path: Path, pre: str) -> None:
    folder = folder_of(tmp_path / "model", pre=pre)
    before, after = load_tokenizer(folder), load_tokenizer(written(folder))
    for text in texts():
        ids = before.encode(text)
        assert after.encode(text) == ids, repr(text)
        assert after.decode(ids) == before.decode(ids)
    assert after.encode("<tool>x") == before.encode("<tool>x")
    assert before.eos_token_ids <= after.eos_token_ids
    assert after.special_token_ids == before.special_token_ids
    chat = [{"role": "user", "content": "x"}]
    assert after.render_chat(chat) == before.render_chat(chat) == "<|begin|>x<|end|>"
    if pre == "gpt-2":
        # rows of the embedding without a token
        assert after.vocab_size == SIZES["vocab_size"] > before.vocab_size


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    folder = folder_of(tmp_path / "model")
    theirs, metadata = train_sentencepiece(prefix)
    build_tokenizer(as_read(metadata)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    after = load_tokenizer(written(folder))
    for text in texts():
        if "<s>" not in text and "</s>" not in text:
            assert after.encode(text, add_special_tokens=False) == theirs.encode(text), repr(text)
    assert after.encode("x")[0] == theirs.bos_id()


def test_named_templates_and_sampling_defaults(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools }}")
    defaults = {
        "temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
    }  # fmt: skip
    more_of = {**defaults, "eos_token_id": [2, 1]}
    (folder / "generation_config.json").write_text(json.dumps(more_of))
    file = written(folder)
    metadata = open_gguf(file).metadata
    assert metadata["tokenizer.chat_template"] == TEMPLATE
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    assert sampling_keys(file) == pytest.approx(defaults)
    assert metadata["tokenizer.ggml.eos_token_id"] == 1
    assert metadata["tokenizer.ggml.eot_token_id"] == 2


def test_a_folder_is_quantized_as_its_file(tmp_path: Path) -> None:
    """The file of the same model gives the same blocks."""
    folder = folder_of(tmp_path / "model", num_hidden_layers=2)
    windows = torch.from_numpy(np.random.default_rng(5).integers(0, 400, (3, 24)))
    done = quantize(folder, tmp_path / "q4.gguf", windows)
    assert done.bytes_after < done.bytes_before
    # a result inside the folder is no part of the model
    shutil.copy(tmp_path / "q4.gguf", folder)
    assert quantize(folder, folder / "q4.gguf", windows).bytes_before == done.bytes_before
    assert (folder / "q4.gguf").read_bytes() == (tmp_path / "q4.gguf").read_bytes()
    exact = tmp_path / "exact.gguf"
    source = FolderSource(open_folder(folder))
    writer = gguf.GGUFWriter(exact, source.architecture)
    for field in source.fields():
        writer.add_key_value(field.name, field.value, field.kind, sub_type=field.inner)
    for tensor in source.tensors():
        writer.add_tensor(tensor.name, source.stored_bytes(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantize(exact, tmp_path / "again.gguf", windows)
    one, other = open_gguf(tmp_path / "q4.gguf"), open_gguf(tmp_path / "again.gguf")
    for name in one.tensor_names():
        assert np.array_equal(one.tensor(name), other.tensor(name))


def unknown_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    text["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\\p{L}{1,2}|.|\\s"
    path.write_text(json.dumps(text))


def too_many_tokens(folder: Path) -> None:
    tokenizer = train_byte_level("gpt-2")
    tokenizer.add_tokens([f"<{index}>" for index in range(9)])
    tokenizer.save(str(folder / "tokenizer.json"))


def another_kind(folder: Path) -> None:
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    text["model"] = {"type": "WordLevel", "vocab": {"<|end|>": 1}, "unk_token": "<|end|>"}
    path.write_text(json.dumps(text))


def no_merges(folder: Path) -> None:
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    text["model"]["merges"] = []
    path.write_text(json.dumps(text))


def takes_spaces(folder: Path) -> None:
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    text["added_tokens"][3]["lstrip"] = True
    path.write_text(json.dumps(text))


def many_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5, 6, 7]}')


@pytest.mark.parametrize(
    ("name", "changes", "broken", "message"),
    [
        ("gemma2", {}, None, r"a folder of gemma2 cannot be written as GGUF, only granite, llama"),
        ("llama-dynamic", {}, None, r"does not hold its rotary embedding of type dynamic"),
        ("qwen3-moe-some-dense", {}, None, r"no key for dense_layers=\(0, 2, 3, 4\) of "),
        ("llama", {}, unknown_words, r"has other ids under each of the 8 ways to split words"),
        ("llama", {}, too_many_tokens, r"it has an id 429, the embedding has 424 rows"),
        ("llama", {}, takes_spaces, r"text next to its token '<tool>' has other ids"),
        ("llama", {}, many_ends, r"5 tokens end an answer, and a file can name 3 of them: not '"),
        ("llama", {}, another_kind, r"its kind is 'WordLevel', only BPE is written"),
        ("llama", {}, no_merges, r"cannot be written as GGUF: it has no merges"),
    ],
)  # fmt: skip
def test_refused_before_the_work(
    tmp_path: Path, name: str, changes: dict[str, Any], broken: Any, message: str
) -> None:
    folder = folder_of(tmp_path / "model", name, **changes)
    if broken is not None:
        broken(folder)
    windows = torch.zeros(1, 24, dtype=torch.int64)
    with pytest.raises(ConfigError, match=message):
        quantize(folder, tmp_path / "q4.gguf", windows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
