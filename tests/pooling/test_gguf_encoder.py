"""A BERT as a GGUF file gives what its Hugging Face folder gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from paceline.checkpoints.gguf.encoder import open_gguf_encoder
from paceline.checkpoints.gguf.shards import read_gguf_parts
from paceline.cli.flags.settings import EngineSettings
from paceline.cli.wiring import build_core
from paceline.engine.text.tokenizer import load_tokenizer
from paceline.errors import CheckpointError, ConfigError
from tests.pooling.models import add_modules, assert_close, make_bert, open_llm, pool

PIECES: Final = [
    "[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox",
    "jump", "##s", "over", "dog", "##gy", "a", "b", "##c", "1", "##2", "!", ",", "e", "##t", "##e",
    "cafe", "\u4e2d", "[", "]",
]  # fmt: skip
TEXTS: Final = [
    "The quick brown FOX jumps over", "doggy, 12!", "caf\u00e9 ete \u4e2dfox", "zebra a", "[SEP] b",
    "[unused0] [x]", "",
]  # fmt: skip


def piece_tokenizer(pieces: list[str] = PIECES, *, lowercase: bool = True) -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 4), ("[CLS]", 3))
    return tokenizer


def as_gguf(piece: str) -> str:
    """As llama.cpp's converter writes them."""
    if piece.startswith("[") and piece.endswith("]"):
        return piece
    return piece[2:] if piece.startswith("##") else "\u2581" + piece


def write(
    folder: Path, path: Path, *, pooling: int | None = 1, kind: Q | None = None,
    change: dict[str, Any] | None = None, leave_out: str = "", pieces: list[str] = PIECES,
) -> Path:  # fmt: skip
    """The encoder of ``folder`` as a file."""
    writer = gguf.GGUFWriter(path, "bert")
    numbers = {
        "context_length": 66, "embedding_length": 32, "block_count": 2,
        "feed_forward_length": 48, "attention.head_count": 4,
    }  # fmt: skip
    for name, number in {**numbers, **(change or {})}.items():
        if number is not None:
            writer.add_uint32(f"bert.{name}", number)
    writer.add_float32("bert.attention.layer_norm_epsilon", 1e-12)
    writer.add_bool("bert.attention.causal", False)
    if pooling is not None:
        writer.add_uint32("bert.pooling_type", pooling)
    writer.add_string("tokenizer.ggml.model", "bert")
    writer.add_array("tokenizer.ggml.tokens", [as_gguf(piece) for piece in pieces])
    for name, token_id in (
        ("unknown", 2), ("cls", 3), ("seperator", 4), ("mask", 5), ("padding", 0),
    ):  # fmt: skip
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, 2)
    for name, value in load_file(folder / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None or "pooler" in name or stored == leave_out:
            continue
        if kind is not None and value.ndim == 2 and not value.shape[1] % 32 and "dense" in name:
            writer.add_tensor(stored, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_bert(tmp_path_factory.mktemp("bert"))
    piece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("kind", "mode"), [(1, "mean_tokens"), (2, "cls_token"), (3, "lasttoken"), (None, "cls_token")]
)
def test_vectors_are_those_of_the_folder(
    bert: Path, kind: int | None, mode: str, tmp_path: Path
) -> None:
    path = write(bert, tmp_path / "bert.gguf", pooling=kind)
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in bert.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    add_modules(folder, mode)
    prompts = [load_tokenizer(path).encode(text) for text in TEXTS]
    assert prompts == [load_tokenizer(folder).encode(text) for text in TEXTS]
    theirs = open_llm(folder)
    ours = open_llm(path)
    for found, expected in zip(pool(ours, prompts), pool(theirs, prompts), strict=True):
        assert not isinstance(expected, str)
        assert_close(found, expected)


def test_quantised_matrices_are_decoded(bert: Path, tmp_path: Path) -> None:
    path = write(bert, tmp_path / "bert.gguf", kind=Q.Q8_0)
    encoder = open_gguf_encoder(*read_gguf_parts(path))
    plain = load_file(bert / "model.safetensors")
    name = "encoder.layer.1.attention.output.dense.weight"
    decoded = gguf.quants.dequantize(gguf.quants.quantize(plain[name], Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(encoder.tensor(name), decoded)
    assert not np.array_equal(decoded, plain[name])


def test_capital_letters_in_the_vocabulary_stay_capital(bert: Path, tmp_path: Path) -> None:
    cased = [*PIECES, "The", "##S"]
    path = write(bert, tmp_path / "bert.gguf", pieces=cased)
    expected = piece_tokenizer(cased, lowercase=False)
    found = load_tokenizer(path)
    for text in (*TEXTS, "The foxS"):
        assert found.encode(text) == expected.encode(text).ids
    assert found.encode("The") != found.encode("the")
    pair = expected.encode("a fox", "the dog")
    assert found.encode_texts([("a fox", "the dog")]) == [(pair.ids, pair.type_ids.index(1))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"change": {"embedding_length": None}}, "bert.embedding_length is None"),
        ({"change": {"block_count": 3}}, r"encoder.layer.2.* is missing"),
        ({"change": {"feed_forward_length": 32}}, "intermediate.dense.weight has shape"),
        ({"leave_out": "position_embd.weight"}, "no matrix embeddings.position_embeddings.weight"),
        ({"leave_out": "blk.1.ffn_up.bias"}, "intermediate.dense.bias is missing"),
        ({"pooling": 4}, "bert.pooling_type=4 is not read"),
    ],
)
def test_files_that_are_no_encoder(
    bert: Path, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write(bert, tmp_path / "bert.gguf", **change)
    with pytest.raises(CheckpointError, match=said):
        build_core(EngineSettings.of(model_name="tiny", model_path=str(path), threads=1))


def test_it_generates_nothing(bert: Path, tmp_path: Path) -> None:
    path = write(bert, tmp_path / "bert.gguf")
    for settings, said in (
        ({"runner": "generate"}, "no head that predicts"),
        ({"convert": "classify"}, "Hugging Face folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_core(EngineSettings.of(model_name="tiny", model_path=str(path), **settings))
