"""Recordings of engines that these tests need."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.test_recorder import run as record

__all__ = ["record_with_policy"]


def record_with_policy(path: Path, policy: str) -> None:
    """A run of an engine, as if it had been started with this policy."""
    record(path, repeat=12)
    first, *rest = path.read_text().splitlines(keepends=True)
    head = json.loads(first)
    head["scheduler"]["policy"] = policy
    path.write_text("".join([json.dumps(head) + "\n", *rest]))
