"""The parts of one scheduler by themselves, for tests of a single part."""

from __future__ import annotations

from typing import Any

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from tests.driving import make_request


def parts(*, num_blocks: int = 64, prefix_caching: bool = True, **config: Any) -> SchedulerState:
    """All parts at rest, over blocks of four tokens."""
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "future_memory_check": False,
        "max_token_gap_s": None,
    }
    cache = CacheConfig(
        block_size=4, num_blocks=num_blocks, watermark=0.0, enable_prefix_caching=prefix_caching
    )
    return SchedulerState(SchedulerConfig(**(defaults | config)), cache)


def numbered(
    request_id: str, number: int, prompt: int, max_tokens: int = 8, **asked: Any
) -> Request:
    """A request in this place of the order, of tokens that no other number has."""
    tokens = range(1000 * number, 1000 * number + prompt)
    request = make_request(request_id, tokens, max_tokens, **asked)
    request.order = (float(number), number)
    return request


def run(state: SchedulerState, *requests: Request) -> None:
    """They run and have all their blocks; none of their tokens is computed."""
    for request in requests:
        assert state.kv.admit(request, beside_others=False)
        state.running.start(request)


def computed(state: SchedulerState, *requests: Request, output: int = 1) -> None:
    """All their tokens but the last are computed; ``output`` of them were sampled."""
    for request in requests:
        request.output_token_ids += range(output)
        request.num_tokens += output
        assert state.kv.extend(request, request.num_tokens - 1) is not None
        request.num_computed_tokens = request.num_tokens - 1


def step_of(state: SchedulerState, tokens: int = 64, kind: type[Step] = Step, **more: Any) -> Step:
    """A step of these many tokens, planned at 0."""
    facts: dict[str, Any] = {"now": 0.0, "chunk_tokens": tokens, "passes": (), "reserved": 0}
    return kind(budget=tokens, state=state, **(facts | more))


def rows_of(step: Step) -> dict[str, tuple[int, int]]:
    """By request: (first position, tokens)."""
    return {row.request_id: (row.start, row.num_tokens) for row in step.rows}
