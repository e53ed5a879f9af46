"""Paceline's scheduler inside vLLM: targets per request, true 429s and explanations on GPUs.

::

    vllm serve MODEL --scheduler-cls paceline.vllm.PacedScheduler \\
        --middleware paceline.vllm.Admission

``paceline.core`` plans every step, and vLLM's own ``schedule`` carries the plan out
(``scheduler``); vLLM's KV cache stays the only one (``mirror``). The middleware reads targets, and
turns refusals into 429 (``admission``); the two meet over a socket (``channel``).

Importing this package does not import vLLM: that begins with the first use of one of the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.vllm.admission import Admission
    from paceline.vllm.scheduler import PacedScheduler

__all__ = ["Admission", "PacedScheduler"]


def __getattr__(name: str) -> Any:
    if name == "PacedScheduler":
        from paceline.vllm.scheduler import PacedScheduler

        return PacedScheduler
    if name == "Admission":
        from paceline.vllm.admission import Admission

        return Admission
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
