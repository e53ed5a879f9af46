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
# what a letter is multiplied by, and what is added to a gram of each length
_POWERS: Final = np.array([pow(_BASE, n, 1 << 32) for n in range(max(_LENGTHS))], np.uint32)
_ADDED: Final = {n: np.uint32(n * pow(_BASE, n, 1 << 32) % (1 << 32)) for n in _LENGTHS}
# spreads the low bits, of which a bucket is made
_SPREAD: Final = np.uint32(0x9E3779B1)
_WORD: Final = re.compile(rb"[a-z0-9]+|[^\sa-z0-9]")
# class of each byte: 1 a digit, 2 an operator, 3 upper case, 4 not ASCII
_CLASSES: Final = np.zeros(256, np.uint8)
_CLASSES[list(b"0123456789")] = 1
_CLASSES[list(b"-+*/=<>^%")] = 2
_CLASSES[list(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")] = 3
_CLASSES[128:] = 4
_CODE: Final = ("```", "def ", "return ", "();", "{\n")
# names of what ``form_of`` returns, in order
FORM: Final = (
    "log_length", "log_lines", "digits", "operators", "upper", "not_ascii", "questions", "code",
    "json", "log_turns", "tools", "wants_json",
)  # fmt: skip


def ngrams_of(text: str) -> NDArray[np.float32]:
    """Return signed counts of a text's n-grams by bucket, as a vector of length 1 (0 for an empty
    text)."""
    data = _shown(text).lower().encode("utf-8", "replace")
    letters = np.frombuffer(data, np.uint8).astype(np.uint32)
    found, grams = [], letters
    for length in range(1, min(max(_LENGTHS), len(letters)) + 1):
        if length > 1:
            # one letter before each gram that is shorter by one
            grams = letters[: 1 - length] * _POWERS[length - 1] + grams[1:]
        if length in _ADDED:
            found.append(grams + _ADDED[length])
    words = _WORD.findall(data)
    pairs = [one + b" " + other for one, other in pairwise(words)]
    found.append(np.array([crc32(word) for word in (*words, *pairs)], np.uint32))
    hashes = np.concatenate(found) * _SPREAD
    signs = np.where(hashes >> np.uint32(31), np.float32(1.0), np.float32(-1.0))
    counts = np.bincount((hashes >> np.uint32(19)) % NUM_BUCKETS, signs, NUM_BUCKETS)
    norm = math.sqrt(float(counts @ counts))
    return (counts / norm if norm else counts).astype(np.float32)


def form_of(text: str, *, turns: int, tools: int, wants_json: bool) -> NDArray[np.float32]:
    """Return the values that ``FORM`` names.

    Args:
        text: of the last message of the user.
        turns: messages of the conversation.
        tools: tools that the request offers.
    """
    shown = _shown(text)
    data = shown.encode("utf-8", "replace")
    classes = np.bincount(_CLASSES[np.frombuffer(data, np.uint8)], minlength=5)
    told = (
        math.log1p(len(text)),
        math.log1p(shown.count("\n")),
        *(classes[1:5] / max(1, len(data))),
        min(3, shown.count("?")),
        float(any(part in shown for part in _CODE)),
        float("json" in shown or "JSON" in shown),
        math.log1p(turns),
        math.log1p(tools),
        float(wants_json),
    )
    return np.array(told, np.float32)


def _shown(text: str) -> str:
    """Return the part of a text that is read."""
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} {text[-_TAIL:]}"
