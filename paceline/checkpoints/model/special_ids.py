"""A file's ids of special tokens, and the treatment of ids outside its vocabulary.

Converters write -1, 2^32 - 1 or the id of a token that was cut off for "there is none". Such an id
counts as absent, with a warning. A model whose only end of sequence is absent would never end an
answer, so it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from paceline.errors import CheckpointError

__all__ = ["gguf_special_id", "ids_within", "warn_once"]

_log = logging.getLogger(__name__)


@cache
def warn_once(message: str) -> None:
    """Log a warning about a file once, though several readers in one process may find it."""
    _log.warning("%s", message)


def gguf_special_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    """Return the id of ``tokenizer.ggml.NAME_token_id`` in a vocabulary of ``count`` tokens; None:
    it is absent.

    Raises:
        CheckpointError: it is not a whole number.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if type(token_id) is not int:
        raise CheckpointError(f"{key} is {token_id!r:.40} of {count} tokens")
    return next(iter(ids_within((token_id,), key, count)), None)


def ids_within(ids: Iterable[int], key: str, count: int) -> frozenset[int]:
    """Return the ``ids`` that are in a vocabulary of ``count`` tokens; ``key`` names them in the
    warning about the others."""
    given = frozenset(ids)
    found = frozenset(token_id for token_id in given if 0 <= token_id < count)
    for token_id in sorted(given - found):
        warn_once(f"{key} is {token_id}, the vocabulary has {count} entries: it counts as absent")
    return found
