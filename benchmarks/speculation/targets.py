"""Shares of requests that meet their targets with draft tokens and without."""

from __future__ import annotations

import time
from random import Random

from msgspec import structs

from benchmarks.speculation.asked import QUICK, Entry
from benchmarks.speculation.engines import Engine, request_of
from paceline.core.slo import Slo
from paceline.engine.fanout import add_to_core
from paceline.engine.types import GenerationOutput

# rates of Poisson arrivals, as multiples of the rate at which one stream at a time is served; the
# last ones are more than a full batch serves, where targets are missed; then requests at each rate
RATES = (0.7, 2.0, 4.0, 8.0)
ARRIVALS = 8 if QUICK else 40


def attainment(engine: Engine, prompts: list[list[int]], slo: Slo, turn: int) -> float:
    """Return the share of requests, sent one at a time, that met their targets."""
    met = 0
    for prompt in prompts:
        (output,) = engine.llm.generate([request_of(engine, "r", prompt, turn, slo=slo)])
        met += _met(output, slo)
    return met / len(prompts)


def _met(output: GenerationOutput, slo: Slo) -> bool:
    times = output.times
    return times is not None and not slo.violations(
        times.arrival, times.first_token, times.last_token, output.num_output_tokens, 0.0
    )


def goodput(
    engine: Engine, prompts: list[list[int]], rate: float, slo: Slo, turn: int
) -> list[bool]:
    """Send Poisson arrivals; return whether each request met its targets."""
    random = Random(turn)
    due, at = [], time.monotonic()
    for index in range(ARRIVALS):
        at += random.expovariate(rate)
        due.append((at, index))
    met: dict[str, bool] = {}
    times: dict[str, list[float]] = {}
    core = engine.core

    def arrive() -> None:
        while due and due[0][0] <= time.monotonic():
            arrival, index = due.pop(0)
            prompt = prompts[index % len(prompts)]
            # salts of their own, as the same question is repeated
            name = f"g{turn}-{index}"
            request = request_of(engine, name, prompt, turn, slo=slo, salt=name)
            add_to_core(core, structs.replace(request, arrival_time=arrival))
            times[f"g{turn}-{index}/0"] = [arrival]

    while due or core.has_work:
        arrive()
        if not core.has_work:
            time.sleep(max(0.0, due[0][0] - time.monotonic()))
            continue
        for update in core.step(arrive):
            stamps = times[update.request_id]
            stamps += [time.monotonic()] * len(update.new_token_ids)
            if update.finish_reason is not None:
                first, last, count = stamps[1], stamps[-1], len(stamps) - 1
                missed = slo.violations(stamps[0], first, last, count, 0.0)
                met[update.request_id] = not missed
    return [met[f"g{turn}-{index}/0"] for index in range(ARRIVALS)]


def goodput_ratio(off: list[bool], on: list[bool]) -> Entry:
    """Return the ratio of requests that met their targets with drafts to those without."""
    random, pairs = Random(0), list(zip(off, on, strict=True))
    ratios = []
    for _ in range(2_000):
        drawn = random.choices(pairs, k=len(pairs))
        ratios.append(sum(b for _, b in drawn) / max(1, sum(a for a, _ in drawn)))
    ratios.sort()
    return {
        "off": sum(off),
        "on": sum(on),
        "of": len(pairs),
        "ratio": round(sum(on) / max(1, sum(off)), 3),
        "low": round(ratios[50], 3),
        "high": round(ratios[-51], 3),
    }
