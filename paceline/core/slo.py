"""Targets of a request, as deadlines.

Token k of a request with targets is due at ``arrival + ttft`` for k = 1, and after that one
``tpot`` after the token before it, counted from the real time of the first token (so that the mean
time per output token, which is what TPOT measures, meets the target at every moment).

This module does not know the clock or the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidRequestError

__all__ = ["MAX_SECONDS", "NO_SLO", "Slo"]

MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Targets of one request in seconds; None is no target.

    Raises:
        InvalidRequestError: a target that is not a positive number of at most a day.
    """

    # name for metrics; only the targets have an effect
    slo_class: str = "standard"
    # arrival to first token
    ttft: float | None = None
    # mean time per output token after the first
    tpot: float | None = None
    # longest time between two output tokens
    itl: float | None = None
    # arrival to last token
    deadline: float | None = None
    # the request is served from the capacity that others leave, and is preempted first
    best_effort: bool = False
    # seconds it may wait to be started; after that the caller no longer wants it
    queue_ttl: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "itl", "deadline", "queue_ttl"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= MAX_SECONDS:
                field, most = f"slo.{name}_ms", f"{MAX_SECONDS * 1e3:.0f}"
                why = f"{field} must be above 0 and at most {most}, got {value * 1e3:g}"
                raise InvalidRequestError(why, field)

    @property
    def has_targets(self) -> bool:
        """Whether there is a target for tokens."""
        return not self.ttft is self.tpot is self.itl is self.deadline is None

    def violations(
        self,
        arrival: float,
        first_token: float,
        last_token: float,
        num_output: int,
        longest_gap: float = 0.0,
    ) -> tuple[str, ...]:
        """Return which targets a finished request missed: of "ttft", "tpot", "itl", "deadline"."""
        # a single token has no time between tokens
        each = (last_token - first_token) / (num_output - 1) if num_output > 1 else 0.0
        came = (
            ("ttft", self.ttft, first_token - arrival),
            ("tpot", self.tpot, each),
            ("itl", self.itl, longest_gap),
            ("deadline", self.deadline, last_token - arrival),
        )
        return tuple(n for n, target, seconds in came if target is not None and seconds > target)


NO_SLO = Slo()
