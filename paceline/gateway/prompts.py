"""How long a prompt is, as far as its bytes tell: an estimate, and what is certain.

A token stands for four bytes until an engine has counted some, and then for as many as it does in
that model's prompts. Runs of blanks or of one sign are few tokens. Pictures, sounds and documents
say nothing of theirs: each engine has a rule of its own, so they are not counted at all. Certain is
little: that each word is about a token, wherever engines are sure to read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from paceline.gateway.kinds import is_vectors

__all__ = ["PROMPT_FIELDS", "BytesPerToken", "PromptSize", "least_tokens", "measure"]

# where the prompt of each API lies, in the order in which engines render it
PROMPT_FIELDS: Final = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "queries", "text_1",
    "data_1", "documents", "text_2", "data_2",
)  # fmt: skip
# bytes up to which no part of a prompt is looked at
_SMALL: Final = 2048
# of a picture, a sound or a document, at least
_SMALL_MEDIA: Final = 512
# as JSON has them: some write "/" with a backslash, and line breaks in the middle
_DATA_URL: Final = re.compile(rb"data:[\w.+-]+\\?/")
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/=_\\-]+")
# keys of text, whatever it looks like
_TEXT_KEYS: Final = frozenset(
    {b"content", b"text", b"prompt", b"input", b"query", b"instructions", b"system", b"arguments",
     b"output", b"thinking"}
)  # fmt: skip
# runs that tokenizers have tokens for, as JSON has them, and the share of one that is no token
_RUNS: Final = (
    b"        ", rb"\n\n\n\n", rb"\t\t\t\t", b"========", b"--------", b"________", b"********",
    b"########", b"........", b"~~~~~~~~",
)  # fmt: skip
_RUN_SHARE: Final = 0.9
_BYTES_PER_TOKEN: Final = 4.0
# what an engine says beyond these is of something else than the text
_LEAST_BYTES, _MOST_BYTES = 1.0, 8.0
# weight of what was known before in what is learned from one more prompt
_KEEP: Final = 0.95
_BEFORE: Final = 1000.0
# words that one token may stand for
_WORDS_PER_TOKEN: Final = 4
# fields of text that every engine renders, and of requests whose prompt an engine may cut
_RENDERED: Final = ("system", "instructions", "messages", "prompt", "input")
_CUT: Final = ("truncate_prompt_tokens", "truncation", "context_management", "transforms")
_TEXTS: Final = ("content", "text", "input", "prompt")
# roles that some templates leave out
_NOT_ALWAYS: Final = ("tool", "function")


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Of one request."""

    # bytes of JSON that are text
    text: float
    # tokens that the caller gave by their ids
    ids: int = 0
    # pictures, sounds and documents
    media: int = 0
    # share of it that the longest of several prompts has
    longest: float = 1.0


def measure(fields: Mapping[str, bytes]) -> PromptSize:
    """Of a body's fields, as JSON has them."""
    text, ids, media, longest = 0.0, 0, 0, 1.0
    for name in PROMPT_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        flat = value[:1] == b"[" and value[1:64].lstrip()[:1]
        if flat and (flat.isdigit() or flat == b"["):
            # ids of one prompt, or of several
            ids += value.count(b",") + 1
            longest = 1.0 / max(1, value.count(b"[") - 1)
        elif len(value) <= _SMALL:
            text += len(value)
        else:
            pieces = value.split(b'"')
            # completions read nothing but text
            is_flat = value[:1] == b'"' or flat == b'"'
            found = [] if name == "prompt" else list(_media(pieces, flat=is_flat))
            media += len(found)
            text += len(value) - sum(found) - _saved(value)
            if flat == b'"':
                longest = max(map(len, pieces)) / len(value)
    return PromptSize(text, ids, media, longest)


def _media(pieces: list[bytes], *, flat: bool) -> Iterator[int]:
    """Bytes of each string that is no text; ``pieces``: of JSON, cut at its quotes."""
    for index, piece in enumerate(pieces):
        if len(piece) < _SMALL_MEDIA:
            continue
        is_url = _DATA_URL.match(piece) is not None
        if not is_url and _BASE64.fullmatch(piece) is None:
            continue
        has_key = index > 1 and pieces[index - 1].strip() == b":"
        if not (pieces[index - 2] in _TEXT_KEYS if has_key else flat and not is_url):
            yield len(piece)


def _saved(value: bytes) -> float:
    """Bytes in runs, which are fewer tokens than other text."""
    return _RUN_SHARE * sum(len(run) * value.count(run) for run in _RUNS)


def least_tokens(path: str, fields: Mapping[str, bytes]) -> int:
    """Tokens that the longest prompt of a request certainly has, wherever it is read whole."""
    if is_vectors(path):
        return 0
    if any(fields.get(name, b"null") not in (b"null", b'"disabled"') for name in _CUT):
        return 0
    words = 0
    for name in _RENDERED:
        value = fields.get(name)
        if value is None:
            continue
        try:
            told = msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return 0
        if name == "prompt" and isinstance(told, list):
            # of several the longest; of ids all
            counts = [_ids_or_words(item) for item in told]
            is_ids = all(isinstance(item, int) for item in told)
            words += len(told) * _WORDS_PER_TOKEN if is_ids else max(counts, default=0)
        else:
            words += _words(told)
    return words // _WORDS_PER_TOKEN


def _ids_or_words(prompt: Any) -> int:
    return len(prompt) * _WORDS_PER_TOKEN if isinstance(prompt, list) else _words(prompt)


def _words(value: Any) -> int:
    """Of text that is part of a message, and no thought: templates leave those out."""
    if isinstance(value, str):
        return len(value.rpartition("</think>")[2].split())
    if isinstance(value, list):
        return sum(map(_words, value))
    if not isinstance(value, dict) or "reasoning" in str(value.get("type")):
        return 0
    if value.get("role") in _NOT_ALWAYS:
        return 0
    return sum(_words(value[name]) for name in _TEXTS if name in value)


class BytesPerToken:
    """What was learned of each model's prompts. Models are those of the configuration and of the
    engines."""

    def __init__(self) -> None:
        # by model: bytes, and the tokens that engines counted of them
        self._seen: dict[str, tuple[float, float]] = {}

    @property
    def models(self) -> Set[str]:
        """Of which something was learned."""
        return self._seen.keys()

    def of(self, model: str) -> float:
        text, tokens = self._seen.get(model, (_BYTES_PER_TOKEN, 1.0))
        return min(max(text / tokens, _LEAST_BYTES), _MOST_BYTES)

    def tokens(self, model: str, size: PromptSize) -> float:
        return size.text / self.of(model) + size.ids

    def learn(self, model: str, size: PromptSize, tokens: int) -> None:
        """An engine counted the prompt. One that is short is a template's more than its own, and
        what media are is each engine's rule."""
        if size.media or size.ids or size.text < _SMALL or not tokens:
            return
        text, before = self._seen.get(model, (_BEFORE * _BYTES_PER_TOKEN, _BEFORE))
        self._seen[model] = (_KEEP * text + size.text, _KEEP * before + tokens)
