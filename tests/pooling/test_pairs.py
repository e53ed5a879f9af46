"""Pairs of texts as ids, cut as ``tokenizers`` cuts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine.text.tokenizer import HFTokenizer, load_tokenizer
from paceline.errors import InvalidRequestError
from tests.pooling.models import make_bert, make_roberta, word_tokenizer

TEXTS = ["the quick brown fox jumps over the lazy dog", "what is the capital of france", "paris"]


@pytest.fixture(scope="module", params=[False, True], ids=["bert", "roberta"])
def tokenizers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HFTokenizer, bool]:
    make = make_roberta if request.param else make_bert
    folder: Path = make(tmp_path_factory.mktemp("model"))
    return load_tokenizer(folder), bool(request.param)


@pytest.mark.parametrize("length", [None, 3, 4, 6, 7, 9, 12, 15, 40])
def test_they_are_those_of_the_library(
    tokenizers: tuple[HFTokenizer, bool], length: int | None
) -> None:
    ours, roberta = tokenizers
    theirs = word_tokenizer(roberta=roberta)
    if length is not None:
        theirs.enable_truncation(length, strategy="longest_first")
    for first in TEXTS:
        alone = theirs.encode(first)
        assert ours.encode_texts([(first, None)], max_tokens=length) == [(alone.ids, None)]
        for second in TEXTS:
            # the library keeps no place for special tokens where there is none
            if length is None or length > 4:
                pair = theirs.encode(first, second)
                kind = pair.type_ids.index(1) if 1 in pair.type_ids else None
                assert ours.encode_texts([(first, second)], max_tokens=length) == [(pair.ids, kind)]


def test_the_second_text_alone_is_cut(tokenizers: tuple[HFTokenizer, bool]) -> None:
    ours, roberta = tokenizers
    theirs = word_tokenizer(roberta=roberta)
    ((found, _),) = ours.encode_texts([(TEXTS[0], TEXTS[1])], max_second=2)
    assert found == theirs.encode(TEXTS[0], "what is").ids
    ((plain, kind),) = ours.encode_texts([(TEXTS[0], TEXTS[2])], add_special_tokens=False)
    assert plain == theirs.encode(TEXTS[0], TEXTS[2], add_special_tokens=False).ids
    assert (kind is None) == roberta


@pytest.mark.parametrize("length", [None, 6])
def test_many_at_once_are_as_each_alone(
    tokenizers: tuple[HFTokenizer, bool], length: int | None
) -> None:
    ours, _ = tokenizers
    several = [(first, second) for first in TEXTS for second in (None, *TEXTS)]
    alone = [ours.encode_texts([pair], max_tokens=length)[0] for pair in several]
    assert ours.encode_texts(several, max_tokens=length) == alone
    with pytest.raises(InvalidRequestError, match="Unicode"):
        ours.encode_texts([*several, ("\ud800", None)], max_tokens=length)
