"""JSON objects of callers, and checks of their fields by type and range.

Booleans are not numbers, strings are not integers, and a float is never an integer. Every fault is
an InvalidRequestError that names the field and shows the value.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from paceline.errors import InvalidRequestError
from paceline.http.bounds import check_json_depth

__all__ = [
    "BYTE_ORDER_MARK",
    "FLEET_HEADER",
    "check_array",
    "check_boolean",
    "check_integer",
    "check_number",
    "check_object",
    "check_plain",
    "check_string",
    "check_token_ids",
    "decode_object",
    "is_plain",
    "show",
    "show_url",
]

# most levels of nesting; the deepest sensible tool schema is well below
_MAX_DEPTH: Final = 64
_SHOWN: Final = 64
# written by some editors and libraries before UTF-8; parsers may ignore it (RFC 8259, 8.1)
# header of requests to a server that is part of a fleet: polls of gateways, looks of its host
FLEET_HEADER: Final = b"x-paceline-fleet"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# the largest 32-bit integer
_WIDE: Final = 2**31 - 1


def show(value: object) -> str:
    """Return a value as an error message quotes it: short, and on one line."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... ({len(value)} characters)"
    return repr(value)


def show_url(url: str) -> str:
    """Return any URL as an error may quote it: without user, password, query and fragment, which
    may be secrets."""
    shown = re.split("[?#]", url, maxsplit=1)[0]
    if "@" in url:
        # a password may hold any character, also those that end a host name
        start, slashes, _ = shown.partition("//")
        host = shown.rpartition("@")[2] if "@" in shown else "..."
        shown = f"{start if slashes and '@' not in start else ''}{slashes}***@{host}"
    return repr(shown[:200])


def decode_object(body: bytes, what: str = "the request body") -> dict[str, Any]:
    """Decode a request body, called ``what`` in errors, as a JSON object of bounded depth.

    Raises InvalidRequestError for anything else; NaN, Infinity and numbers beyond a double are not
    JSON, nor are unpaired surrogates.
    """
    body = body.removeprefix(BYTE_ORDER_MARK)
    if not body:
        raise InvalidRequestError(f"{what} is empty; expected a JSON object")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequestError(f"{what} is nested deeper than {_MAX_DEPTH} levels") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object, got {type(value).__name__}")
    check_json_depth(value, _MAX_DEPTH, what)
    return value


def check_integer(value: object, name: str, low: int, high: int) -> int:
    if type(value) is not int:
        raise InvalidRequestError(f"{name} must be an integer, got {show(value)}", name)
    if not low <= value <= high:
        # a bound that is only the limit of the bits is not worth mentioning
        wanted = f"at least {low}" if value < low and high >= _WIDE else f"in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {wanted}, got {show(value)}", name)
    return value


def check_number(value: object, name: str) -> float:
    if type(value) is int:
        # an integer too large for a double is out of every range
        if value.bit_length() > 1000:
            raise InvalidRequestError(f"{name} is out of range: {show(value)}", name)
        return float(value)
    if type(value) is not float:
        raise InvalidRequestError(f"{name} must be a number, got {show(value)}", name)
    return value


def check_boolean(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise InvalidRequestError(f"{name} must be true or false, got {show(value)}", name)
    return value


def check_object(value: object, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequestError(f"{name} must be an object, got {show(value)}", name)
    return value


def check_array(value: object, name: str) -> list[Any]:
    if type(value) is not list:
        raise InvalidRequestError(f"{name} must be a list, got {show(value)}", name)
    return value


def check_string(value: object, name: str, low: int, high: int | None) -> str:
    if type(value) is not str:
        raise InvalidRequestError(f"{name} must be a string, got {show(value)}", name)
    if len(value) < low or (high is not None and len(value) > high):
        wanted = f"at least {low}" if high is None else f"{low} to {high}"
        raise InvalidRequestError(f"{name} must have {wanted} characters, got {len(value)}", name)
    return value


def check_token_ids(value: list[Any], name: str, vocab_size: int) -> list[int]:
    """Return ``value`` itself, if it holds only ids of the vocabulary."""
    if value and set(map(type, value)) != {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise InvalidRequestError(f"{name} must hold token ids, got {show(wrong)}", name)
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        wrong = next(item for item in value if not 0 <= item < vocab_size)
        raise InvalidRequestError(
            f"{name} holds token id {show(wrong)}; ids of this model are 0 to {vocab_size - 1}",
            name,
        )
    return value


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
