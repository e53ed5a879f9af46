"""Settings of the folder in which a server keeps files and batches, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

__all__ = ["BatchConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Settings of ``/v1/files`` and ``/v1/batches``. Raises ConfigError for a bad value."""

    # created when the first file is stored
    folder: Path
    # refuse to start if the folder cannot be used; otherwise files and batches get 503
    required: bool = False
    # maximum size of one uploaded file, bytes
    max_file_bytes: int = 200 * 2**20
    # maximum size of all contents together, bytes
    max_bytes: int = 10 * 2**30
    # maximum requests of one batch
    max_requests: int = 50_000
    # lines, over all batches, that the engine works on at once; None: half of its max_num_seqs
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_file_bytes", "max_bytes", "max_requests", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of batches must be at least 1, got {value}")
