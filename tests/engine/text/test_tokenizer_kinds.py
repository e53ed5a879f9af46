"""Every kind of tokenizer that a file can hold, on small ones trained here."""

from __future__ import annotations

import io
import json
import math
import random
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers

from paceline.checkpoints.gguf.tokenizer import SUPPORTED_PRE_TOKENIZERS, build_tokenizer
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.detokenizer import IncrementalDetokenizer
from paceline.engine.text.template_sandbox import RendersHere
from paceline.engine.text.tokenizer import HFTokenizer, load_tokenizer
from paceline.errors import CheckpointError, InvalidRequestError
from tests.checkpoints.builders import llama_tensors, write_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 2024, and 1234567 foxes JUMP.",
    "def main():\n    for i in range(10):\n        print(f'{i}: {i ** 2}')\n\n\nmain()\n",
    "Ein kleiner Test mit Umlauten: äöü ß, éèê, and 日本語の文章もある。 Привет мир!",
    "CamelCaseWords andSnake_case, HTTPServer's iPhone; WE'RE they've I'M  two  spaces   three",
] * 4

TEXTS = [
    "", " ", "  ", "\n", "\n\n", " \n \n  x", "a", " a", "Hello world", "Hello  world   !", "1",
    "12", "123", "1234", "12345 67", "a1b22c333", "x=1\r\n\r\ny=2", "it's IT'S we'Re don't",
    "''s 's", "CamelCase HTTPServer iPhone", "éè cafe\u0301 日本語", "😀 👨\u200d👩\u200d👧",
    "a/b//c\n//", "!!!\n\n", "...   ", "tab\t\ttab", "\u00a0nbsp\u00a0", "<s>", "</s> x",
    "<|end|>", "АБВгде", "สว\u0e31สด\u0e35", "trailing ", "under_score __x__",
]  # fmt: skip


def texts() -> list[str]:
    generator = random.Random(3)
    return TEXTS + ["".join(generator.choices(TEXTS, k=4)) for _ in range(120)]


# the published patterns, spelled out
PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
WHOLE_WORDS = ("llama-bpe", "tekken")
SPECIAL = ["<|begin|>", "<|end|>", "<|eot_id|>"]


def train_byte_level(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE with the words of a model family, as its tokenizer.json would be."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for it."""
    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


@pytest.mark.parametrize("skip", [True, False])
def test_ids_with_a_text_of_their_own_join_to_decode(skip: bool) -> None:
    backend = train_byte_level("gpt-2")
    backend.add_tokens([AddedToken("a b"), AddedToken("\u0120x"), AddedToken("\u4f60")])
    ours = HFTokenizer(
        backend, frozenset(), ChatTemplate({}, {}, renderer=RendersHere(), callers=RendersHere())
    )
    known = [i for i in range(ours.vocab_size) if ours.token_text(i) is not None]
    # all but parts of characters, and a token that reads otherwise than it is written
    assert len(known) > 0.5 * ours.vocab_size and backend.token_to_id("\u0120x") not in known
    assert (ours.token_text(ours.vocab_size), ours.token_text(-1)) == ("", None)
    generator = random.Random(7)
    for _ in range(300):
        ids = generator.choices(range(ours.vocab_size), k=30)
        detokenizer = IncrementalDetokenizer(ours, skip_special_tokens=skip)
        deltas = [detokenizer.push((i,)) for i in ids] + [detokenizer.finish()]
        assert "".join(deltas) == ours.decode(ids, skip_special_tokens=skip), ids


def load_gguf(folder: Path, metadata: dict[str, Any], arch: str = "llama") -> HFTokenizer:
    rows = len(metadata["tokenizer.ggml.tokens"])
    tensors = {**llama_tensors(), "token_embd.weight": np.zeros((rows, 32), np.float32)}
    return load_tokenizer(write_gguf(folder / "m.gguf", arch, change=metadata, tensors=tensors))


@pytest.mark.parametrize("pre", list(PATTERNS))
def test_byte_level_from_gguf_is_the_tokenizer_it_was_made_from(tmp_path: Path, pre: str) -> None:
    theirs = train_byte_level(pre)
    ours = load_gguf(tmp_path, byte_level_metadata(theirs, pre))
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids)
        if pre != "qwen2":
            assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.encode_batch(texts()) == [ours.encode(text) for text in texts()]
    assert ours.encode("<tool>x", add_special_tokens=False)[0] == theirs.token_to_id("<tool>")
    assert ours.decode([1, 0, 2]) == "" and ours.decode(ours.encode("<tool>")) == "<tool>"
    assert ours.eos_token_ids == {1, 2}
    assert ours.special_token_ids == {0, 1, 2}
    assert ours.render_chat([{"role": "user", "content": "x"}]) == "<|begin|>x"


def test_whether_text_starts_with_bos(tmp_path: Path) -> None:
    theirs = train_byte_level("qwen2")
    metadata = byte_level_metadata(theirs, "qwen2")

    def ends(pre: str, **flags: bool) -> tuple[bool, bool]:
        change = {f"tokenizer.ggml.add_{name}_token": value for name, value in flags.items()}
        ours = load_gguf(tmp_path, {**metadata, "tokenizer.ggml.pre": pre, **change})
        bare = ours.encode("x", add_special_tokens=False)
        full = ours.encode("x")
        assert full[full[0] == 0 : len(full) - (full[-1] == 1)] == bare
        return full[0] == 0, full[-1] == 1

    assert ends("qwen2") == (False, False)
    assert ends("llama-bpe") == (True, False)
    assert ends("llama-bpe", bos=False) == (False, False)
    assert ends("qwen2", bos=True) == (True, False)
    assert ends("qwen2", bos=True, eos=True) == (True, True)
    assert ends("qwen2", eos=True) == (False, True)


def test_names_of_one_family_mean_the_same() -> None:
    theirs = train_byte_level("llama-bpe")
    for name in ("llama3", "llama-v3", "falcon3"):
        ours = build_tokenizer(as_read(byte_level_metadata(theirs, name)))
        assert ours.encode("It's 12345", add_special_tokens=False).ids == (
            theirs.encode("It's 12345", add_special_tokens=False).ids
        )
    assert {"smollm", "llama-bpe", "qwen2", "default", "gpt-2"} <= set(SUPPORTED_PRE_TOKENIZERS)


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata as ``read_gguf`` gives it: numbers in arrays."""
    return {
        key: array("f" if isinstance(value[0], float) else "i", value)
        if isinstance(value, list) and not isinstance(value[0], str)
        else value
        for key, value in metadata.items()
    }


def train_sentencepiece(prefix: bool = True) -> tuple[Any, dict[str, Any]]:
    """A Llama-2-like SentencePiece model and the metadata the converter writes for it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    size = theirs.get_piece_size()
    types = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        for i in range(size)
    ]
    return theirs, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "tokenizer.ggml.unknown_token_id": theirs.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_gguf_is_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    theirs, metadata = train_sentencepiece(prefix)
    ours = load_gguf(tmp_path, metadata)
    assert ours.vocab_size == 420
    used: set[int] = set()
    for text in texts():
        if "<s>" in text or "</s>" in text:
            # SentencePiece never finds control pieces in text, Hugging Face tokenizers do
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), repr(text)
        assert ours.decode(ids) == theirs.decode(ids) == text
        whole = b"".join(map(ours.token_bytes, ids))
        assert whole == (f" {text}" if prefix and text else text).encode()
        used.update(ids)
    for special in (False, True):
        alone = [ours.encode(text, add_special_tokens=special) for text in texts()]
        assert ours.encode_batch(texts(), add_special_tokens=special) == alone
    # bytes were needed, and merged pieces too
    assert any(theirs.is_byte(i) for i in used) and max(used) > 300
    assert ours.encode("x")[0] == theirs.bos_id() == 1
    assert ours.encode("a</s>b", add_special_tokens=False).count(2) == 1
    assert ours.eos_token_ids == {2} and ours.special_token_ids == {0, 1, 2}
    assert ours.token_bytes(theirs.piece_to_id("<0x0A>")) == b"\n"
    assert ours.token_bytes(theirs.piece_to_id("<0xFF>")) == b"\xff"


def test_sentencepiece_time_grows_with_length_only(tmp_path: Path) -> None:
    _, metadata = train_sentencepiece()
    ours = load_gguf(tmp_path, metadata)
    for piece in ("</s>", "a", " ", "é", "ab "):
        start = time.perf_counter()
        ours.encode(piece * 20_000)
        assert time.perf_counter() - start < 3


MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("not supported; these are: gpt2, llama, bert", {"model": "t5"}),
    ("not supported; these are: gpt2, llama, bert", {"model": None}),
    ("holds no tokenizer", {"tokens": None}),
    ("holds no tokenizer", {"tokens": array("i", [1])}),
    ("pre 'strange' is not supported", {"pre": "strange"}),
    ("merges is missing", {"merges": None}),
    ("merges[0] is 'ab', not a pair", {"merges": ["ab"]}),
    ("do not fit the vocabulary", {"merges": ["qq zz"]}),
    ("token_type has 1 entries", {"token_type": array("i", [1])}),
    ("bos_token_id is 'x'", {"bos_token_id": "x"}),
]


@pytest.mark.parametrize(("message", "change"), MISTAKES)
def test_a_byte_level_vocabulary_that_lies_is_refused(message: str, change: dict[str, Any]) -> None:
    metadata = as_read(byte_level_metadata(train_byte_level("qwen2"), "qwen2"))
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer(metadata)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("scores is missing", {"scores": None}),
        ("scores has 2 entries", {"scores": array("f", [0, 0])}),
        ("token_type is missing", {"token_type": None}),
        ("scores[3] is nan", {"scores": array("f", [0, 0, 0, math.nan])}),
        ("a piece of 5000 characters", {"tokens": ["<unk>", "<s>", "</s>", "a" * 5000]}),
    ],
)
def test_a_sentencepiece_vocabulary_that_lies_is_refused(
    message: str, change: dict[str, Any]
) -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a"],
        "tokenizer.ggml.scores": array("f", [0] * 4),
        "tokenizer.ggml.token_type": array("i", [2, 3, 3, 1]),
    }
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError) as caught:
        build_tokenizer(metadata)
    assert message in str(caught.value)


def write_folder(folder: Path, pre: str = "llama-bpe", **config: Any) -> tokenizers.Tokenizer:
    """A Hugging Face folder, as far as a tokenizer needs one."""
    tokenizer = train_byte_level(pre)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<|begin|>", "$A"], pair=None, special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def test_a_folder(tmp_path: Path) -> None:
    theirs = write_folder(
        tmp_path,
        bos_token={"content": "<|begin|>", "lstrip": False},
        eos_token="<|end|>",
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    )
    theirs.no_truncation()
    theirs.no_padding()
    ours = load_tokenizer(tmp_path)
    for text in texts():
        # neither cut to 5 nor filled up to 50, whatever the file asks for
        assert ours.encode(text) == theirs.encode(text).ids
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert b"".join(map(ours.token_bytes, ids)) == text.encode()
    assert ours.encode("x")[0] == 0
    assert ours.eos_token_ids == {1} and ours.special_token_ids == {0, 1, 2}
    assert ours.render_chat([{"role": "user", "content": "x"}]) == "<|begin|>x<|end|>"


def test_end_of_sequence_ids_of_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, eos_token="<|end|>")
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 8]}')
    assert load_tokenizer(tmp_path).eos_token_ids == {1, 2, 7, 8}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is 'x'"):
        load_tokenizer(tmp_path)


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template="{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|eot_id|>"}}')
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_ids == {2}
    assert ours.render_chat([]) == "<|eot_id|>"


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    def rendered(**options: Any) -> str:
        return load_tokenizer(tmp_path).render_chat([], **options)

    write_folder(tmp_path)
    assert load_tokenizer(tmp_path).chat_template_source is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        rendered()
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
    write_folder(tmp_path, chat_template=named)
    assert rendered() == "list"
    assert rendered(tools=[{"type": "function"}]) == "tools"
    write_folder(tmp_path, chat_template="config")
    assert rendered() == rendered(tools=[{}]) == "config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert rendered() == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert (rendered(), rendered(tools=[{}])) == ("jinja", "more")
    assert rendered(chat_template="request") == "request"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match="cannot read"):
        rendered()
    (tmp_path / "chat_template.jinja").write_text("x" * (1 << 21))
    with pytest.raises(CheckpointError, match="at most 1048576 are read"):
        rendered()


def test_folders_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    for content in ("", "{}", "[]", '{"model": {"type": "BPE"}}', "\x00"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match="is not a tokenizer"):
            load_tokenizer(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must be an object"):
        load_tokenizer(tmp_path)


def test_byte_fallback_in_a_folder(tmp_path: Path) -> None:
    theirs, metadata = train_sentencepiece()
    build_tokenizer(as_read(metadata)).save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    text = "café 😀\n"
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text)
    assert b"".join(map(ours.token_bytes, ids)) == f" {text}".encode()
