"""The interface to speculation: drafts are added to a plan that is otherwise complete.

A row of one token becomes one of 1 + k, whose last k are draft tokens; ``outputs.Draft`` says what
a backend does with them. ``paceline.speculation`` makes them. Core works without it: no draft
changes a request's tokens, and a scheduler without ``Speculation`` plans none.

::

    schedule    rows, admission; then add(step), forces(step); making_seconds is part of the step
    update      apply_result(...), then the tokens are appended

Core keeps for it, and passes on unread: ``drafter``, ``prediction_token_ids`` and
``max_draft_tokens`` of the caller's request, what it gave to ``Request.keep_drafts``, and
``speculative_config`` of the scheduler's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.outputs import Draft, SchedulerOutput, StepResult
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState
from paceline.errors import ConfigError

__all__ = ["Speculation", "SpeculationMaker", "make_speculation"]


class Speculation(Protocol):
    """Drafts for one scheduler, which calls nothing else before ``begins`` returns True."""

    # the next step is best planned once this one's tokens are known: then drafts can follow them
    awaits_tokens: bool
    # predicted seconds of the last step for the backend to make draft tokens
    making_seconds: float

    def begins(self, request: Request | None) -> bool:
        """Whether drafts begin now that this request arrives, which has an expected output
        (``prediction_token_ids``); None: from the start. Not called again once it is True."""

    def add(self, step: Step) -> tuple[Draft, ...]:
        """Lengthen rows of a step that is otherwise complete, with tokens and blocks that no other
        request wants; see ``SchedulerOutput.drafts``. Sets both attributes."""

    def forces(self, step: Step) -> tuple[int, ...]:
        """Return ``SchedulerOutput.forces`` for a step with all its rows."""

    def apply_result(
        self, plan: SchedulerOutput, requests: list[Request], result: StepResult, now: float
    ) -> None:
        """Take in a step's result, before its tokens are appended to the ``requests`` of its rows.
        Counts computed tokens of wrong drafts as not computed: the next row overwrites them."""


# called once, with the parts of the scheduler
SpeculationMaker = Callable[[SchedulerState], Speculation]


def make_speculation(state: SchedulerState, make: SpeculationMaker | None) -> Speculation | None:
    """Return the source of drafts for a scheduler with these parts; None: there is none.

    Raises:
        ConfigError: ``speculative_config`` is set, and the source does not know its values, or
            there is none.
    """
    if make is not None:
        return make(state)
    if (config := state.config.speculative_config) is not None:
        raise ConfigError(
            f"speculative_config={dict(config)} says how to draft tokens, and the scheduler was "
            "given no speculation to do so"
        )
    return None
