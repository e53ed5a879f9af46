"""A log of decisions as one digest: two drivers that plan alike have the same digest.

All of a plan is hashed except the values of sampled tokens, which a simulation does not know: its
time, rows, block tables, copies, swaps, releases, and new requests with their prompts.
"""

from __future__ import annotations

import hashlib

from paceline.core.outputs import SchedulerOutput

__all__ = ["DecisionLog"]


class DecisionLog:
    """Digest of plans, which are added in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_plans = 0

    def add(self, plan: SchedulerOutput, now: float) -> None:
        """Add a plan. ``now``: the scheduler's time when it made the plan, hashed to the
        microsecond, since a clock that is moved by differences is off by the last bit."""
        self.num_plans += 1
        new = [
            (
                entry.request_id,
                len(entry.token_ids),
                entry.token_ids[: entry.num_prompt_tokens],
                entry.block_ids,
                entry.sampling.max_tokens,
            )
            for entry in plan.new_requests
        ]
        rows = [tuple(row) for row in plan.rows]
        moved: tuple[object, ...] = (plan.block_copies, plan.swaps, plan.released)
        # sources and numbers of drafts: a simulation does not know which tokens they are
        drafts = [(draft.row, len(draft.token_ids)) for draft in plan.drafts]
        moved = (*moved, drafts) if drafts else moved
        decided = (plan.step_id, f"{now:.6f}", rows, new, moved, plan.num_tokens)
        self._hash.update(repr(decided).encode())

    def digest(self) -> str:
        """Return the digest of all plans so far."""
        return self._hash.hexdigest()
