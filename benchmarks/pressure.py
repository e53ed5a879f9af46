"""The scheduler at 30 % of the memory that its requests need: tokens that are computed twice.

Method: the scheduler over the null backend, whose tokens are a function of the prompt and so show
every mistake, with steps that take the time of a small model on a CPU. 192 requests of 100 to 400
prompt and 60 to 300 output tokens at most arrive within three seconds; each ends with a stop token
of its own, which the scheduler cannot foresee: all have max_tokens=600. One run has memory for
all, the others 30 % of that: with the server's settings; the same without one part after the
other, to show the gain of each; and the baseline, which preempts the newest by recompute and
admits any request that fits now, also with looking ahead as its only change.
Every run must give the tokens of the roomy one.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.bench.machine import machine
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.policies import FcfsPolicy, PolicyContext
from paceline.core.predict.output_length import LengthHistory, WorkEstimator
from paceline.core.predict.step_time import StepShape, StepTimeModel
from paceline.core.request import Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.stats import SchedulerStats

__all__ = ["wasted_tokens"]

BLOCK = 16
VOCAB = 997
SHARE = 0.3
# to move one block to or from host memory
MOVE_SECONDS = 1e-4
# bytes of a token in SmolLM2-135M's KV cache: keys and values of 30 layers, 3 heads of 64, 2 bytes
# each. The null backend moves token ids; swapped blocks count as if they were that model's
TOKEN_BYTES = 30 * 3 * 64 * 2 * 2
_LENGTHS = [
    (rng.randint(100, 400), rng.randint(60, 300)) for rng in [random.Random(5)] for _ in range(192)
]
# 64 requests at once would be served without waiting
NEEDED = sum(-(-(prompt + output) // BLOCK) for prompt, output in _LENGTHS[:64])


class _NewestFirst(FcfsPolicy):
    """First come, first served; preempts the newest, whatever it loses."""

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        return candidates[-1:]


def _seconds(shape: StepShape) -> float:
    return 0.004 + 4e-4 * (shape.wide_tokens + shape.narrow_rows)


class Run(NamedTuple):
    """Results of all requests."""

    # by request
    tokens: dict[str, list[int]]
    stats: SchedulerStats
    # until the last of them ended
    seconds: float


def _run(
    num_blocks: int, *, num_host_blocks: int = 0, newest_first: bool = False, **options: Any
) -> Run:
    config = SchedulerConfig(max_model_len=1024, max_num_seqs=64, **options)
    work = WorkEstimator(StepTimeModel(), LengthHistory())
    scheduler = Scheduler(
        config,
        CacheConfig(
            block_size=BLOCK,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            swap_block_seconds=MOVE_SECONDS,
        ),
        _NewestFirst(PolicyContext(config, work)) if newest_first else None,
    )
    backend = NullBackend(
        vocab_size=VOCAB, num_blocks=num_blocks, block_size=BLOCK, num_host_blocks=num_host_blocks
    )
    tokens: dict[str, list[int]] = {}
    now = 0.0
    rng = random.Random(6)
    coming = sorted((3.0 * rng.random(), i) for i in range(len(_LENGTHS)))
    while coming or scheduler.has_unfinished:
        while coming and coming[0][0] <= now:
            at, index = coming.pop(0)
            num_prompt, num_output = _LENGTHS[index]
            prompt = [(7 * index + i) % VOCAB for i in range(num_prompt)]
            end = expected_tokens(prompt, num_output, VOCAB)[-1]
            scheduler.add_request(
                Request(
                    RequestSpec(
                        request_id=str(index),
                        prompt_token_ids=prompt,
                        sampling=SamplingParams(max_tokens=600, stop_token_ids=frozenset({end})),
                        arrival_time=at,
                    )
                )
            )
        plan = scheduler.schedule(now)
        if not plan.rows:
            now = coming[0][0]
            continue
        elapsed = _seconds(StepShape.of(plan.rows)) + MOVE_SECONDS * len(plan.swaps)
        result = replace(backend.execute(plan).result(), elapsed=elapsed)
        now += elapsed
        for update in scheduler.update(plan, result, now):
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
        if plan.step_id % 16 == 0:
            scheduler.check_integrity()
    return Run(tokens, scheduler.stats(), now)


def _ways(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Return arguments of ``_run`` by name: all parts together first, the baseline last."""
    fits_now = {"future_memory_check": False}
    recompute = {"preemption": "recompute"}
    valve = {"policy": "deadline", "pressure_threshold": 0.88}
    host = {"num_host_blocks": num_blocks // 2}
    return {
        "everything on": {**valve, **host},
        "without swap": {**valve, **recompute},
        "without look-ahead": {**valve, **host, **fits_now},
        "without look-ahead and swap": {**valve, **recompute, **fits_now},
        "choice of victims alone": {"policy": "deadline", **recompute, **fits_now},
        "newest first, with look-ahead": {"newest_first": True, **recompute},
        "newest first": {"newest_first": True, **recompute, **fits_now},
    }


def _row(run: Run, roomy: Run) -> dict[str, Any]:
    stats = run.stats
    swapped = stats.num_swapped_out_blocks + stats.num_swapped_in_blocks
    return {
        "wasted_tokens": stats.num_recomputed_tokens,
        "preemptions": stats.num_preemptions,
        "swapped_blocks": swapped,
        "swapped_bytes": swapped * BLOCK * TOKEN_BYTES,
        "seconds": round(run.seconds, 2),
        "identical_tokens": run.tokens == roomy.tokens,
    }


def wasted_tokens() -> dict[str, Any]:
    """Return figures of the run with everything on next to the baseline's, and of every run by name
    as ``parts``. ``seconds`` are those of the modelled machine."""
    roomy = _run(NEEDED + 64)
    tight = int(SHARE * NEEDED)
    parts = {name: _row(_run(tight, **options), roomy) for name, options in _ways(tight).items()}
    ours, newest = parts["everything on"], parts["newest first"]
    return {
        "memory_share": SHARE,
        "wasted_tokens": ours["wasted_tokens"],
        "wasted_tokens_newest_first": newest["wasted_tokens"],
        "preemptions": ours["preemptions"],
        "preemptions_newest_first": newest["preemptions"],
        "swapped_blocks": ours["swapped_blocks"],
        "swapped_bytes": ours["swapped_bytes"],
        # true only if it holds for all runs, whatever was preempted or moved in them
        "identical_tokens": all(row["identical_tokens"] for row in parts.values()),
        "parts": parts,
    }


def main() -> int:
    results = wasted_tokens()
    columns = ("wasted_tokens", "preemptions", "swapped_bytes", "seconds")
    print(f"{'':30}" + "".join(f"{column:>15}" for column in columns))
    for name, row in results["parts"].items():
        print(f"{name:30}" + "".join(f"{row[column]:>15,}" for column in columns))
    print(json.dumps({"bench": "pressure", "machine": machine(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
