"""What the status of an answer means to those who ask engines: the gateway and both clients.

This is the only table of statuses. ``docs/gateway.md`` shows it, and the TypeScript client has a
copy (``clients/typescript/src/statuses.js``) that a test holds to it. It imports nothing, so that
the client stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

__all__ = ["LISTED", "Meaning", "Retry", "meaning_of", "retry_of", "told_as"]

Meaning = Literal[
    # of this request: any engine would say the same
    "caller",
    # of the key, or of what its owner has paid for or may use: another engine has another one
    "account",
    # the model or the endpoint is not there: it may be elsewhere
    "model",
    # it may pass: limits, overload, a lock
    "passing",
    # of the engine, or of a proxy before it
    "engine",
]
Retry = Literal["nowhere", "elsewhere", "anywhere"]

# other statuses of 400 to 499 are the caller's, and all others the engine's
LISTED: Final[Mapping[Meaning, tuple[int, ...]]] = {
    "account": (401, 402, 403, 407),
    "model": (404, 405, 410, 501),
    "passing": (408, 409, 420, 423, 425, 429, 498, 499, 503, 529),
    "engine": (421, 424, 426),
}
_MEANINGS: Final = {status: meaning for meaning, statuses in LISTED.items() for status in statuses}
# of engines and of what passes, what clients know
_KNOWN: Final = frozenset((408, 409, 425, 429, 500, 501, 502, 503, 504))


def meaning_of(status: int) -> Meaning:
    """Of an answer that is not 200."""
    return _MEANINGS.get(status) or ("caller" if 400 <= status < 500 else "engine")


def retry_of(status: int, should: str = "") -> Retry:
    """Where a request that was refused with ``status`` may be answered.

    Args:
        should: the answer's ``x-should-retry``, which stands over the table.
    """
    if should in ("true", "false"):
        return "anywhere" if should == "true" else "nowhere"
    meaning = meaning_of(status)
    if meaning == "caller":
        return "nowhere"
    # a redirect, which is not followed, or a success without an answer, comes again too
    return "elsewhere" if status < 400 or meaning in ("account", "model") else "anywhere"


def told_as(status: int) -> int:
    """The status with which a gateway tells its caller of a refusal."""
    meaning = meaning_of(status)
    if meaning in ("caller", "model") or status in _KNOWN:
        return status
    return 503 if meaning == "passing" else 502
