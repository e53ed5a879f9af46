"""Whether a body is packed, by its ``Content-Encoding``."""

from __future__ import annotations

from typing import Final

from paceline.core.errors import InvalidRequestError
from paceline.http.fields import show

__all__ = ["check_plain", "is_plain"]

# that leave a body as it is; the last is no coding of HTTP's, and what some proxies write
_PLAIN: Final = frozenset({"", "identity", "none"})


def is_plain(encoding: str) -> bool:
    """Whether a body with this header, a list of codings, is sent as it is."""
    return all(coding.strip().lower() in _PLAIN for coding in encoding.split(","))


def check_plain(encoding: str) -> None:
    """Raises InvalidRequestError for a packed body: unpacked it could be of any size."""
    if not is_plain(encoding):
        raise InvalidRequestError(
            f"Content-Encoding {show(encoding)} is not served: send the body as it is"
        )
