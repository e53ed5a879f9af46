"""Conversion of ids to text, a few at a time: never half a character, never past a stop string.

::

    ids --> IncrementalDetokenizer --> text deltas --> StopStrings --> text to deliver

There is one of each per choice, with a bounded amount of state. Neither knows requests or finish
reasons; ``output_processor`` does.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from paceline.engine.protocol import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopFound", "StopStrings"]

# number of ids decoded together before the window moves on
_WINDOW: Final = 12


class IncrementalDetokenizer:
    """Text of a growing id sequence; all deltas joined are ``Tokenizer.decode`` of all ids.

    The text is ``decode`` of a short window, because decoders do not simply concatenate
    (SentencePiece drops the first space). ``token_bytes`` tells where it may be cut: before an id
    whose first byte starts a UTF-8 sequence, and wherever no sequence is open.

    ::

        window    [ context | ids since | ids of an open character ]
                  ^ starts a character  ^ _cut: text up to here is delivered

    The work per id is constant: the window is never longer than ``_WINDOW`` plus one push. Ids
    whose text depends on no neighbour (``token_text``) skip the window while no character is open:
    with such a tokenizer, the window is context for no id.

    One deviation: a decoder with byte fallback turns a whole run of byte tokens into U+FFFD when
    any part of the run is malformed. Well-formed characters at the start of such a run have been
    delivered by then, and stay.
    """

    __slots__ = (
        "_before_cut",
        "_cut",
        "_delivered",
        "_skip",
        "_text_of",
        "_tokenizer",
        "_utf8",
        "_window",
    )

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._text_of = tokenizer.token_text
        self._skip = tokenizer.special_token_ids if skip_special_tokens else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._cut = 0
        # a smaller cut, at which the next window may begin
        self._before_cut = 0
        # characters of decode(window[:_cut])
        self._delivered = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text they complete, possibly none."""
        window = self._window
        if self._cut == len(window):
            # most ids arrive one by one
            if len(token_ids) == 1:
                (token_id,) = token_ids
                if self._skip is not None and token_id in self._skip:
                    return ""
                text = self._text_of(token_id)
            else:
                text = self._plain(token_ids)
            if text is not None:
                return text
        old_cut = self._cut
        for token_id in token_ids:
            # decoders drop special ids before they look at neighbours: these are no context
            if self._skip is not None and token_id in self._skip:
                continue
            data = self._tokenizer.token_bytes(token_id)
            if data and data[0] & 0xC0 != 0x80:
                self._cut_at(len(window))
            window.append(token_id)
            self._utf8.decode(data)
            if not self._utf8.getstate()[0]:
                self._cut_at(len(window))
        if self._cut == old_cut:
            return ""
        text = self._decode(window[: self._cut])
        delta = text[self._delivered :]
        if self._cut < _WINDOW:
            self._delivered = len(text)
        else:
            del window[: self._before_cut]
            self._cut -= self._before_cut
            self._before_cut = 0
            self._delivered = len(self._decode(window[: self._cut]))
        return delta

    def finish(self) -> str:
        """Return the rest of the text, after which nothing may be pushed: bytes of an incomplete
        character become U+FFFD."""
        if self._cut == len(self._window):
            return ""
        return self._decode(self._window)[self._delivered :]

    def _plain(self, token_ids: Sequence[int]) -> str | None:
        """Return the ids' own text; None if one of them has none."""
        texts = []
        for token_id in token_ids:
            if self._skip is not None and token_id in self._skip:
                continue
            text = self._text_of(token_id)
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)

    def _cut_at(self, index: int) -> None:
        if index > self._cut:
            self._before_cut, self._cut = self._cut, index

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip is not None)


class StopFound(NamedTuple):
    """A stop string ended the text."""

    # text to deliver before, or with, the stop string
    text: str
    stop: str


class StopStrings:
    """Finds the first stop string in a stream of text, however the stream is split.

    Only text that may be the start of a stop string is held back. The stop string that is complete
    first wins; of several complete at the same character, the longest.

    Special tokens left out of the text are still matched: ``mark`` gives a character that
    represents one in the stream, and is in no text that is returned.

    One Knuth-Morris-Pratt automaton per stop string, so the work per character is constant for any
    stop strings.

    Args:
        hidden: texts of special tokens that are in stop strings, but left out of the text.
    """

    __slots__ = ("_drop", "_held", "_include", "_marks", "_matched", "_patterns", "_tables")

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include_in_output: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        # halves of surrogate pairs are in no text that a tokenizer makes
        free = (
            char for char in map(chr, range(0xD800, 0xE000)) if not any(char in s for s in stops)
        )
        self._marks = dict(zip(sorted(hidden, key=len, reverse=True), free, strict=False))
        self._drop = {ord(mark): None for mark in self._marks.values()}
        # a pattern and the stop string that it represents, which may also occur spelt out
        patterns = {(stop, stop) for stop in stops} | {(self._marked(s), s) for s in stops}
        # longest first: ties go to the longest
        self._patterns = tuple(sorted(patterns, key=lambda pattern: len(pattern[1]), reverse=True))
        self._tables = tuple(_borders(pattern) for pattern, _ in self._patterns)
        # characters of each pattern that the text so far ends with
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self._include = include_in_output

    def mark(self, text: str) -> str:
        """Return the text to push for a special token that is left out; "" if no stop string has
        it."""
        return self._marks.get(text, "")

    def push(self, text: str, *, may_stop: bool = True) -> str | StopFound:
        """Take the next text; return what can be delivered.

        Args:
            may_stop: False ignores stop strings that end within ``text``.
        """
        end = len(text) + 1
        found: tuple[str, str] | None = None
        for number, pattern in enumerate(self._patterns):
            position = self._scan(number, pattern[0], text, may_stop)
            if position is not None and position < end:
                end, found = position, pattern
        buffered = self._held + text
        if found is not None:
            before = self._visible(buffered[: len(self._held) + end - len(found[0])])
            self._held = ""
            return StopFound(before + found[1] if self._include else before, found[1])
        keep = len(buffered) - max(self._matched, default=0)
        self._held = buffered[keep:]
        return self._visible(buffered[:keep])

    def flush(self) -> str:
        """Return the text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return self._visible(held)

    def _marked(self, stop: str) -> str:
        for text, mark in self._marks.items():
            stop = stop.replace(text, mark)
        return stop

    def _visible(self, text: str) -> str:
        return text.translate(self._drop) if self._drop else text

    def _scan(self, number: int, stop: str, text: str, may_stop: bool) -> int | None:
        """Advance one automaton; return the index in ``text`` just after a complete stop string."""
        matched = self._matched[number]
        borders = self._tables[number]
        position = 0
        size = len(text)
        while position < size:
            if matched == 0:
                position = text.find(stop[0], position)
                if position < 0:
                    break
            while matched and stop[matched] != text[position]:
                matched = borders[matched - 1]
            if stop[matched] == text[position]:
                matched += 1
            position += 1
            if matched == len(stop):
                if may_stop:
                    return position
                matched = borders[matched - 1]
        self._matched[number] = matched
        return None


def _borders(pattern: str) -> list[int]:
    """Return, for every prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
