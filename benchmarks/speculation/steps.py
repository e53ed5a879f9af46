"""What guessing costs the scheduler alone, without a model."""

from __future__ import annotations

import statistics
import time
from random import Random
from typing import Any

from benchmarks.speculation.asked import QUICK, SPECULATION, Entry
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import ScheduledRow, StepResult
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler

# of the scheduler alone: rows, steps of each that are timed, and seconds that one is said to take
ROWS = (1, 8, 64)
STEPS = 100 if QUICK else 400
STEP_SECONDS = 0.005


def texts_of(kind: str, count: int, length: int, turn: int) -> list[list[int]]:
    """Texts without a model."""
    random = Random(turn)
    if kind == "distinct":
        return [list(range(i * length, (i + 1) * length)) for i in range(count)]
    # the n-th word comes 1 / n as often as the first
    weights = [1.0 / rank for rank in range(1, 20_001)]
    return [random.choices(range(20_000), weights, k=length) for _ in range(count)]


def step_seconds(config: dict[str, Any], texts: list[list[int]]) -> float:
    """Mean seconds of the scheduler for a step of all texts, whose prompts are 64 tokens."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=8192, policy="fcfs", speculative_config=config),
        CacheConfig(block_size=16, num_blocks=64 * 512),
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
                )
            )
        )
    random, now, taken, timed = Random(5), 0.0, 0.0, 0

    def says(row: ScheduledRow, guesses: tuple[int, ...]) -> tuple[int, ...]:
        if not row.samples:
            return ()
        text, known = texts[int(row.request_id)], row.start + row.num_tokens - len(guesses)
        right = 0
        while right < len(guesses) and guesses[right] == text[known + right]:
            right += 1
        return tuple(text[known : known + right + 1])

    # the first steps learn, and compute prompts
    for step in range(100 + STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        spent = time.perf_counter() - began
        guessed = {draft.row: draft.token_ids for draft in plan.drafts}
        seconds = STEP_SECONDS + plan.num_tokens * 2e-5 + random.gauss(0.0, 1e-4)
        result = StepResult(
            step_id=plan.step_id,
            sampled=tuple(says(row, guessed.get(r, ())) for r, row in enumerate(plan.rows)),
            elapsed=seconds,
        )
        now += seconds
        began = time.perf_counter()
        scheduler.update(plan, result, now)
        spent += time.perf_counter() - began
        if step >= 100:
            taken, timed = taken + spent, timed + 1
    return taken / timed


def measure_steps(turns: int) -> Entry:
    """Microseconds of a step without and with, by kind of text and rows, in turns."""
    found: Entry = {}
    for kind in ("distinct", "words"):
        for rows in ROWS:
            sides: dict[str, list[float]] = {"off": [], "on": []}
            for turn in range(turns):
                texts = texts_of(kind, rows, 2_048, turn)
                order = ("off", "on") if turn % 2 == 0 else ("on", "off")
                for side in order:
                    config = {"method": "off"} if side == "off" else SPECULATION
                    sides[side].append(1e6 * step_seconds(config, texts))
            more = [b - a for a, b in zip(sides["off"], sides["on"], strict=True)]
            found[f"{kind} {rows}"] = {
                "off": round(statistics.median(sides["off"]), 1),
                "on": round(statistics.median(sides["on"]), 1),
                "more": round(statistics.median(more), 1),
            }
    return found
