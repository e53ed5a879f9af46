"""The seam to what guesses next tokens: the scheduler adds guesses to a plan that is complete.

A row of one token becomes one of 1 + k, whose last k are guesses; ``outputs.Draft`` says what a
backend does with them. ``paceline.speculation`` makes them. Core works without it: no guess
changes which tokens a request gets, and a scheduler that is given no ``Speculation`` plans none.

::

    schedule    rows, admission; then add(step), forces(step); making_seconds is part of the step
    update      take_in(...), then the tokens are appended

Core keeps for it, and hands on unread: ``drafter``, ``prediction_token_ids`` and
``max_draft_tokens`` of what was asked, ``Request.guesser``, and ``speculative_config`` of the
scheduler's settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.core.outputs import Draft, SchedulerOutput, StepResult
from paceline.core.request import Request
from paceline.core.step.limits import Step
from paceline.core.step.state import SchedulerState

__all__ = ["Speculation", "SpeculationMaker", "make_speculation"]


class Speculation(Protocol):
    """Guesses for one scheduler, which asks nothing of it before ``begins``."""

    # the next step is best planned once this one's tokens are known: then they can be guessed on
    awaits_tokens: bool
    # predicted seconds of the last step in which the backend makes guesses
    making_seconds: float

    def begins(self, request: Request | None) -> bool:
        """Whether guesses are made from now on, as this request arrives, which says what it
        expects (``prediction_token_ids``); None: from the start. Not asked again once it is so."""
        ...

    def add(self, step: Step) -> tuple[Draft, ...]:
        """Lengthen rows of a step that is otherwise complete, with tokens and blocks that no other
        request wants; see ``SchedulerOutput.drafts``. Sets both attributes."""
        ...

    def forces(self, step: Step) -> tuple[int, ...]:
        """See ``SchedulerOutput.forces``; of a step with all its rows."""
        ...

    def take_in(
        self, plan: SchedulerOutput, requests: list[Request], result: StepResult, now: float
    ) -> None:
        """A step is back, whose tokens the ``requests`` of its rows do not have yet. Counts what
        was computed of wrong guesses as not computed, so that the next row overwrites it."""
        ...


# called once, with the parts of the scheduler
SpeculationMaker = Callable[[SchedulerState], Speculation]


def make_speculation(state: SchedulerState, make: SpeculationMaker | None) -> Speculation | None:
    """What may guess for a scheduler with these parts; None: nothing does.

    Raises:
        ConfigError: ``speculative_config`` says how to guess, and what is to do so does not know
            that, or is not there.
    """
    if make is not None:
        return make(state)
    if (config := state.config.speculative_config) is not None:
        raise ConfigError(
            f"speculative_config={dict(config)} says how to guess tokens, and the scheduler was "
            "given no speculation to do so"
        )
    return None
