"""Where a server keeps files and batches, and how much of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError

__all__ = ["BatchConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of ``/v1/files`` and ``/v1/batches``. Raises ConfigError for a bad value."""

    # made when something is first kept there
    folder: Path
    # without it the server does not start; else it starts and answers 503 to files and batches
    required: bool = False
    # of one uploaded file
    max_file_bytes: int = 200 * 2**20
    # of all contents together
    max_bytes: int = 10 * 2**30
    # requests of one batch
    max_requests: int = 50_000
    # lines of all batches handed to the engine at once; None: half of its max_num_seqs
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_bytes", "max_requests", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of batches must be at least 1, got {value}")
