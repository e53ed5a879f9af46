"""Meaning of an answer's status, for the callers of engines: the gateway and both clients.

This is the only table of statuses. ``docs/operate/gateway.md`` shows it, and the TypeScript client
has a copy (``clients/typescript/src/statuses.js``) that a test compares with it. It imports
nothing, so that the client stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

__all__ = ["LISTED", "Meaning", "Retry", "meaning_of", "retry_of", "told_as"]

Meaning = Literal[
    # the request is at fault: any engine would answer the same
    "caller",
    # the key is at fault, or its owner's credit or rights: another engine has another key
    "account",
    # the model or the endpoint is not there: it may be elsewhere
    "model",
    # it may pass: limits, overload, a lock
    "passing",
    # the engine is at fault, or a proxy before it
    "engine",
]
Retry = Literal["nowhere", "elsewhere", "anywhere"]

# other statuses of 400 to 499 count as "caller", and all others as "engine"
LISTED: Final[Mapping[Meaning, tuple[int, ...]]] = {
    "account": (401, 402, 403, 407),
    "model": (404, 405, 410, 501),
    "passing": (408, 409, 420, 423, 425, 429, 498, 499, 503, 529),
    "engine": (421, 424, 426),
}
_MEANINGS: Final = {status: meaning for meaning, statuses in LISTED.items() for status in statuses}
# statuses of "engine" and "passing" that clients know
_KNOWN: Final = frozenset((408, 409, 425, 429, 500, 501, 502, 503, 504))


def meaning_of(status: int) -> Meaning:
    """Return the meaning of a status other than 200."""
    return _MEANINGS.get(status) or ("caller" if 400 <= status < 500 else "engine")


def retry_of(status: int, should: str = "") -> Retry:
    """Return where a request refused with ``status`` may be retried.

    Args:
        should: the answer's ``x-should-retry``, which overrides the table.
    """
    if should in ("true", "false"):
        return "anywhere" if should == "true" else "nowhere"
    meaning = meaning_of(status)
    if meaning == "caller":
        return "nowhere"
    # includes a redirect, which is not followed, and a success without an answer
    return "elsewhere" if status < 400 or meaning in ("account", "model") else "anywhere"


def told_as(status: int) -> int:
    """Return the status with which a gateway passes a refusal to its caller."""
    meaning = meaning_of(status)
    if meaning in ("caller", "model") or status in _KNOWN:
        return status
    return 503 if meaning == "passing" else 502
