"""Shadow traffic of a gateway as labels: a small answer that differs from the large is a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.bench.calibrate.checkers import text_of
from paceline.bench.calibrate.fitting import Measured, measured
from paceline.bench.calibrate.labels import Check, Label
from paceline.errors import ConfigError
from paceline.gateway.cascade.answer import read_said
from paceline.gateway.settings.calibration import Shadow, Side
from paceline.routing.cascade import agree

__all__ = ["read_shadows"]


def read_shadows(
    path: Path, small: Side, large: Side, *, perplexity: bool = False
) -> tuple[list[Measured], int]:
    """Return what was measured with these two models, and how many lines are of others, cannot be
    read or, where ``perplexity`` counts, lack it. Raises ConfigError."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line]
    except OSError as error:
        raise ConfigError(f"shadow traffic {path} cannot be read: {error.strerror}") from None
    rows = [_row(line, (small.digest, large.digest), perplexity=perplexity) for line in lines]
    found = [row for row in rows if row is not None]
    return found, len(rows) - len(found)


def _row(line: bytes, digests: Sequence[str], *, perplexity: bool) -> Measured | None:
    try:
        told = msgspec.json.decode(line, type=Shadow)
        chat = {name: msgspec.json.decode(value) for name, value in told.chat.items()}
        label = Label(Check(exact=text_of(msgspec.json.decode(told.large))), fields=chat)
        row = measured(label, msgspec.json.decode(told.small), 0.0, 1.0, perplexity=perplexity)
        large = None if row is None else read_said(bytes(told.large), row.prompt)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return None
    if row is None or large is None or (told.small_digest, told.large_digest) != tuple(digests):
        return None
    if perplexity and row.said.prompt_logprob is None:
        return None
    same = agree(row.said.answer, large.answer)
    return msgspec.structs.replace(row, small=float(same))
