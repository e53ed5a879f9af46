"""The door: what is refused before it is queued.

This module does not know the queue, the running requests or time.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.errors import InvalidRequestError, NeverFitsError
from paceline.core.kv_cache import blocks_for, fits
from paceline.core.request import Request

__all__ = ["check_door"]


def check_door(
    request: Request,
    live: Mapping[str, Request],
    config: SchedulerConfig,
    cache: CacheConfig,
) -> None:
    """Return if ``request`` can be served some day on an empty engine.

    Args:
        live: requests already known, by id.

    Raises:
        NeverFitsError: prompt + max_tokens exceed the context or the whole KV cache.
        InvalidRequestError: empty prompt, duplicate id, unknown ``fork_of``.
    """
    prompt, output = request.num_prompt_tokens, request.sampling.max_tokens
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least 1 token is needed", "prompt")
    if request.request_id in live:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
    if request.max_total_tokens > config.max_model_len:
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens = {request.max_total_tokens} exceed "
            f"the maximum context length of {config.max_model_len} tokens",
            "max_tokens",
        )
    # the last sampled token is never fed back, so it needs no place
    stored = request.max_total_tokens - 1
    if not fits(stored, block_size=cache.block_size, num_blocks=cache.num_blocks):
        raise NeverFitsError(
            f"{prompt} prompt tokens + {output} output tokens need "
            f"{blocks_for(stored, cache.block_size)} KV blocks of {cache.block_size} tokens; "
            f"the whole cache has {cache.num_blocks}",
            "max_tokens",
        )
    if request.fork_of is not None:
        parent = live.get(request.fork_of)
        if parent is None or parent.prompt_token_ids != request.prompt_token_ids:
            raise InvalidRequestError(
                f"fork_of={request.fork_of!r} names no live request with the same prompt", "n"
            )
