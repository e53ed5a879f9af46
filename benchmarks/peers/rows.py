"""Offline work: rows by name, and their prompts."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from benchmarks.peers.jobs import Job

__all__ = ["ROWS", "Row", "make_job", "parse_row"]

ROWS = (
    "1x128x128",
    "8x128x128",
    "32x128x128",
    "64x128x128",
    "16x1024x1",
    "64x256x128",
    "16x2048x128",
    "prefix-64x1024+32x64",
)
# special tokens have low ids
_FIRST_ID = 100
_PATTERN = re.compile(r"(?:prefix-)?(\d+)x(?:(\d+)\+)?(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """Requests that arrive together: ``COUNTxPROMPTxOUTPUT`` or ``prefix-COUNTxSHARED+OWNxOUTPUT``
    in tokens."""

    name: str
    count: int
    # number of ids that all prompts start with, and of ids of each one's own
    shared: int
    own: int
    output: int

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests together."""
        return self.count * (self.shared + self.own)

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and outputs."""
        return self.prompt_tokens + self.count * self.output


def parse_row(name: str) -> Row:
    """Return the row of a name. Raises ValueError for a name of another form."""
    match = _PATTERN.fullmatch(name)
    if match is None or name.startswith("prefix-") != bool(match[2]):
        raise ValueError(
            f"row {name!r} is neither COUNTxPROMPTxOUTPUT nor prefix-COUNTxSHARED+OWNxOUTPUT"
        )
    count, shared, own, output = (int(number or 0) for number in match.groups())
    if not (count and own and output):
        raise ValueError(f"row {name!r} has a zero in it")
    return Row(name, count, shared, own, output)


def make_job(row: Row, vocab_size: int, seed: int) -> Job:
    """Make a job of random ids. Prompts of different seeds share no prefix, so a cache does not
    help."""
    rng = random.Random(f"{row.name} {seed}")

    def ids(length: int) -> list[int]:
        return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(length)]

    shared = ids(row.shared)
    prompts = [shared + ids(row.own) for _ in range(row.count)]
    return Job(prompts, row.output, row.shared)
