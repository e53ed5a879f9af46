"""Outcome of one attempt, and what it says about the engine's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.gateway.upstreams.standing import Outcome, outcome_of_refusal
from paceline.http.upstream import Headers

__all__ = ["Verdict", "outcome_of"]


@dataclass(slots=True, eq=False)
class Verdict:
    """Outcome of an attempt."""

    # "moved": the engine is well, and another one goes on
    kind: Literal["done", "refused", "lost", "moved"]
    why: str = ""


def outcome_of(
    verdict: Verdict | None,
    status: int,
    headers: Headers,
    *,
    of_engine: bool,
    names_stored: bool,
    cooling_down: bool,
) -> Outcome:
    """Return what an attempt's end says about the model; see ``outcome_of_refusal``.

    Args:
        verdict: None: the attempt was abandoned.
        of_engine: the failure is the engine's, not the model's.
    """
    if verdict is None or verdict.kind == "moved" or (verdict.kind == "lost" and of_engine):
        return "unknown"
    if verdict.kind != "refused":
        return "ok" if verdict.kind == "done" else "failed"
    return outcome_of_refusal(status, headers, names_stored=names_stored, cooling_down=cooling_down)
