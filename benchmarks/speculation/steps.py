"""Cost of draft tokens to the scheduler alone, without a model."""

from __future__ import annotations

import statistics
import sys
import time
from random import Random
from types import FrameType
from typing import Any

from benchmarks.speculation.asked import QUICK, SPECULATION, Entry
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import ScheduledRow, StepResult
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.engine.finished_answers import FinishedAnswers
from paceline.speculation.drafts import Drafts

# numbers of rows, timed steps of each, and reported seconds of a step
ROWS = (1, 8, 64)
STEPS = 100 if QUICK else 400
STEP_SECONDS = 0.005
# tokens of a repeated passage, and number of them that are changed each time
PASSAGE = 120
EDITS = 6
KINDS = ("distinct", "words", "repeats")


def texts_of(kind: str, count: int, length: int, turn: int) -> list[list[int]]:
    """Make texts without a model."""
    random = Random(turn)
    if kind == "distinct":
        return [list(range(i * length, (i + 1) * length)) for i in range(count)]
    if kind == "repeats":
        return [_repeated(random, length) for _ in range(count)]
    # the n-th word is 1 / n as frequent as the first
    weights = [1.0 / rank for rank in range(1, 20_001)]
    return [random.choices(range(20_000), weights, k=length) for _ in range(count)]


def _repeated(random: Random, length: int) -> list[int]:
    """Repeat a passage with small changes, as in code that is edited."""
    passage = [random.randrange(20_000) for _ in range(PASSAGE)]
    text = list(passage)
    while len(text) < length:
        again = list(passage)
        for place in random.sample(range(PASSAGE), EDITS):
            again[place] = random.randrange(20_000)
        text += again
    return text[:length]


class _Clock:
    """Measures the seconds within ``with``."""

    def __init__(self) -> None:
        self.spent = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.spent += time.perf_counter() - self._began


class _Calls:
    """Counts function calls within ``with``, C functions too; it does not depend on other load."""

    def __init__(self) -> None:
        self.spent = 0.0

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        # leaves out this method and its call
        self.spent -= 2

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        self.spent += event in ("call", "c_call")


def step_cost(config: dict[str, Any], texts: list[list[int]], *, calls: bool = False) -> float:
    """Return the scheduler's mean seconds for a step of all texts, whose prompts are 64 tokens, or
    its function calls."""
    answers = FinishedAnswers(16 << 20)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=8192, policy="fcfs", speculative_config=config),
        CacheConfig(block_size=16, num_blocks=64 * 512),
        speculation=Drafts,
    )
    for index, text in enumerate(texts):
        sampling = SamplingParams(max_tokens=len(text))
        prompt = text[:64]
        scheduler.add_request(
            Request(
                RequestSpec(
                    request_id=str(index),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    arrival_time=0.0,
                    # as an engine adds it, but without finished answers
                    drafter=answers.drafter("", None) if config == SPECULATION else None,
                )
            )
        )
    random, now = Random(5), 0.0
    meter = _Calls() if calls else _Clock()

    def says(row: ScheduledRow, drafts: tuple[int, ...]) -> tuple[int, ...]:
        if not row.samples:
            return ()
        text, known = texts[int(row.request_id)], row.start + row.num_tokens - len(drafts)
        right = 0
        while right < len(drafts) and drafts[right] == text[known + right]:
            right += 1
        return tuple(text[known : known + right + 1])

    # the first steps compute prompts and train the models, and are not timed
    for step in range(100 + STEPS):
        if step == 100:
            meter.spent = 0.0
        with meter:
            plan = scheduler.schedule(now)
        drafted = {draft.row: draft.token_ids for draft in plan.drafts}
        seconds = STEP_SECONDS + plan.num_tokens * 2e-5 + random.gauss(0.0, 1e-4)
        result = StepResult(
            step_id=plan.step_id,
            sampled=tuple(says(row, drafted.get(r, ())) for r, row in enumerate(plan.rows)),
            elapsed=seconds,
        )
        now += seconds
        with meter:
            scheduler.update(plan, result, now)
    return meter.spent / STEPS


def measure_steps(turns: int) -> Entry:
    """Return microseconds of a step without and with drafts, by kind of text and rows, in turns;
    and function calls, which are the same in each turn but for the texts."""
    found: Entry = {}
    for kind in KINDS:
        for rows in ROWS:
            sides: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(turns):
                texts = texts_of(kind, rows, 4_096, turn)
                order = ("off", "on") if turn % 2 == 0 else ("on", "off")
                for side in order:
                    config = {"method": "off"} if side == "off" else SPECULATION
                    sides[side].append(1e6 * step_cost(config, texts))
            more = [b - a for a, b in zip(sides["off"], sides["on"], strict=True)]
            found[f"{kind} {rows}"] = {
                "off": round(statistics.median(sides["off"]), 1),
                "on": round(statistics.median(sides["on"]), 1),
                "more": round(statistics.median(more), 1),
                "calls": [
                    round(step_cost(config, texts_of(kind, rows, 4_096, 0), calls=True), 1)
                    for config in ({"method": "off"}, SPECULATION)
                ],
            }
    return found
