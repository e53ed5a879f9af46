"""vLLM's choice of who gives its blocks up: the last one of those that run.

Waiting requests are served in order of arrival, and a request that was preempted is the head of the
queue again. So those that run always came before those that wait, and the last in order of arrival
is the last that was let in: vLLM pops its list of running requests from the end
(``vllm/v1/core/sched/scheduler.py``, version 0.19). This project's own policies take the request
that loses least instead, which saves work and is not what vLLM does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.policies import POLICIES, FcfsPolicy
from paceline.core.request import Request

__all__ = ["LAST_IN_FIRST_OUT", "LastInFirstOut", "register"]

# the policy's name in a scheduler's configuration
LAST_IN_FIRST_OUT: Final = "vllm-fcfs"


class LastInFirstOut(FcfsPolicy):
    """First come, first served, and the last one goes when memory is short."""

    def expendable(self, candidates: Sequence[Request]) -> Sequence[Request]:
        return candidates[-1:]


def register() -> None:
    """Make the name known to schedulers of this process, as the policies of other packages are
    when they are asked for. It is not a policy to serve with, so no command line offers it."""
    POLICIES.setdefault(LAST_IN_FIRST_OUT, LastInFirstOut)
