"""Minimal preemption: how much to admit while the lengths of outputs are unknown.

A pool that holds about 40 average sequences, outputs longer than prompts. *Optimistic* admits any
request whose prompt fits and preempts when sequences grow; a *watermark* keeps a share of the pool
free for growth; *reserving* admits requests that fit if every sequence grows to its end; *future
peak*, the default, admits requests that fit at the moment when most memory will be held (LightLLM's
Past-Future scheduler, ASPLOS'25, arXiv 2507.10150), with lengths known or learned. Reserving is
part of this study, as a policy of another package would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.studies.common import BLOCK_SIZE, Study, replica, serve
from paceline.core.memory.kv_cache import blocks_for
from paceline.core.outputs import SchedulerOutput
from paceline.core.policies import POLICIES, FcfsPolicy, PolicyContext
from paceline.core.queues.request_queue import RequestQueue, WaitingQueue
from paceline.core.request import Request, RequestStatus
from paceline.sim.report.table import text_table
from paceline.sim.workload.spec import open_workload

__all__ = ["STUDY"]

BLOCKS = 1600
# requests per second: the pool's capacity, and twice as many
RATES = (8, 16)
WORKLOAD = "synthetic:rate={},cv=1,prompt=lognormal(200,0.6),output=lognormal(300,0.8),n=900"

# max_tokens of requests whose lengths are to be learned
MAX_TOKENS = 4096


class _GatedQueue(RequestQueue):
    """A queue that hides its head while the gate does not pass it."""

    def __init__(self, passes: Callable[[Request], bool]) -> None:
        super().__init__()
        self._passes = passes

    def peek(self) -> Request | None:
        head = super().peek()
        return None if head is None or not self._passes(head) else head


class _Reserving(FcfsPolicy):
    """First come, first served, while memory suffices for all to grow to their ends."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._admitted: list[Request] = []

    def make_queue(self) -> WaitingQueue:
        return _GatedQueue(self._passes)

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        if num_prompt:
            self._admitted.append(request)

    def _passes(self, head: Request) -> bool:
        running = [r for r in self._admitted if r.status is RequestStatus.RUNNING]
        self._admitted = running
        needed = sum(blocks_for(r.max_total_tokens, BLOCK_SIZE) for r in (*running, head))
        return not running or needed <= BLOCKS


class _Computed:
    """Counts the tokens that steps computed."""

    tokens = 0

    def __call__(
        self, replica: int, plan: SchedulerOutput, made: float, start: float, end: float
    ) -> None:
        self.tokens += plan.num_tokens


def tables() -> dict[str, str]:
    """Return tables of the cost of each way of admitting, at each rate."""
    return {f"rate-{rate}": text_table(_rows(rate)) for rate in RATES}


def _rows(rate: int) -> list[list[str]]:
    rows = [
        [
            "admission",
            "preemptions",
            "recomputed %",
            "running",
            "tokens/s",
            "TTFT p50 s",
            "TTFT p99 s",
            "E2E mean s",
            "E2E p99 s",
            "TPOT p99 ms",
        ]
    ]
    # name, policy, watermark, future_memory_check, lengths known
    ways = (
        ("optimistic", "fcfs", 0.0, False, True),
        ("watermark 1 %", "fcfs", 0.01, False, True),
        ("watermark 10 %", "fcfs", 0.10, False, True),
        ("watermark 30 %", "fcfs", 0.30, False, True),
        ("reserving", "reserving", 0.0, False, True),
        ("future peak, known", "fcfs", 0.01, True, True),
        ("future peak, learned", "fcfs", 0.01, True, False),
    )
    POLICIES["reserving"] = _Reserving
    try:
        for name, policy, watermark, looks_ahead, known in ways:
            computed = _Computed()
            spec = replica(
                policy=policy,
                num_blocks=BLOCKS,
                watermark=watermark,
                future_memory_check=looks_ahead,
            )
            if not known:
                spec = replace(spec, config=replace(spec.config, max_tokens=MAX_TOKENS))
            run = serve(open_workload(WORKLOAD.format(rate), seed=5), spec, computed)
            summary = run.metrics.summary(name)
            # the last token of an output is never an input
            needed = summary.prompt_tokens + summary.output_tokens - summary.finished
            assert summary.ttft is not None and summary.e2e is not None
            assert summary.tpot is not None
            rows.append(
                [
                    name,
                    str(summary.preemptions),
                    f"{100 * (computed.tokens / needed - 1):.1f}",
                    f"{run.steps.mean_rows:.1f}",
                    f"{summary.token_rate:.0f}",
                    f"{summary.ttft.p50:.2f}",
                    f"{summary.ttft.p99:.2f}",
                    f"{summary.e2e.mean:.2f}",
                    f"{summary.e2e.p99:.2f}",
                    f"{1e3 * summary.tpot.p99:.1f}",
                ]
            )
    finally:
        del POLICIES["reserving"]
    return rows


STUDY = Study("preemption", tables)
