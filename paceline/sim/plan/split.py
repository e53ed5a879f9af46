"""Number of prefill replicas per decode replica, by arithmetic on step times.

One prefill replica computes prompts one after the other, in chunks of the token budget. One decode
replica runs as many sequences at once as memory and the TPOT target allow. The pools are balanced
when both can serve the same number of requests per second (DistServe, OSDI'24; Splitwise, ISCA'24).

It follows also that at the best split of n replicas the pools together serve
``n / (1 / prefill + 1 / decode)`` requests per second, as many as n replicas that do both jobs one
after the other. Separating them buys latency, not throughput; and since replicas are whole numbers,
it loses some. Mean lengths only: queues are left out, docs/studies/disaggregation.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.errors import ConfigError

__all__ = ["SplitEstimate", "decode_step", "estimate_split", "prompt_step"]


class _StepTimes(Protocol):
    def seconds(self, plan: SchedulerOutput) -> float: ...


def _plan(rows: tuple[ScheduledRow, ...]) -> SchedulerOutput:
    return SchedulerOutput(0, rows, (), (), (), sum(row.num_tokens for row in rows))


def prompt_step(start: int, num_tokens: int) -> SchedulerOutput:
    """Return a plan of one row: ``num_tokens`` of a prompt of which ``start`` are computed."""
    return _plan((ScheduledRow("prompt", start, num_tokens, (), True),))


def decode_step(batch: int, context: int) -> SchedulerOutput:
    """Return a plan with one token for each of ``batch`` sequences of ``context`` tokens."""
    return _plan(tuple(ScheduledRow(str(i), context, 1, (), True) for i in range(batch)))


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """Rates in requests per second of one replica each."""

    prefill_rate: float
    decode_rate: float
    # sequences that a decode replica runs at once, and seconds of one of its steps
    decode_batch: int
    decode_seconds: float
    # (prefill, decode) replicas
    best: tuple[int, int]
    # requests per second of that split, and of as many replicas that do both jobs
    split_rate: float
    colocated_rate: float

    @property
    def ratio(self) -> float:
        """Prefill replicas per decode replica that keep both kinds busy."""
        return self.decode_rate / self.prefill_rate


def estimate_split(
    times: _StepTimes,
    *,
    prompt_tokens: int,
    output_tokens: int,
    tpot: float | None,
    max_batch: int,
    max_num_batched_tokens: int,
    replicas: int,
) -> SplitEstimate:
    """Estimate the balance for requests of these lengths.

    Args:
        tpot: longest decode step, s; None: no limit.
        max_batch: sequences that a replica's memory and settings allow at once.
        replicas: number to be divided, at least 2.

    Raises:
        ConfigError: not even one sequence decodes within ``tpot``; or too few replicas or tokens.
    """
    if replicas < 2:
        raise ConfigError(f"two pools need at least 2 replicas, got {replicas}")
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("output_tokens", output_tokens),
        ("max_batch", max_batch),
        ("max_num_batched_tokens", max_num_batched_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    prefill = 0.0
    for start in range(0, prompt_tokens, max_num_batched_tokens):
        chunk = min(max_num_batched_tokens, prompt_tokens - start)
        prefill += times.seconds(prompt_step(start, chunk))
    # the prefill gives the first token; a sequence is half grown on average
    steps = max(1, output_tokens - 1)
    context = prompt_tokens + output_tokens // 2
    batch = _largest_batch(times, context, tpot, max_batch)
    seconds = times.seconds(decode_step(batch, context))
    prefill_rate, decode_rate = 1.0 / prefill, batch / (steps * seconds)
    best = max(
        ((x, replicas - x) for x in range(1, replicas)),
        key=lambda split: min(split[0] * prefill_rate, split[1] * decode_rate),
    )
    return SplitEstimate(
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        decode_batch=batch,
        decode_seconds=seconds,
        best=best,
        split_rate=min(best[0] * prefill_rate, best[1] * decode_rate),
        colocated_rate=replicas / (1 / prefill_rate + 1 / decode_rate),
    )


def _largest_batch(times: _StepTimes, context: int, tpot: float | None, most: int) -> int:
    if tpot is None:
        return most
    alone = times.seconds(decode_step(1, context))
    if alone > tpot:
        raise ConfigError(
            f"one sequence of {context} tokens takes {1e3 * alone:.2f} ms a token, more than the "
            f"target of {1e3 * tpot:g} ms"
        )
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = times.seconds(decode_step(middle, context)) <= tpot
        low, high = (middle, high) if fits else (low, middle)
    return low
