"""Names that scripts and files may still have, and what they are called now.

This module does not know where a name stands: a reader of flags or files asks about names that it
does not know, and adds the answer to its error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["GONE", "RENAMED", "is_gone", "is_now"]

RENAMED: Final = {
    # flags
    "--background-share": "--best-effort-share",
    "--best-effort-delay": "--best-effort-share",
    "--bypass-window": "--max-skip-ahead",
    "--max-bypasses": "--max-skips",
    "--max-queue": "--max-num-waiting",
    "--max-wait": "--max-predicted-ttft",
    "--plan-lead-ms": "--schedule-ahead-ms",
    "--relegate-late": "--demote-late",
    # settings of an engine, as keyword arguments and recordings have them
    "bypass_window": "max_skip_ahead",
    "max_bypasses": "max_skips",
    "max_predicted_wait_s": "max_predicted_ttft_s",
    "plan_lead_s": "schedule_ahead_s",
    "relegate_late": "demote_late",
    # keys of the gateway's file
    "max_body_bytes": "max_body_size",
    "max_queued": "max_num_waiting",
    "max_rest_wait": "max_cooldown_wait",
    "silence": "liveness_timeout",
    # values of --dtype
    "native": "gguf",
}
_WHOLE_HEAD: Final = "the whole output head is read for every token"
# names without a successor -> what happens instead
GONE: Final = {"--screen-head": _WHOLE_HEAD, "screen_head": _WHOLE_HEAD}


def is_now(names: Iterable[str], known: Iterable[str]) -> str:
    """Return ``"X is now Y"`` for the first of ``names`` that became one of ``known``; else "".

    A flag that turns another one off follows that one: ``--no-X`` is now ``--no-Y``.
    """
    for name in names:
        start = "--no-" if name.startswith("--no-") else ""
        successor = RENAMED.get(name.replace(start, "--", 1) if start else name)
        if successor is None:
            continue
        successor = successor.replace("--", start, 1) if start else successor
        if successor in known:
            return f"{name} is now {successor}"
    return ""


def is_gone(names: Iterable[str]) -> str:
    """Return ``"X is gone: ..."`` for the first of ``names`` without a successor; else ""."""
    return next((f"{name} is gone: {GONE[name]}" for name in names if name in GONE), "")
