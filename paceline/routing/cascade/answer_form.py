"""Form of an answer next to its prompt's: values that need no log-probabilities."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

__all__ = ["ANSWER_FORM", "form_of_answer"]

# characters of each text that are read
_MOST: Final = 2000
_WORD: Final = re.compile(r"\w+")
_DIGITS: Final = b"0123456789"
_CAPITALS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# names of what ``form_of_answer`` returns, in order
ANSWER_FORM: Final = (
    "answer_log_length", "answer_log_words", "words_ratio", "share_of_prompt", "answer_digits",
    "answer_upper", "begins_with_digit", "ends_a_sentence", "has_lines", "has_braces",
    "repeats_prompt",
)  # fmt: skip


def form_of_answer(answer: str, prompt: str) -> list[float]:
    """Return the values that ``ANSWER_FORM`` names."""
    answer, prompt = answer[:_MOST], prompt[-_MOST:]
    words, asked = _WORD.findall(answer.lower()), _WORD.findall(prompt.lower())
    known, length = {*asked}, max(1, len(answer))
    return [
        math.log1p(len(answer)),
        math.log1p(len(words)),
        min(10.0, len(words) / max(1, len(asked))),
        sum(map(known.__contains__, words)) / max(1, len(words)),
        _count(answer, _DIGITS, str.isdigit) / length,
        _count(answer, _CAPITALS, str.isupper) / length,
        float(answer[:1].isdigit()),
        float(answer.rstrip()[-1:] in (".", "!", "?")),
        float("\n" in answer),
        float("{" in answer),
        float(bool(words) and f" {' '.join(words)} " in f" {' '.join(asked)} "),
    ]


def _count(text: str, ascii_ones: bytes, is_one: Callable[[str], bool]) -> int:
    """Return how many characters of a text are of a kind."""
    if text.isascii():
        # deleting them is quicker than to look at each
        return len(text) - len(text.encode().translate(None, ascii_ones))
    return sum(map(is_one, text))
