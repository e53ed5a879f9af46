"""Check whether a body is compressed, by its ``Content-Encoding``."""

from __future__ import annotations

from typing import Final

from paceline.errors import InvalidRequestError
from paceline.http.fields import show

__all__ = ["check_plain", "is_plain"]

# codings without effect on a body; "none" is not defined by HTTP, but some proxies send it
_PLAIN: Final = frozenset({"", "identity", "none"})


def is_plain(encoding: str) -> bool:
    """Whether a body with this header, a list of codings, is sent unencoded."""
    return all(coding.strip().lower() in _PLAIN for coding in encoding.split(","))


def check_plain(encoding: str) -> None:
    """Raise InvalidRequestError for a compressed body, which could unpack to any size."""
    if not is_plain(encoding):
        raise InvalidRequestError(
            f"Content-Encoding {show(encoding)} is not served: send the body as it is"
        )
