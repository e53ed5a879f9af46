"""Length of a prompt from its bytes: an estimate, and a certain lower bound.

A token counts as four bytes until an engine has counted some, then as many as in that model's
prompts so far. Runs of blanks or of one sign are few tokens. Images, audio and documents are not
counted at all, as each engine counts them by a rule of its own. Little is certain: that a word is
about a token, in text that every engine is sure to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final

import msgspec

from paceline.gateway.settings.engine_types import is_vectors

__all__ = [
    "PROMPT_FIELDS",
    "BytesPerToken",
    "PromptSize",
    "least_tokens",
    "measure",
    "prompt_fields",
]

# fields with the prompt in each API, in the order in which engines render them
PROMPT_FIELDS: Final = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "queries", "text_1",
    "data_1", "documents", "text_2", "data_2",
)  # fmt: skip
_PROMPT_FIELDS: Final = frozenset(PROMPT_FIELDS)
# bytes up to which a part of a prompt is not examined
_SMALL: Final = 2048
# smallest image, audio or document, bytes
_SMALL_MEDIA: Final = 512
# in the JSON encoding: some write "/" with a backslash, and line breaks within base64
_DATA_URL: Final = re.compile(rb"data:[\w.+-]+\\?/")
_BASE64: Final = re.compile(rb"[A-Za-z0-9+/=_\\-]+")
# JSON keys of text, even if it looks like base64
_TEXT_KEYS: Final = frozenset(
    {b"content", b"text", b"prompt", b"input", b"query", b"instructions", b"system", b"arguments",
     b"output", b"thinking"}
)  # fmt: skip
# runs that tokenizers have tokens for, JSON-encoded, and the share of a run's bytes not counted
_RUNS: Final = (
    b"        ", rb"\n\n\n\n", rb"\t\t\t\t", b"========", b"--------", b"________", b"********",
    b"########", b"........", b"~~~~~~~~",
)  # fmt: skip
_RUN_SHARE: Final = 0.9
_BYTES_PER_TOKEN: Final = 4.0
# bounds of bytes per token: a count beyond them is of something other than the text
_LEAST_BYTES, _MOST_BYTES = 1.0, 8.0
# weight of earlier prompts when a new one is learned
_KEEP: Final = 0.95
_BEFORE: Final = 1000.0
# words that one token may cover
_WORDS_PER_TOKEN: Final = 4
# text fields that every engine renders; fields by which a caller lets an engine truncate
_RENDERED: Final = ("system", "instructions", "messages", "prompt", "input")
_CUT: Final = ("truncate_prompt_tokens", "truncation", "context_management", "transforms")
_TEXTS: Final = ("content", "text", "input", "prompt")
# roles that some templates leave out
_NOT_ALWAYS: Final = ("tool", "function")


class PromptSize(msgspec.Struct, frozen=True):
    """Size of one request's prompt."""

    # bytes of JSON that are text
    text: float
    # tokens given as ids
    ids: int = 0
    # images, audio and documents
    media: int = 0
    # share of the longest prompt among several
    longest: float = 1.0


def prompt_fields(fields: Mapping[str, bytes]) -> list[str]:
    """Return the names of a body's fields with its prompt, in the order in which engines render
    them."""
    found = [name for name in fields if name in _PROMPT_FIELDS]
    # nearly all bodies have one
    return found if len(found) < 2 else [name for name in PROMPT_FIELDS if name in found]


def measure(fields: Mapping[str, bytes]) -> PromptSize:
    """Measure the prompt in a body's fields, which are bytes of JSON."""
    text, ids, media, longest = 0.0, 0, 0, 1.0
    for name in prompt_fields(fields):
        value = fields[name]
        flat = value[1:64].lstrip()[:1] if value[:1] == b"[" else b""
        if flat and flat in b"[0123456789":
            # ids of one prompt, or of several
            ids += value.count(b",") + 1
            longest = 1.0 / max(1, value.count(b"[") - 1)
        elif len(value) <= _SMALL:
            text += len(value)
        else:
            pieces = value.split(b'"')
            # completions only read text
            is_flat = value[:1] == b'"' or flat == b'"'
            found = [] if name == "prompt" else list(_media(pieces, flat=is_flat))
            media += len(found)
            text += len(value) - sum(found) - _saved(value)
            if flat == b'"':
                longest = max(map(len, pieces)) / len(value)
    return PromptSize(text, ids, media, longest)


def _media(pieces: list[bytes], *, flat: bool) -> Iterator[int]:
    """Yield the bytes of each string that is media; ``pieces``: JSON, split at its quotes."""
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
    """Return the bytes in runs that do not count, as runs are fewer tokens than other text."""
    return _RUN_SHARE * sum(len(run) * value.count(run) for run in _RUNS)


def least_tokens(path: str, fields: Mapping[str, bytes]) -> int:
    """Return tokens that the longest prompt certainly has, if it is not truncated."""
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
            # the longest of several prompts counts, and all of a list of ids
            counts = [_ids_or_words(item) for item in told]
            is_ids = all(isinstance(item, int) for item in told)
            words += len(told) * _WORDS_PER_TOKEN if is_ids else max(counts, default=0)
        else:
            words += _words(told)
    return words // _WORDS_PER_TOKEN


def _ids_or_words(prompt: Any) -> int:
    return len(prompt) * _WORDS_PER_TOKEN if isinstance(prompt, list) else _words(prompt)


def _words(value: Any) -> int:
    """Count the words of messages, without reasoning, which templates leave out."""
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
    """Bytes per token, learned by model; models are those of the configuration and of engines."""

    def __init__(self) -> None:
        # model -> bytes, and the tokens that engines counted in them
        self._seen: dict[str, tuple[float, float]] = {}
        # model -> the one by the other, within bounds
        self._ratios: dict[str, float] = {}

    @property
    def models(self) -> Set[str]:
        """Models that something was learned of."""
        return self._seen.keys()

    def of(self, model: str) -> float:
        return self._ratios.get(model, _BYTES_PER_TOKEN)

    def tokens(self, model: str, size: PromptSize) -> float:
        return size.text / self.of(model) + size.ids

    def learn(self, models: Iterable[str], size: PromptSize, tokens: int) -> None:
        """Learn from an engine's count, for each of a model's names. Short prompts are skipped, as
        the template dominates them, and so are those with media, which each engine counts in its
        own way."""
        if size.media or size.ids or size.text < _SMALL or not tokens:
            return
        for model in {*models} - {""}:
            text, before = self._seen.get(model, (_BEFORE * _BYTES_PER_TOKEN, _BEFORE))
            text, tokens_seen = _KEEP * text + size.text, _KEEP * before + tokens
            self._seen[model] = text, tokens_seen
            self._ratios[model] = min(max(text / tokens_seen, _LEAST_BYTES), _MOST_BYTES)
