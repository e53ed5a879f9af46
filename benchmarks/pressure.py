"""The scheduler at 30 % of the memory that its requests need: what is computed twice.

Method: the scheduler over the null backend, whose tokens are a function of the prompt and so show
every mistake, with steps that take what a small model takes on a CPU. 192 requests of 100 to 400
prompt and 60 to 300 output tokens at most come within three seconds; each ends with a stop token of
its own, which the scheduler cannot foresee: all say max_tokens=600. Three runs: roomy; tight,
preempting the newest by recompute and admitting whatever fits now; tight, as the server does it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.backends.null import NullBackend, expected_tokens
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import SchedulerStats
from paceline.core.policies import POLICIES, FcfsPolicy
from paceline.core.request import Request, SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.step_time import StepShape

__all__ = ["wasted_tokens"]

BLOCK = 16
VOCAB = 997
SHARE = 0.3
# of a token in SmolLM2-135M's KV cache: keys and values of 30 layers, 3 heads of 64, 2 bytes. The
# null backend moves token ids; swapped blocks are counted as if they were that model's
TOKEN_BYTES = 30 * 3 * 64 * 2 * 2
_LENGTHS = [
    (rng.randint(100, 400), rng.randint(60, 300)) for rng in [random.Random(5)] for _ in range(192)
]
# 64 requests at once would be served without waiting
NEEDED = sum(-(-(prompt + output) // BLOCK) for prompt, output in _LENGTHS[:64])


class _NewestFirst(FcfsPolicy):
    """First come, first served; the last to come gives way, whatever it loses."""

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        return candidates[-1:]


def _seconds(shape: StepShape) -> float:
    return 0.004 + 4e-4 * (shape.wide_tokens + shape.narrow_rows)


def _run(num_blocks: int, **options: Any) -> tuple[dict[str, list[int]], SchedulerStats]:
    num_host_blocks = options.pop("num_host_blocks", 0)
    POLICIES["newest-first"] = _NewestFirst
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=1024, max_num_seqs=64, **options),
        CacheConfig(
            block_size=BLOCK,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            swap_block_seconds=1e-4,
        ),
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
                    request_id=str(index),
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=600, stop_token_ids=frozenset({end})),
                    arrival_time=at,
                )
            )
        plan = scheduler.schedule(now)
        if not plan.rows:
            now = coming[0][0]
            continue
        elapsed = _seconds(StepShape.of(plan.rows))
        result = replace(backend.execute(plan).result(), elapsed=elapsed)
        now += elapsed
        for update in scheduler.update(plan, result, now):
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
        scheduler.check_integrity()
    return tokens, scheduler.stats()


def wasted_tokens() -> dict[str, Any]:
    """Figures of the three runs."""
    tight = int(SHARE * NEEDED)
    roomy, _ = _run(NEEDED + 64)
    newest, before = _run(
        tight, policy="newest-first", preemption="recompute", future_memory_check=False
    )
    paced, after = _run(
        tight, policy="deadline", pressure_threshold=0.88, num_host_blocks=tight // 2
    )
    swapped = after.num_swapped_out_blocks + after.num_swapped_in_blocks
    return {
        "memory_share": SHARE,
        "wasted_tokens": after.num_recomputed_tokens,
        "wasted_tokens_newest_first": before.num_recomputed_tokens,
        "preemptions": after.num_preemptions,
        "preemptions_newest_first": before.num_preemptions,
        "swapped_blocks": swapped,
        "swapped_bytes": swapped * BLOCK * TOKEN_BYTES,
        "identical_tokens": roomy == newest == paced,
    }


if __name__ == "__main__":
    print(json.dumps({"bench": "pressure", "results": wasted_tokens()}))
    sys.exit(0)
