"""Parsing of a server's refusals."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime

import msgspec

from paceline.client.steps import Head

__all__ = ["message_of", "retry_after"]


def retry_after(head: Head) -> float | None:
    """Return the seconds that the server asks to wait; None if it gives none that can be read."""
    text = head.headers.get("retry-after-ms", "")
    try:
        seconds = float(text) / 1000 if text else float(head.headers.get("retry-after", ""))
    except ValueError:
        try:
            then = parsedate_to_datetime(head.headers.get("retry-after", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None
        try:
            # compare with the server's own clock, if it sends it
            sent = parsedate_to_datetime(head.headers.get("date", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            sent = head.wall
        seconds = then - sent
    return max(0.0, seconds) if math.isfinite(seconds) else None


def message_of(body: str) -> str:
    """Return the message of an error, or else all of it."""
    try:
        error = msgspec.json.decode(body)["error"]
        words = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        words = None
    return (words if isinstance(words, str) and words else body)[:2000]
