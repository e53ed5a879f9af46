"""Records of files and batches, and their form in OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["ENDED", "UNFINISHED", "Batch", "Result", "StoredFile"]

# statuses of a batch that is not over
UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
# statuses of a batch that is over
ENDED: Final = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A row of ``files``."""

    id: str
    # name of the API key that owns it; "" without keys
    owner: str
    # as the caller named it: shown, never used as a path
    filename: str
    # "batch" or "batch_output"
    purpose: str
    size: int
    # unix time
    created_at: int

    def json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A row of ``batches``."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    # as the caller gave it, such as "24h"
    window: str
    status: str
    created_at: int
    expires_at: int
    # unix time at which each status was reached
    times: Mapping[str, int]
    metadata: Mapping[str, str] | None
    # entries of errors.data
    errors: tuple[Mapping[str, Any], ...]
    # requests in the input; 0 until that is known
    total: int
    completed: int
    failed: int
    # bytes of answers that are not in a file yet
    pending_bytes: int
    output_file_id: str | None
    error_file_id: str | None
    # lines that ran when the engine died, and how often each did
    suspects: Mapping[int, int]

    def json(self, trouble: str | None = None) -> dict[str, Any]:
        """Return OpenAI's batch object.

        Args:
            trouble: why the batch is paused for now.
        """
        errors = list(self.errors)
        if trouble is not None:
            errors.append({"code": "paused", "message": trouble, "param": None, "line": None})
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{
                f"{status}_at": self.times.get(status)
                for status in ("in_progress", "finalizing", "cancelling", *ENDED)
            },
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": None if self.metadata is None else dict(self.metadata),
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Batch:
        """Return the batch of a row of SQLite, whose JSON columns are parsed."""
        values = dict(row)
        for name in ("times", "metadata", "errors"):
            values[name] = json.loads(values[name])
        values["errors"] = tuple(values["errors"])
        suspects = json.loads(values["suspects"])
        values["suspects"] = {int(line): count for line, count in suspects.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Result:
    """The record of one line of a batch."""

    batch_id: str
    # number of the line in the input
    line: int
    failed: bool
    # a line of the output or of the error file, without the newline
    record: bytes
