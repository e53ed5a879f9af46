"""JSON from an untrusted file: bounded in size, no duplicate keys, no NaN, only CheckpointError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NoReturn

from paceline.errors import CheckpointError

__all__ = ["parse_json_object", "read_json_list", "read_json_object"]

# limit for tokenizer.json, the largest JSON of a checkpoint, which has some tens of megabytes
MAX_JSON_BYTES: Final = 128 << 20


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} occurs twice")
            seen.add(key)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse ``data``; ``what`` names it in errors.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, or not an object.
    """
    value = _parse_json(data, what)
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is a JSON {type(value).__name__}, must be an object")
    return value


def _parse_json(data: bytes, what: str) -> Any:
    try:
        return json.loads(
            data.decode("utf-8-sig"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None when there is no such file.

    Raises:
        CheckpointError: unreadable, larger than ``limit`` bytes, or not a JSON object.
    """
    data = _read(path, limit)
    return None if data is None else parse_json_object(data, str(path))


def read_json_list(path: Path, limit: int = MAX_JSON_BYTES) -> list[Any] | None:
    """Return the JSON list in ``path``, in the same way."""
    data = _read(path, limit)
    value = None if data is None else _parse_json(data, str(path))
    if value is not None and not isinstance(value, list):
        raise CheckpointError(f"{path} is a JSON {type(value).__name__}, must be a list")
    return value


def _read(path: Path, limit: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            # read(limit) would allocate limit bytes at once, whatever the file's size
            size = file.seek(0, 2)
            file.seek(0)
            data = file.read(min(size, limit))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if size > limit:
        raise CheckpointError(f"{path} has {size} bytes, at most {limit} are read")
    return data
