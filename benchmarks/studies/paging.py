"""Paging waste at three scales: memory reserved for the longest sequence against blocks.

Preallocation is the same scheduler with blocks as long as the longest sequence. All requests are
there at the start and all steps take equally long, so that throughput is the number of sequences
that run. It is measured while requests are still waiting; waste is the share of held memory that
holds no token yet, averaged over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.studies.common import Run, Study, replica, serve
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.outputs import SchedulerOutput
from paceline.sim.arrival import Arrival
from paceline.sim.plan.memory import PRESETS, MemoryPlan, plan_memory
from paceline.sim.report.table import text_table
from paceline.sim.step_times.base import FixedStepTimes
from paceline.sim.step_times.models import ModelShape
from paceline.sim.workload.lengths import Lognormal

__all__ = ["STUDY"]


@dataclass(frozen=True, slots=True)
class _Scale:
    name: str
    memory: float
    weights: float
    per_token: float
    max_len: int
    prompt: Lognormal
    output: Lognormal
    utilization: float = 0.9


def _scales() -> tuple[_Scale, ...]:
    exercise = PRESETS["80gb-40gb"]
    small, large = ModelShape.named("Llama-3.1-8B"), ModelShape.named("Llama-3.1-70B")
    chat = (Lognormal(300, 0.7), Lognormal(120, 0.7))
    return (
        _Scale(
            "8B on 24 GB",
            24e9,
            2.0 * small.num_parameters,
            small.kv_bytes_per_token(),
            4096,
            *chat,
        ),
        _Scale(
            "20B on 80 GB, no GQA",
            exercise.memory_bytes,
            exercise.weight_bytes,
            exercise.kv_bytes_per_token,
            exercise.max_len,
            *chat,
            utilization=1.0,
        ),
        _Scale(
            "70B on 4 x 80 GB",
            320e9,
            2.0 * large.num_parameters,
            large.kv_bytes_per_token(),
            8192,
            Lognormal(600, 0.7),
            Lognormal(240, 0.7),
        ),
    )


class _Held:
    """Watches plans while requests wait: rows, tokens written, tokens held."""

    def __init__(self, block_size: int, num_requests: int) -> None:
        self._block_size = block_size
        self._left = num_requests
        self.steps = self.rows = self.written = self.held = self.sampled = 0
        self.seconds = 0.0

    def __call__(
        self, replica: int, plan: SchedulerOutput, made: float, start: float, end: float
    ) -> None:
        # a preempted request comes back with output tokens
        self._left -= sum(len(new.token_ids) == new.num_prompt_tokens for new in plan.new_requests)
        if self._left <= 0:
            return
        size = self._block_size
        self.steps += 1
        self.rows += len(plan.rows)
        self.seconds += end - start
        for _, begin, num_tokens, _, samples in plan.rows:
            self.sampled += samples
            self.written += begin + num_tokens
            self.held += size * blocks_for(begin + num_tokens, size)

    @property
    def waste(self) -> float:
        return 1.0 - self.written / self.held

    @property
    def rate(self) -> float:
        """Tokens sampled per second."""
        return self.sampled / self.seconds

    @property
    def running(self) -> float:
        return self.rows / self.steps


def _requests(scale: _Scale, number: int) -> list[Arrival]:
    rng = Random(11)
    requests = []
    for _ in range(number):
        prompt = min(scale.prompt.sample(rng), scale.max_len // 2)
        output = min(scale.output.sample(rng), scale.max_len - prompt)
        requests.append(Arrival(0.0, prompt, output))
    return requests


def _simulate(
    requests: list[Arrival], max_len: int, num_blocks: int, block_size: int
) -> tuple[_Held, Run]:
    held = _Held(block_size, len(requests))
    spec = replica(
        FixedStepTimes(0.030),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_len,
        max_num_seqs=8192,
        max_num_batched_tokens=65_536,
    )
    return held, serve(requests, spec, held)


def _plan(scale: _Scale, mean: float) -> MemoryPlan:
    return plan_memory(
        memory_bytes=scale.memory,
        weight_bytes=scale.weights,
        kv_bytes_per_token=scale.per_token,
        max_len=scale.max_len,
        mean_len=mean,
        utilization=scale.utilization,
    )


def _scale_rows() -> list[list[str]]:
    rows = [
        [
            "scale",
            "longest",
            "mean",
            "reserved: fit",
            "reserved: waste %",
            "paged: textbook",
            "paged: running",
            "paged: waste %",
            "preempted %",
            "gain",
        ]
    ]
    for scale in _scales():
        # a first guess of the mean, to know how many requests keep the pool full
        rough = _requests(scale, 2000)
        mean = sum(r.prompt_tokens + r.output_tokens for r in rough) / len(rough)
        plan = _plan(scale, mean)
        requests = _requests(scale, 8 * plan.paged)
        fixed, _ = _simulate(requests, scale.max_len, plan.preallocated, scale.max_len)
        paged, run = _simulate(requests, scale.max_len, plan.num_blocks, plan.block_size)
        rows.append(
            [
                scale.name,
                str(scale.max_len),
                f"{mean:.0f}",
                str(plan.preallocated),
                f"{100 * fixed.waste:.1f}",
                str(plan.paged),
                f"{paged.running:.0f}",
                f"{100 * paged.waste:.1f}",
                f"{100 * run.totals.num_preemptions / len(requests):.1f}",
                f"{paged.rate / fixed.rate:.1f}x",
            ]
        )
    return rows


def _block_rows() -> list[list[str]]:
    scale = _scales()[1]
    rough = _requests(scale, 2000)
    mean = sum(r.prompt_tokens + r.output_tokens for r in rough) / len(rough)
    plan = _plan(scale, mean)
    tokens = plan.num_blocks * plan.block_size
    requests = _requests(scale, 8 * plan.paged)
    rows = [["block size", "blocks", "waste %", "running", "preempted %", "tokens/s"]]
    for size in (1, 16, 64, 256, 1024, 2048):
        held, run = _simulate(requests, scale.max_len, tokens // size, size)
        rows.append(
            [
                str(size),
                str(tokens // size),
                f"{100 * held.waste:.1f}",
                f"{held.running:.1f}",
                f"{100 * run.totals.num_preemptions / len(requests):.1f}",
                f"{held.rate:.0f}",
            ]
        )
    return rows


def tables() -> dict[str, str]:
    """Return tables of three scales, and of block sizes on the middle one."""
    return {"scales": text_table(_scale_rows()), "blocks": text_table(_block_rows())}


STUDY = Study("paging", tables)
