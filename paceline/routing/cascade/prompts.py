"""Signals of a prompt alone: hashed n-grams of its letters and words, and its form.

The hash is written out here, so that weights fitted on one machine hold on every other.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORM", "NUM_BUCKETS", "form_of", "ngrams_of"]

NUM_BUCKETS: Final = 4096
# characters of a prompt that are read: its beginning and its end, where the question stands
_HEAD, _TAIL = 128, 384
_LENGTHS: Final = (3, 4, 5)
_BASE: Final = 0x01000193
_MOD: Final = 1 << 32
# what the letter before a gram is multiplied by, for grams of 2 letters and more
_POWERS: Final = np.array([[pow(_BASE, n, _MOD)] for n in range(1, max(_LENGTHS))], np.uint32)
# n B^n, which a gram of n letters has besides them, and what one of n - 1 lacks of that
_ADDED: Final = [n * pow(_BASE, n, _MOD) if n in _LENGTHS else 0 for n in range(max(_LENGTHS) + 1)]
_STEPS: Final = np.array([[(b - a) % _MOD] for a, b in pairwise(_ADDED[1:])], np.uint32)
# spreads the low bits, of which a bucket is made
_SPREAD: Final = np.array(0x9E3779B1, np.uint32)
# of a hash: where its bucket begins, the bits of that, and where the sign is
_BUCKET: Final = np.array(19, np.uint32)
_BUCKETS: Final = np.array(NUM_BUCKETS - 1, np.uint32)
_SIGN: Final = np.array(31, np.uint32)
_SIGNS: Final = np.array((-1.0, 1.0))
_WORD: Final = re.compile(rb"[a-z0-9]+|[^\sa-z0-9]")
# digits, operators, upper case and not ASCII
_CLASSES: Final = (
    b"0123456789", b"-+*/=<>^%", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", bytes(range(128, 256)),
)  # fmt: skip
_CODE: Final = ("```", "def ", "return ", "();", "{\n")
# names of what ``form_of`` returns, in order
FORM: Final = (
    "log_length", "log_lines", "digits", "operators", "upper", "not_ascii", "questions", "code",
    "json", "log_turns", "tools", "wants_json",
)  # fmt: skip


def ngrams_of(text: str) -> NDArray[np.float32]:
    """Return signed counts of a text's n-grams by bucket, as a vector of length 1 (0 for a text
    without any)."""
    data = _shown(text).lower().encode("utf-8", "replace")
    words = _WORD.findall(data)
    singles = [*map(crc32, words)]
    # a pair's goes on from its first word's; no word has white space
    pairs = map(crc32, b"\n ".join(words).split(b"\n")[1:], singles)
    told = np.array([*singles, *pairs], np.uint32)
    hashes = np.concatenate((*_grams_of(data), told)) * _SPREAD
    if not hashes.size:
        return np.zeros(NUM_BUCKETS, np.float32)
    signs = _SIGNS.take(hashes >> _SIGN)
    counts = np.bincount((hashes >> _BUCKET) & _BUCKETS, signs, NUM_BUCKETS)
    norm = math.sqrt(float(counts.dot(counts))) or 1.0
    return (counts / norm).astype(np.float32)


def _grams_of(data: bytes) -> list[NDArray[np.uint32]]:
    """Return the hashes of the letters' grams, by length."""
    letters = np.frombuffer(data, np.uint8).astype(np.uint32)
    found, grams = [], letters
    for length, before in enumerate(letters * _POWERS + _STEPS, 2):
        # one letter before each gram that is shorter by one
        grams = before[: 1 - length] + grams[1:]
        if length in _LENGTHS:
            found.append(grams)
    return found


def form_of(text: str, *, turns: int, tools: int, wants_json: bool) -> list[float]:
    """Return the values that ``FORM`` names.

    Args:
        text: of the last message of the user.
        turns: messages of the conversation.
        tools: tools that the request offers.
    """
    shown = _shown(text)
    data = shown.encode("utf-8", "replace")
    length = max(1, len(data))
    return [
        math.log1p(len(text)),
        math.log1p(shown.count("\n")),
        # deleting them all is quicker than to count each
        *((len(data) - len(data.translate(None, each))) / length for each in _CLASSES),
        float(min(3, shown.count("?"))),
        float(any(map(shown.__contains__, _CODE))),
        float("json" in shown or "JSON" in shown),
        math.log1p(turns),
        math.log1p(tools),
        float(wants_json),
    ]


def _shown(text: str) -> str:
    """Return the part of a text that is read."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} {text[-_TAIL:]}"
