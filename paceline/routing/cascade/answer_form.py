"""Form of an answer next to its prompt's: values that need no log-probabilities."""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ANSWER_FORM", "form_of_answer"]

# characters of each text that are read
_MOST: Final = 2000
_WORD: Final = re.compile(r"\w+")
# names of what ``form_of_answer`` returns, in order
ANSWER_FORM: Final = (
    "answer_log_length", "answer_log_words", "words_ratio", "share_of_prompt", "answer_digits",
    "answer_upper", "begins_with_digit", "ends_a_sentence", "has_lines", "has_braces",
    "repeats_prompt",
)  # fmt: skip


def form_of_answer(answer: str, prompt: str) -> NDArray[np.float32]:
    """Return the values that ``ANSWER_FORM`` names."""
    answer, prompt = answer[:_MOST], prompt[-_MOST:]
    words, asked = _WORD.findall(answer.lower()), _WORD.findall(prompt.lower())
    known, length = {*asked}, max(1, len(answer))
    told = (
        math.log1p(len(answer)),
        math.log1p(len(words)),
        min(10.0, len(words) / max(1, len(asked))),
        sum(word in known for word in words) / max(1, len(words)),
        sum(map(str.isdigit, answer)) / length,
        sum(map(str.isupper, answer)) / length,
        float(answer[:1].isdigit()),
        float(answer.rstrip()[-1:] in (".", "!", "?")),
        float("\n" in answer),
        float("{" in answer),
        float(bool(words) and f" {' '.join(words)} " in f" {' '.join(asked)} "),
    )
    return np.array(told, np.float32)
