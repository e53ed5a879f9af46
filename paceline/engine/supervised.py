"""What a supervisor keeps about engines and requests, and what it says in an engine's stead."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from paceline.engine.client import ProcessEngineClient
from paceline.engine.types import ChoiceDelta, GenerationOutput, GenerationRequest

__all__ = ["Aborted", "Call", "Counts", "Engine", "aborted_output", "restarted_output"]


class Aborted(Exception):
    """Ended while it waited for an engine."""


@dataclass(slots=True, eq=False)
class Engine:
    """One process of the line."""

    client: ProcessEngineClient
    # the suspect that had not shown a token when it ended
    blamed: str | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One ``generate`` under way."""

    request: GenerationRequest
    # what it waits on while there is no engine
    waiter: asyncio.Future[None] | None = None
    # where it runs
    engine: Engine | None = None
    # times the engine ended under it
    losses: int = 0
    # a delta is out
    begun: bool = False
    aborted: bool = False


@dataclass(slots=True)
class Counts:
    losses: Counter[str] = field(default_factory=Counter)
    resent: int = 0
    lost: int = 0
    poisoned: int = 0
    recovery_seconds: float = 0.0


def restarted_output(request: GenerationRequest) -> GenerationOutput:
    return GenerationOutput(
        request_id=request.request_id,
        choices=(),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finished=False,
        restarted=True,
    )


def aborted_output(request: GenerationRequest) -> GenerationOutput:
    """The last word on a request that never got to an engine."""
    return GenerationOutput(
        request_id=request.request_id,
        choices=tuple(
            ChoiceDelta(index=index, text="", token_ids=(), finish_reason="abort")
            for index in range(request.n)
        ),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        finished=True,
    )
