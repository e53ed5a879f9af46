"""A pooled request in the scheduler: it ends with its prompt and brings no token; and prompts that
are computed whole."""

from __future__ import annotations

import pytest

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import RequestUpdate, SchedulerOutput, StepResult
from paceline.core.pooling import PoolingParams
from paceline.core.request import FinishReason, Request, RequestSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.core.slo import Slo
from paceline.errors import ConfigError, NeverFitsError

POOLED = SamplingParams(max_tokens=1, pooling=PoolingParams())
BATCH = Slo(slo_class="batch", best_effort=True)


def scheduler(num_blocks: int = 64, **config: object) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
    return Scheduler(
        SchedulerConfig(**{**settings, **config}),  # type: ignore[arg-type]
        CacheConfig(block_size=4, num_blocks=num_blocks),
    )


def request(name: str, length: int, slo: Slo | None = None) -> Request:
    spec = {"slo": slo} if slo is not None else {}
    return Request(
        RequestSpec(
            request_id=name,
            # no two share a prefix
            prompt_token_ids=[ord(name)] + [5] * (length - 1),
            sampling=POOLED,
            arrival_time=0.0,
            **spec,
        )
    )


def run(core: Scheduler, steps: int = 50) -> tuple[list[SchedulerOutput], list[RequestUpdate]]:
    """Until nothing is left."""
    plans: list[SchedulerOutput] = []
    updates: list[RequestUpdate] = []
    for step in range(steps):
        plan = core.schedule(float(step))
        if not plan.rows:
            break
        plans.append(plan)
        updates += core.update(
            plan, StepResult(plan.step_id, ((),) * len(plan.rows), elapsed=0.001), step + 0.5
        )
        core.check_integrity()
    assert not core.has_unfinished
    return plans, updates


def test_it_ends_with_its_prompt_and_brings_no_token() -> None:
    core = scheduler()
    core.add_request(request("a", 50))
    plans, updates = run(core)
    assert [[row.num_tokens for row in plan.rows] for plan in plans] == [[32], [18]]
    (update,) = updates
    assert update.finish_reason is FinishReason.STOP and update.new_token_ids == ()
    assert update.timeline is not None and update.timeline.num_chunks == 2
    stats = core.stats()
    assert stats.num_prompt_tokens == 50 and stats.num_decode_tokens == 0
    assert stats.num_free_blocks == 64


def test_two_steps_in_flight_compute_nothing_twice() -> None:
    core = scheduler()
    core.add_request(request("a", 40))
    plans = [core.schedule(0.0), core.schedule(0.0), core.schedule(0.0)]
    assert [plan.num_tokens for plan in plans] == [32, 8, 0]
    core.update(plans[0], StepResult(0, ((),), elapsed=0.001), 1.0)
    (update,) = core.update(plans[1], StepResult(1, ((),), elapsed=0.001), 2.0)
    assert update.finish_reason is FinishReason.STOP
    core.check_integrity()


def test_a_prompt_may_fill_the_context() -> None:
    core = scheduler()
    core.add_request(request("a", 64))
    with pytest.raises(NeverFitsError, match=r"65 prompt tokens .* of 64 tokens"):
        core.add_request(request("b", 65))
    run(core)


@pytest.mark.parametrize("slo", [None, BATCH])
def test_whole_prompts_are_never_cut(slo: Slo | None) -> None:
    core = scheduler(enable_chunked_prefill=False, max_model_len=32)
    lengths = {"a": 20, "b": 20, "c": 12, "d": 32, "e": 1, "f": 31}
    for name, length in lengths.items():
        core.add_request(request(name, length, slo))
    plans, updates = run(core)
    rows = [row for plan in plans for row in plan.rows]
    assert {row.request_id: row.num_tokens for row in rows} == lengths
    assert len(rows) == len(updates) == len(lengths)
    assert all(plan.num_tokens <= 32 for plan in plans)
    # those that fit beside the first are not held up by those that do not
    assert {row.request_id for row in plans[0].rows} >= {"a", "c"} or slo is not None


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=64 .* max_num_batched_tokens=32"):
        scheduler(enable_chunked_prefill=False)
