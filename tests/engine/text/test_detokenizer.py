"""Text comes in whole characters, joins to ``decode`` of everything, and ends at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from paceline.engine.testing import ByteTokenizer
from paceline.engine.text.detokenizer import IncrementalDetokenizer, StopFound, StopStrings

# multi-byte pieces as a byte-level BPE has them: whole characters, halves, and borders inside
PIECES = (
    *(bytes((value,)) for value in range(256)),
    b" the",
    "\N{GRINNING FACE}".encode()[:3],
    "\N{GRINNING FACE}".encode()[2:],
    "\N{GRINNING FACE}".encode(),
    "\u4f60\u597d".encode(),
    "\u4f60\u597d".encode()[:4],
    "\u597d".encode()[1:] + b"!",
    b"x\xe4",
    b"",
)


class PieceTokenizer(ByteTokenizer):
    """Byte-level pieces; the last id is special and reads ``<|end|>``."""

    END = len(PIECES)
    decoded = 0

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({self.END})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == self.END else PIECES[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


class SentencePieceTokenizer(ByteTokenizer):
    """The decoder of Llama 2's tokenizer.json over a tiny vocabulary, run by ``tokenizers``."""

    def __init__(self) -> None:
        words = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
        words += ["▁Hello", "▁", "▁▁", "world", "▁world", "!", "好", "</s>"]
        self.words = words
        self.ids = {word: number for number, word in enumerate(words)}
        self._hf = HFTokenizer(models.WordLevel(self.ids, unk_token="<unk>"))
        self._hf.add_special_tokens(["</s>"])
        self._hf.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({self.ids["</s>"]})

    def token_bytes(self, token_id: int) -> bytes:
        if 1 <= token_id <= 256:
            return bytes((token_id - 1,))
        return self.words[token_id].replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str | None:
        """A first space goes, and bytes make characters together."""
        return None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def bytes_of(self, text: str) -> list[int]:
        return [value + 1 for value in text.encode()]


def deltas_of(tokenizer: Any, chunks: Sequence[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [list(ids[start:stop]) for start, stop in pairwise(borders)]


class TestDeltas:
    @given(
        ids=st.lists(st.integers(0, PieceTokenizer.END) | st.integers(0x80, 0xFF), max_size=60),
        cuts=st.lists(st.integers(0, 60), max_size=20),
        skip=st.booleans(),
    )
    def test_any_bytes_in_any_split_join_to_decode(
        self, ids: list[int], cuts: list[int], skip: bool
    ) -> None:
        tokenizer = PieceTokenizer()
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(deltas_of(tokenizer, chunked(ids, cuts), skip=skip)) == whole
        assert "".join(deltas_of(tokenizer, [[i] for i in ids], skip=skip)) == whole

    @given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 160), max_size=30))
    def test_well_formed_text_never_shows_half_a_character(
        self, text: str, cuts: list[int]
    ) -> None:
        tokenizer = ByteTokenizer()
        deltas = deltas_of(tokenizer, chunked(list(text.encode()), cuts))
        assert "".join(deltas) == text
        assert deltas[-1] == ""
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)

    def test_a_character_comes_with_its_last_byte(self) -> None:
        emoji = list("\N{GRINNING FACE}".encode())
        deltas = deltas_of(ByteTokenizer(), [[i] for i in (97, *emoji, 98)])
        assert deltas == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]

    def test_open_bytes_at_the_end_become_one_replacement(self) -> None:
        deltas = deltas_of(ByteTokenizer(), [[i] for i in (97, 0xF0, 0x9F, 0x98)])
        assert deltas == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]

    def test_special_ids_between_bytes_do_not_tear_a_character(self) -> None:
        data = "\u4f60".encode()
        ids = [data[0], PieceTokenizer.END, data[1], data[2], PieceTokenizer.END]
        assert deltas_of(PieceTokenizer(), [[i] for i in ids]) == ["", "", "", "\u4f60", "", ""]
        shown = deltas_of(PieceTokenizer(), [[PieceTokenizer.END], [97]], skip=False)
        assert shown == ["<|end|>", "a", ""]

    @pytest.mark.parametrize(
        "ids", [list(b"the quick brown fox " * 100), [0x80] * 2000, [0xE4] * 2000]
    )
    def test_the_work_per_id_does_not_grow(self, ids: list[int]) -> None:
        tokenizer = PieceTokenizer()
        text = "".join(deltas_of(tokenizer, [[i] for i in ids]))
        assert tokenizer.decoded < 20 * len(ids)
        assert text == tokenizer.decode(ids)


class TestSentencePiece:
    def test_spaces_survive_everywhere_but_at_the_start(self) -> None:
        tokenizer = SentencePieceTokenizer()
        end = tokenizer.ids["</s>"]
        words = ["▁Hello", "▁world", "!", "▁", "▁Hello", "▁▁", "world"] * 9
        ids = [token_id for word in words for token_id in (end, tokenizer.ids[word])]
        assert "".join(deltas_of(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)
        assert tokenizer.decode(ids).startswith("Hello world!  Hello  world Hello")

    def test_a_leading_space_is_dropped_once(self) -> None:
        tokenizer = SentencePieceTokenizer()
        ids = [tokenizer.ids["▁"], tokenizer.ids["▁Hello"]]
        assert deltas_of(tokenizer, [[i] for i in ids]) == ["", " Hello", ""]
        assert tokenizer.decode(ids) == " Hello"

    @given(
        st.lists(
            st.sampled_from(["▁Hello", "▁", "▁▁", "world", "▁world", "!", "好", "</s>"])
            | st.text(min_size=1, max_size=3),
            max_size=40,
        )
    )
    def test_words_and_byte_fallback_join_to_decode(self, parts: list[str]) -> None:
        tokenizer = SentencePieceTokenizer()
        ids: list[int] = []
        for part in parts:
            known = tokenizer.ids.get(part)
            ids += tokenizer.bytes_of(part) if known is None else [known]
        assert "".join(deltas_of(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids)


def run_stops(stops: Sequence[str], texts: Sequence[str], **kwargs: bool) -> tuple[str, str | None]:
    """All text delivered, and the stop string that ended it."""
    finder = StopStrings(stops, **kwargs)
    out = ""
    for text in texts:
        result = finder.push(text)
        if isinstance(result, StopFound):
            return out + result.text, result.stop
        out += result
    return out + finder.flush(), None


def first_stop(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """The rule, the slow way: the first to be complete, and of those the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


class TestStopStrings:
    @given(
        stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
        texts=st.lists(st.text("abc", max_size=6), max_size=12),
    )
    def test_any_split_gives_the_first_stop(self, stops: list[str], texts: list[str]) -> None:
        whole = "".join(texts)
        text, stop = first_stop(stops, whole)
        assert run_stops(stops, texts) == (text, stop)
        assert run_stops(stops, list(whole)) == (text, stop)
        kept = text + (stop or "")
        assert run_stops(stops, texts, include_in_output=True) == (kept, stop)

    def test_holds_back_only_what_may_be_a_stop(self) -> None:
        finder = StopStrings(["\n\nUser:", "END"])
        assert finder.push("one\n") == "one"
        assert finder.push("two") == "\ntwo"
        assert finder.push(" E") == " "
        assert finder.push("N") == ""
        assert finder.push("d") == "ENd"
        assert finder.push(" \n\nUser") == " "
        assert finder.push(": hi") == StopFound("", "\n\nUser:")

    def test_the_first_to_be_complete_wins(self) -> None:
        assert run_stops(["bcd", "c"], ["abcd"]) == ("ab", "c")
        assert run_stops(["b", "ab"], ["xab"]) == ("x", "ab")

    def test_ignored_while_stopping_is_not_allowed(self) -> None:
        finder = StopStrings(["ab"])
        assert finder.push("ab a", may_stop=False) == "ab "
        assert finder.push("b") == StopFound("", "ab")

    @given(
        stops=st.lists(st.text("ab*", min_size=1, max_size=4), min_size=1, max_size=3),
        text=st.text("abc*", max_size=12),
    )
    def test_tokens_that_are_left_out_count_where_a_stop_has_them(
        self, stops: list[str], text: str
    ) -> None:
        """``*`` is a token that is left out of the text."""
        hidden = {"*"} if any("*" in stop for stop in stops) else set()
        finder = StopStrings(stops, hidden=hidden)
        said, found = "", None
        for char in text:
            result = finder.push(finder.mark("*") if char == "*" else char)
            if isinstance(result, StopFound):
                said, found = said + result.text, result.stop
                break
            said += result
        said += "" if found is not None else finder.flush()
        wanted, stop = first_stop(stops, text if hidden else text.replace("*", ""))
        assert (said, found) == (wanted.replace("*", ""), stop)

    def test_a_token_that_is_left_out_may_be_spelt_out(self) -> None:
        stops, hidden = ["<end>now"], {"<end>"}
        finder = StopStrings(stops, hidden=hidden)
        assert finder.push("a<en") == "a"
        assert finder.push("d>no") == ""
        assert finder.push("w") == StopFound("", "<end>now")
        finder = StopStrings(stops, hidden=hidden, include_in_output=True)
        assert finder.push("a" + finder.mark("<end>")) == "a"
        assert finder.push("now!") == StopFound("<end>now", "<end>now")
        # one that no stop string has is not in the way
        assert finder.mark("<other>") == ""

    def test_long_stops_do_not_cost_more_per_character(self) -> None:
        # 20,000 characters that keep matching almost all of a long stop: naive search is quadratic
        finder = StopStrings(["a" * 20_000 + "b"])
        delivered = sum(len(str(finder.push("a"))) for _ in range(21_000))
        assert delivered == 1_000
        assert finder.flush() == "a" * 20_000
