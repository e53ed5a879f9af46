"""Vocabularies as converters leave them: ids that are none, doubled entries, ends of any type."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, models, pre_tokenizers

from paceline.checkpoints.model.fields import warn_once
from paceline.checkpoints.open import open_checkpoint
from paceline.engine.text.chat_template import ChatTemplate
from paceline.engine.text.detokenizer import IncrementalDetokenizer
from paceline.engine.text.special_tokens import turn_end
from paceline.engine.text.template_sandbox import RendersHere
from paceline.engine.text.tokenizer import HFTokenizer, load_tokenizer
from paceline.errors import CheckpointError
from tests.checkpoints.builders import llama_tensors, write_gguf

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Each test hears of its own files."""
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield caplog


def byte_level(*more: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary with more entries, texts and their types; the first of
    them is the end of sequence."""
    names = [*ALPHABET, "ab", *(text for text, _ in more)]
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": "gpt-2",
        f"{KEY}tokens": names,
        f"{KEY}token_type": [*[NORMAL] * (len(ALPHABET) + 1), *(kind for _, kind in more)],
        f"{KEY}merges": ["a b"],
        f"{KEY}eos_token_id": len(ALPHABET) + 1,
        **keys,
    }


def write(folder: Path, metadata: dict[str, Any]) -> Path:
    tensors = llama_tensors()
    rows = len(metadata[f"{KEY}tokens"])
    tensors["token_embd.weight"] = np.zeros((rows, 32), np.float32)
    return write_gguf(folder / "m.gguf", change=metadata, tensors=tensors)


def load(folder: Path, *more: tuple[str, int], **keys: Any) -> HFTokenizer:
    return load_tokenizer(write(folder, byte_level(*more, **keys)))


def ends(tokenizer: HFTokenizer) -> set[str]:
    return {tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.eos_token_ids}


@pytest.mark.parametrize("key", ["padding", "bos", "unknown", "eot", "eom", "mask"])
@pytest.mark.parametrize("token_id", [100_000, 2**32 - 1, -1])
def test_a_special_id_outside_the_vocabulary_counts_as_absent(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, key: str, token_id: int
) -> None:
    keys = {f"{KEY}{key}_token_id": token_id, f"{KEY}add_bos_token": True}
    path = write(tmp_path, byte_level(("<|endoftext|>", CONTROL), **keys))
    ours = load_tokenizer(path)
    assert ours.encode("ab") == ours.encode("ab", add_special_tokens=False)
    assert ends(ours) == {"<|endoftext|>"}
    config = open_checkpoint(path).config
    assert config.eos_token_ids == ours.eos_token_ids and config.bos_token_id is None
    told = [record.getMessage() for record in warnings.records]
    # a key that nothing reads needs no warning, and others need one, however many read them
    wanted = 0 if key == "mask" else 1
    assert sum(f"{key}_token_id is {token_id}, " in line for line in told) == wanted, told


def test_sentencepiece_without_an_unknown_id_that_is_one(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "\u2581", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata = {
        f"{KEY}model": "llama",
        f"{KEY}tokens": names,
        f"{KEY}scores": [0.0] * len(names),
        f"{KEY}token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, *[BYTE] * 256],
        f"{KEY}eos_token_id": 2,
        f"{KEY}unknown_token_id": 2**32 - 1,
    }
    ours = load_tokenizer(write(tmp_path, metadata))
    assert ours.decode(ours.encode("a é")) == "a é"


def test_an_end_of_sequence_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    keys = {f"{KEY}eos_token_id": 2**32 - 1}
    path = write(tmp_path, byte_level(("<|endoftext|>", CONTROL), **keys))
    with pytest.raises(CheckpointError, match=r"eos_token_id is 4294967295.*never end"):
        open_checkpoint(path)


def test_doubled_and_empty_entries(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    size = len(ALPHABET) + 1
    ours = load(
        tmp_path,
        ("<|end_of_text|>", CONTROL),
        ("<again>", USER_DEFINED),
        ("ab", NORMAL),
        ("", UNUSED),
        ("<again>", NORMAL),
        ("", UNUSED),
        ("<|end_of_text|>", NORMAL),
        ("last", USER_DEFINED),
    )
    assert ours.vocab_size == size + 8
    # the first one encodes
    assert ours.encode("ab<again>last<|end_of_text|>") == [size - 1, size + 1, size + 7, size]
    # all decode
    ids = [size + 2, size + 3, size + 4, size + 5, size + 7]
    assert ours.decode(ids) == "ab<again>last"
    assert b"".join(map(ours.token_bytes, ids)) == b"ab<again>last"
    assert "".join(map(str, map(ours.token_text, ids))) == "ab<again>last"
    assert [ours.vocabulary_token(i) for i in ids] == ["ab", "", "<again>", "", "last"]
    detokenizer = IncrementalDetokenizer(ours)
    assert "".join(detokenizer.push((i,)) for i in ids) == "ab<again>last"
    # both end an answer, and neither shows
    assert ours.eos_token_ids == ours.special_token_ids == {size, size + 6}
    assert ours.decode([size + 6]) == ""
    (told,) = [record.getMessage() for record in warnings.records]
    assert f"5 doubled or empty of {size + 8} entries" in told


def test_doubled_pieces_of_wordpiece(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581the", "re", "\u2581the", "", "\u2581end"]
    metadata = {
        f"{KEY}model": "bert",
        f"{KEY}tokens": pieces,
        f"{KEY}token_type": [CONTROL] * 4 + [NORMAL] * 5,
        f"{KEY}eos_token_id": 3,
        # by their texts
        f"{KEY}cls_token_id": 999,
        f"{KEY}seperator_token_id": -1,
        f"{KEY}unknown_token_id": 2**32 - 1,
    }
    ours = load_tokenizer(write(tmp_path, metadata))
    assert ours.encode("the there end nothing") == [2, 4, 4, 5, 8, 1, 3]
    assert ours.decode([6, 5, 7, 8]) == "there end"


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, CONTROL])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<turn|>"])
def test_known_ends_end_an_answer_whatever_their_type(tmp_path: Path, end: str, kind: int) -> None:
    more = [("<|stop|>", CONTROL), (end, kind), ("<|im_start|>", kind), ("<|other|>", kind)]
    ours = load(tmp_path, *more)
    assert ends(ours) == {"<|stop|>", end}
    # it is one token in a prompt, and in no text
    (token_id,) = ours.encode(end)
    assert ours.decode([token_id]) == ""
    shown = "" if kind == CONTROL else "<|other|>"
    assert ours.decode([token_id + 2]) == shown


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|over|>{% endfor %}", "<|over|>"),
        # the default message of the system ends as others do
        (
            "<|system|>Hi<|over|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n"
            "<|over|>\n{% endfor %}",
            "<|over|>",
        ),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content }} [DONE]{% endfor %}", "[DONE]"),
        # what begins the user's turn is what follows an answer
        ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}", "<|user|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|over|>", None),
        ("{{ raise_exception('no') }}<|over|>", None),
        ("{% for m in messages %}{{ m.content }}<|not a token|>{% endfor %}", None),
    ],
)
def test_what_a_template_ends_a_turn_with(template: str, end: str | None) -> None:
    made = ChatTemplate({"default": template}, {}, renderer=RendersHere(), callers=RendersHere())
    tokens = ("<|over|>", "<|user|>", "[DONE]", "<|stop|>")
    assert turn_end(partial(made.render, add_generation_prompt=False), tokens) == end


@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
def test_what_a_template_ends_a_turn_with_ends_an_answer(tmp_path: Path, kind: int) -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|over|>{% endfor %}"
    more = [("<|stop|>", CONTROL), ("<|over|>", kind), ("<|else|>", kind)]
    ours = load(tmp_path, *more, **{"tokenizer.chat_template": template})
    assert ends(ours) == {"<|stop|>", "<|over|>"}
    assert len(ours.encode("<|over|>")) == 1 and ours.decode(ours.encode("<|over|>")) == ""


HARMONY = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>")


@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
@pytest.mark.parametrize("first", ["<|endoftext|>", "<|return|>", "<|end|>"])
def test_a_message_of_gpt_oss_that_ends_is_no_answer_that_ends(
    tmp_path: Path, first: str, kind: int
) -> None:
    names = dict.fromkeys((first, *HARMONY, "<|endoftext|>"))
    ours = load(tmp_path, *((name, kind) for name in names))
    assert ends(ours) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    assert [len(ours.encode(mark)) for mark in HARMONY] == [1] * len(HARMONY)


def test_an_end_of_phi_ends_its_answers(tmp_path: Path) -> None:
    ours = load(tmp_path, ("<|endoftext|>", CONTROL), ("<|end|>", USER_DEFINED))
    assert ends(ours) == {"<|endoftext|>", "<|end|>"}


def write_folder(
    folder: Path, added: list[AddedToken], settings: dict[str, Any], **files: Any
) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_gpt_oss_in_a_folder_that_names_one_end(tmp_path: Path) -> None:
    marks = [AddedToken(mark, special=True, normalized=False) for mark in HARMONY]
    write_folder(tmp_path, marks, {"eos_token": "<|end|>"}, config={"eos_token_id": 256})
    assert ends(load_tokenizer(tmp_path)) == {"<|return|>", "<|call|>"}


TURN = {"content": "<turn>", "special": True}
CONFIGS: list[dict[str, Any]] = [
    {"added_tokens_decoder": {"256": TURN}},
    {"added_tokens_decoder": {"256": {**TURN, "special": False, "normalized": False}}},
    {"added_tokens_decoder": {"256": {**TURN, "lstrip": True, "rstrip": True}}},
    # with a place between that nothing has
    {"added_tokens_decoder": {"300": TURN}},
    {"added_tokens_decoder": {"257": TURN, "256": {"content": "<other>", "special": False}}},
    {"eos_token": "<turn>", "additional_special_tokens": ["<other>"]},
    {"eos_token": "<turn>", "added_tokens_decoder": {"256": {**TURN, "special": False}}},
]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_that_tokenizer_json_lacks_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], known: bool
) -> None:
    """``known``: tokenizer.json has it, as text."""
    added = [AddedToken("<turn>", normalized=False)] if known else []
    write_folder(tmp_path, added, config, config={"model_type": "llama", "vocab_size": 320})
    ours = load_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("a<turn>b", "<turn>", "x <turn> y<other>z"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
        hidden = [i for i in ids if i in ours.special_token_ids]
        assert ours.decode(hidden) == ""


def test_added_tokens_of_an_older_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, [], {"eos_token": "<turn>"}, added_tokens={"<turn>": 256, "<b>": 257})
    ours = load_tokenizer(tmp_path)
    assert ours.encode("<b><turn>") == [257, 256] and ours.eos_token_ids == {256}
    assert ours.decode([257, 256]) == "<b>"


def test_a_token_behind_the_model_s_vocabulary_is_none(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    listed = {"added_tokens_decoder": {"256": TURN}}
    write_folder(tmp_path, [], listed, config={"vocab_size": 256, "eos_token_id": [3, 256]})
    ours = load_tokenizer(tmp_path)
    assert len(ours.encode("<turn>")) == len("<turn>") and ours.eos_token_ids == {3}
    assert "'<turn>' the id 256, the vocabulary has 256 entries" in warnings.text


@pytest.mark.parametrize("listed", [[1], {"x": TURN}, {"256": 7}, {"-1": TURN}])
def test_added_tokens_that_are_none_are_refused(tmp_path: Path, listed: Any) -> None:
    write_folder(tmp_path, [], {"added_tokens_decoder": listed})
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(tmp_path)
