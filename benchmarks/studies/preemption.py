"""Minimal preemption: how much to admit when nobody knows how long outputs will be.

A pool that holds about 40 average sequences, outputs longer than prompts, more arrivals than can be
served at once. *Optimistic* admits whoever's prompt fits and preempts when sequences grow;
a *watermark* keeps a share of the pool free for growth; *reserving* admits only what fits if every
sequence grows to its end; *future peak* admits what fits at the moment when most memory will be
held (LightLLM's Past-Future scheduler, ASPLOS'25, arXiv 2507.10150), here with lengths known.
The last two gates live in this study, as a policy of another package would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.studies.common import BLOCK_SIZE, Study, replica, serve
from paceline.core.forecast import future_peak
from paceline.core.outputs import SchedulerOutput
from paceline.core.policies import POLICIES, FcfsPolicy, PolicyContext
from paceline.core.queues import RequestQueue, WaitingQueue
from paceline.core.request import Request, RequestStatus
from paceline.sim.report import text_table
from paceline.sim.workload import open_workload

__all__ = ["STUDY"]

BLOCKS = 1600
# requests per second: what the pool just carries, and twice as many
RATES = (8, 16)
WORKLOAD = "synthetic:rate={},cv=1,prompt=lognormal(200,0.6),output=lognormal(300,0.8),n=900"

# (tokens held, tokens to come) of every sequence to the most tokens that they will hold
_Demand = Callable[[Iterable[tuple[int, int]]], int]


def _reserve(sequences: Iterable[tuple[int, int]]) -> int:
    return sum(held + to_come for held, to_come in sequences)


class _GatedQueue(RequestQueue):
    """Hands nobody out whom the gate does not pass."""

    def __init__(self, passes: Callable[[Request], bool]) -> None:
        super().__init__()
        self._passes = passes

    def pop(self) -> Request | None:
        head = self.peek()
        return None if head is None or not self._passes(head) else super().pop()


class _Gated(FcfsPolicy):
    """First come, first served, while ``demand`` of all that run stays within the pool."""

    def __init__(self, demand: _Demand, context: PolicyContext) -> None:
        super().__init__(context)
        self._demand = demand
        self._admitted: list[Request] = []

    def make_queue(self) -> WaitingQueue:
        return _GatedQueue(self._passes)

    def served(self, request: Request, num_prompt: int, num_output: int) -> None:
        if num_prompt:
            self._admitted.append(request)

    def _passes(self, head: Request) -> bool:
        running = [r for r in self._admitted if r.status is RequestStatus.RUNNING]
        self._admitted = running
        sequences = [(r.num_tokens, r.max_total_tokens - r.num_tokens) for r in (*running, head)]
        # every sequence may leave part of a block empty
        room = BLOCK_SIZE * (BLOCKS - len(sequences))
        return not running or self._demand(sequences) <= room


GATES: dict[str, _Demand] = {"reserving": _reserve, "future peak": future_peak}


class _Computed:
    """Tokens that steps computed."""

    tokens = 0

    def __call__(
        self, replica: int, plan: SchedulerOutput, made: float, start: float, end: float
    ) -> None:
        self.tokens += plan.num_tokens


def tables() -> dict[str, str]:
    """What each way of admitting costs, at each rate."""
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
    ways = [
        ("optimistic", "fcfs", 0.0),
        ("watermark 1 %", "fcfs", 0.01),
        ("watermark 10 %", "fcfs", 0.10),
        ("watermark 30 %", "fcfs", 0.30),
        *((name, name, 0.0) for name in GATES),
    ]
    known = dict(POLICIES)
    POLICIES.update({name: partial(_Gated, demand) for name, demand in GATES.items()})
    try:
        for name, policy, watermark in ways:
            computed = _Computed()
            spec = replica(policy=policy, num_blocks=BLOCKS, watermark=watermark)
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
        POLICIES.clear()
        POLICIES.update(known)
    return rows


STUDY = Study("preemption", tables)
