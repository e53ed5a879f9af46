"""The accuracy gate on chat: how far a format is from float32 where answers are decided.

Method. The questions of ``questions`` go through the model's chat template, and float32 answers
each at temperature 0. Over the first FIRST tokens of its answer, which every format reads too
(teacher forcing), distributions over the next token are compared:

* KL: mean of KL(float32 || format), in nats a token;
* top-1: the share of tokens where the likeliest is float32's;
* first: the share of questions whose answer would begin with another token.

Then every format answers by itself, LOOP_TOKENS tokens at most at temperature 0, and the share of
answers that loop (``questions.loops``) is compared with float32's on the same questions.

The limits were written down before any of these figures was seen. Two kinds of formats have limits:

* KEPT, for a format that serves a file's own values. KL of twice the prose gate's, since the first
  token of an answer was known to have twice the KL of prose; top-1 as there; 4 % of first tokens,
  which is top-1's share and no more where answers are decided.
* ROUNDED, for four bits made of 16. Twice the KL, the share of other first tokens and top-1 that
  the prose bar (0.05, 12 %, 88 %) allows, as both must hold.

Both: no more loops than float32, by McNemar's exact test on the same questions, one-sided at 5 %.
With 200 questions that finds a format that loops on some 7 % of them more, and nothing finer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.questions import HELD, LOOP_TOKENS, Share, loops, share
from paceline.backends.native import NativeModel
from paceline.engine.text.tokenizer import HFTokenizer, load_tokenizer
from paceline.quantize.check import BLOCK, REFERENCE, build

__all__ = [
    "FIRST",
    "KEPT",
    "ROUNDED",
    "ChatFigures",
    "Limits",
    "figures_of",
    "judged",
    "read_chat",
    "show",
]

FIRST: Final = 16
# questions that are answered together
_GROUP: Final = 25
# what is printed for what ``judged`` says
_VERDICTS: Final = {
    True: "passes",
    False: "FAILS",
    None: "passes as far as it was measured: loops were not counted",
}
# of McNemar's test
_CHANCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a format's distance from float32 on chat."""

    kl: float
    top1: float
    first: float


KEPT: Final = Limits(kl=0.02, top1=0.95, first=0.04)
ROUNDED: Final = Limits(kl=0.1, top1=0.88, first=0.12)


@dataclass(frozen=True, slots=True)
class Answered:
    """Comparison of one format's answer to one question with float32's."""

    question: str
    # over the positions that were compared
    kl: float
    agree: int
    positions: int
    other_first: bool
    loops: bool
    reference_loops: bool


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """Distance of a format from float32 on chat."""

    kl: float
    top1: float
    # share of questions whose answer begins with another token
    first: float
    loops: Share
    reference_loops: Share
    # how likely so many more loops are by chance
    chance: float

    def passes(self, limits: Limits) -> bool:
        """Return whether the format is within the limits and loops no more than float32."""
        return (
            self.kl <= limits.kl
            and self.top1 >= limits.top1
            and self.first <= limits.first
            and self.chance >= _CHANCE
        )

    def as_json(self) -> dict[str, float | list[float]]:
        return {
            "kl": round(self.kl, 5),
            "top1": round(self.top1, 4),
            "first": round(self.first, 4),
            "loops": [round(value, 4) for value in self.loops],
            "float32_loops": [round(value, 4) for value in self.reference_loops],
            "chance": round(self.chance, 4),
        }


def figures_of(answers: Sequence[Answered]) -> ChatFigures:
    """Return the figures of all answers. Raises ValueError for none."""
    found = [each.loops for each in answers]
    reference = [each.reference_loops for each in answers]
    positions = sum(each.positions for each in answers)
    return ChatFigures(
        loops=share(found),
        reference_loops=share(reference),
        kl=sum(each.kl for each in answers) / positions,
        top1=sum(each.agree for each in answers) / positions,
        first=sum(each.other_first for each in answers) / len(answers),
        chance=_chance(found, reference),
    )


def judged(
    answers: Sequence[Answered], limits: Limits, tokens: int = LOOP_TOKENS
) -> dict[str, Any]:
    """Return the figures of all questions, of those held back, and whether the limits hold, for
    JSON.

    Args:
        tokens: length of the answers. Loops are counted in LOOP_TOKENS alone; without them nothing
            passes, and "passes" is None where all other limits hold.
    """
    figures = figures_of(answers)
    held = [each for each in answers if each.question in HELD]
    result: dict[str, Any] = {"questions": len(answers), **figures.as_json()}
    of_held: dict[str, Any] | None = None
    if held:
        of_held = {"questions": len(held), **figures_of(held).as_json()}
    passes: bool | None = figures.passes(limits)
    if tokens < LOOP_TOKENS:
        passes = None if replace(figures, chance=1.0).passes(limits) else False
        for part in (result, of_held or {}):
            part |= dict.fromkeys(("loops", "float32_loops", "chance"))
    return {**result, "held": of_held, "passes": passes}


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of ``judged`` by format."""
    print(f"\n{'chat':18}{'questions':>9}{'KL':>9}{'top-1':>8}{'first':>8}{'loops':>22}"
          f"{'float32':>22}{'chance':>8}")  # fmt: skip
    for name, result in results.items():
        for label, part in ((name, result), ("  held back", result["held"])):
            if part is None:
                continue
            print(
                f"{label:18}{part['questions']:>9}{part['kl']:>9.4f}{part['top1']:>8.1%}"
                f"{part['first']:>8.1%}{_loops_text(part)}"
            )
        print(f"{'':18}{_VERDICTS[result['passes']]}")


def _loops_text(part: Mapping[str, Any]) -> str:
    if part["loops"] is None:
        return f"{'not counted':>22}{'-':>22}{'-':>8}"
    found, known = (
        f"{middle:.1%} ({low:.1%}-{high:.1%})"
        for middle, low, high in (part["loops"], part["float32_loops"])
    )
    return f"{found:>22}{known:>22}{part['chance']:>8.3f}"


def _chance(found: Sequence[bool], reference: Sequence[bool]) -> float:
    """Return McNemar's exact one-sided probability of so many more ``found``, if both are alike."""
    more = sum(one and not other for one, other in zip(found, reference, strict=True))
    less = sum(other and not one for one, other in zip(found, reference, strict=True))
    count = more + less
    return float(sum(math.comb(count, k) for k in range(more, count + 1)) / 2**count)


def read_chat(
    source: Path,
    formats: Mapping[str, tuple[Path, str]],
    questions: Sequence[str],
    threads: int,
    *,
    isa: str | None = None,
    tokens: int = LOOP_TOKENS,
) -> dict[str, list[Answered]]:
    """Return what each format did with the questions, next to ``source`` in float32.

    Args:
        formats: by name, a model's path and its format, such as "q4/int8".
        isa: the level of instructions; None: the best here.
        tokens: length of answers.
    """
    torch.set_num_threads(threads)
    tokenizer = load_tokenizer(source)
    prompts = [_prompt(tokenizer, question) for question in questions]
    length = max(map(len, prompts)) + tokens
    shape = (min(_GROUP, len(prompts)), length)
    paths = {REFERENCE: (source, REFERENCE), **formats}
    models: dict[str, NativeModel] = {}
    found: dict[str, list[Answered]] = {name: [] for name in formats}
    try:
        for name, (path, kind) in paths.items():
            models[name] = build(path, kind, threads, shape, isa)
        sides = {name: _Side(model, tokenizer, length) for name, model in models.items()}
        reference = sides.pop(REFERENCE)
        for first in range(0, len(prompts), _GROUP):
            group = slice(first, first + _GROUP)
            for name, answers in _compare(
                questions[group], prompts[group], reference, sides, tokens
            ).items():
                found[name] += answers
    finally:
        for model in models.values():
            model.close()
    return found


def _prompt(tokenizer: HFTokenizer, question: str) -> list[int]:
    text = tokenizer.render_chat([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)


class _Side:
    """A model that answers some questions at once."""

    def __init__(self, model: NativeModel, tokenizer: HFTokenizer, length: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._width = -(-length // BLOCK)

    def _tables(self, count: int) -> NDArray[np.int64]:
        return np.arange(count * self._width).reshape(count, self._width)

    def answer(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Return the ids of answers at temperature 0, without what ends them."""
        answers: list[list[int]] = [[] for _ in prompts]
        rows, starts = list(prompts), [0] * len(prompts)
        for _ in range(tokens):
            going = [index for index, row in enumerate(rows) if row]
            if not going:
                break
            likeliest = self._step(rows, starts)
            for index, token in zip(going, likeliest, strict=True):
                starts[index] += len(rows[index])
                ended = token in self._tokenizer.eos_token_ids
                rows[index] = [] if ended else [token]
                answers[index] += rows[index]
        return answers

    def _step(self, rows: Sequence[list[int]], starts: Sequence[int]) -> list[int]:
        ids, positions, ends = _flat(rows, starts)
        # a question that is answered has no rows
        last = np.array([end - 1 for row, end in zip(rows, ends[1:], strict=True) if row])
        tables = self._tables(len(rows))
        self._model.forward(ids, positions, ends, tables, last, needs_logits=False)
        return [int(token) for token in self._model.likeliest]

    def read(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> list[torch.Tensor]:
        """Return the log-probabilities of each answer's tokens, [tokens, vocab], and of one token
        where it ends at once."""
        rows = [prompt + answer[:-1] for prompt, answer in zip(prompts, answers, strict=True)]
        ids, positions, ends = _flat(rows, [0] * len(rows))
        counts = [max(1, len(answer)) for answer in answers]
        wanted = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends[1:], counts, strict=True)]
        )
        logits = self._model.forward(ids, positions, ends, self._tables(len(rows)), wanted)
        return list(torch.split(torch.from_numpy(logits).log_softmax(1), counts))

    def loops(self, answer: list[int]) -> bool:
        return loops(self._tokenizer.decode(answer))


def _flat(
    rows: Sequence[list[int]], starts: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ids and positions of all rows, and where each begins."""
    ids = np.array([token for row in rows for token in row], dtype=np.int64)
    positions = np.concatenate(
        [np.arange(start, start + len(row)) for row, start in zip(rows, starts, strict=True)]
    )
    return ids, positions, np.cumsum([0, *map(len, rows)])


def _compare(
    questions: Sequence[str],
    prompts: Sequence[list[int]],
    reference: _Side,
    sides: Mapping[str, _Side],
    tokens: int,
) -> dict[str, list[Answered]]:
    expected = reference.answer(prompts, tokens)
    begins = [answer[:FIRST] for answer in expected]
    exact = reference.read(prompts, begins)
    found: dict[str, list[Answered]] = {}
    for name, side in sides.items():
        read, answers = side.read(prompts, begins), side.answer(prompts, tokens)
        found[name] = [
            Answered(
                question=question,
                kl=float((one.exp() * (one - other)).sum(1).double().sum()),
                agree=int((one.argmax(1) == other.argmax(1)).sum()),
                positions=len(one),
                other_first=bool(one[0].argmax() != other[0].argmax()),
                loops=side.loops(answer),
                reference_loops=reference.loops(known),
            )
            for question, one, other, answer, known in zip(
                questions, exact, read, answers, expected, strict=True
            )
        ]
    return found
