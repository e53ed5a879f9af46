"""Readers of public trace formats. Lengths, times and identities only; nobody's text is in them.

CSV, told apart by the header:

======== ============================================================ ===================
format   header                                                       published with
======== ============================================================ ===================
azure    TIMESTAMP, ContextTokens, GeneratedTokens (2023: local       Splitwise (ISCA'24),
         times; 2024: times with a zone), or the same in seconds:     DynamoLLM (HPCA'25)
         arrived_at_s, prompt_tokens, output_tokens
burstgpt Timestamp, Model, Request tokens, Response tokens, ...       BurstGPT (KDD'25)
arena    arrived_at_s, client, prompt_tokens, output_tokens           VTC (OSDI'24)
lengths  prompt_tokens, output_tokens, or num_prefill_tokens,         Vidur (MLSys'24)
         num_decode_tokens: no times
======== ============================================================ ===================

JSON lines: ``mooncake`` has timestamp (milliseconds), input_length, output_length and hash_ids,
one for each 512 tokens of prompt (Mooncake, FAST'25); equal ids are equal tokens. ``recording`` is
what ``paceline serve --record`` wrote: the requests that it answered (read whole, not streamed).

Rows with 0 prompt or output tokens are requests that failed; they are left out. Times start at the
first row's. Stamps that go backwards are an error: a stream cannot be sorted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from paceline.sim.arrival import Arrival
from paceline.sim.recording import Recording
from paceline.sim.workload.base import WorkloadError

__all__ = ["MOONCAKE_BLOCK", "Trace", "open_trace", "read_lengths"]

# what a file of gzip begins with
_GZIP = b"\x1f\x8b"
# tokens that one of Mooncake's hash_ids stands for
MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file whose format was recognised; ``arrivals`` reads it from the start."""

    # "azure", "burstgpt", "arena", "lengths", "mooncake" or "recording"
    format: str
    prefix_block: int
    # no times: ``at`` is 0 in every arrival
    timeless: bool
    arrivals: Callable[[], Iterator[Arrival]]


@dataclass(frozen=True, slots=True)
class _Columns:
    """A CSV layout: the header's names for what we need."""

    format: str
    prompt: str
    output: str
    time: str | None = None
    tenant: str | None = None
    model: str | None = None

    def names(self) -> list[str]:
        every = (self.time, self.prompt, self.output, self.tenant, self.model)
        return [name for name in every if name is not None]


# a layout matches when its columns are there; the first that does is taken
_LAYOUTS = (
    _Columns("azure", "ContextTokens", "GeneratedTokens", time="TIMESTAMP"),
    _Columns("burstgpt", "Request tokens", "Response tokens", time="Timestamp", model="Model"),
    _Columns("arena", "prompt_tokens", "output_tokens", time="arrived_at_s", tenant="client"),
    _Columns("azure", "prompt_tokens", "output_tokens", time="arrived_at_s"),
    _Columns("azure", "num_prefill_tokens", "num_decode_tokens", time="arrived_at"),
    _Columns("lengths", "prompt_tokens", "output_tokens"),
    _Columns("lengths", "num_prefill_tokens", "num_decode_tokens"),
)


def open_trace(path: Path) -> Trace:
    """Recognise a file by its first line.

    Raises:
        WorkloadError: it cannot be read, or is in no known format; the message lists them.
    """
    with _opened(path) as file:
        first = file.readline(1 << 20)
        is_json = first.lstrip().startswith("{")
        header = [] if is_json else next(csv.reader([first]), [])
    if is_json:
        return _json_trace(path, first)
    names = {name.strip() for name in header}
    for layout in _LAYOUTS:
        if names.issuperset(layout.names()):
            start = partial(_read_csv, path, layout)
            return Trace(layout.format, MOONCAKE_BLOCK, layout.time is None, start)
    known = "; ".join(f"{x.format}: {', '.join(x.names())}" for x in _LAYOUTS)
    raise WorkloadError(
        f"{path}:1: not a known trace: the columns are {', '.join(header) or 'missing'}; "
        f"known are {known}; mooncake: JSON lines with timestamp, input_length, output_length"
    )


def _json_trace(path: Path, first: str) -> Trace:
    row = _parse_json(first, f"{path}:1")
    if "input_length" in row:
        return Trace("mooncake", MOONCAKE_BLOCK, False, partial(_read_mooncake, path))
    if "paceline_recording" in row:
        return Trace("recording", MOONCAKE_BLOCK, False, partial(_read_recording, path))
    raise WorkloadError(
        f"{path}:1: not a known trace: the fields are {', '.join(map(str, row))}; known are "
        "mooncake: timestamp, input_length, output_length, hash_ids; recording: paceline_recording"
    )


def _read_recording(path: Path) -> Iterator[Arrival]:
    return Recording.read(path).workload()


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every row of any trace, in order; 16 bytes a row and more."""
    pairs = [(a.prompt_tokens, a.output_tokens) for a in open_trace(path).arrivals()]
    if not pairs:
        raise WorkloadError(f"{path}: has no rows with tokens")
    return pairs


# ---------------------------------------------------------------------- CSV


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """The file as text; what it cannot be read for becomes a WorkloadError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if cast(BufferedReader, file.buffer).peek(2)[:2] == _GZIP:
                raise WorkloadError(f"{path}: is compressed; unpack it first: gunzip -k {path}")
            yield file
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error


def _read_csv(path: Path, columns: _Columns) -> Iterator[Arrival]:
    with _opened(path) as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows)]
        prompt_index, output_index = header.index(columns.prompt), header.index(columns.output)
        time_index = header.index(columns.time) if columns.time else None
        tenant_index = header.index(columns.tenant) if columns.tenant else None
        model_index = header.index(columns.model) if columns.model else None
        needed = 1 + max(header.index(name) for name in columns.names())
        clock = _Clock()
        for row in rows:
            if not row:
                continue
            where = f"{path}:{rows.line_num}"
            # a comma too many moves the columns behind it, unless all that is there is commas
            if len(row) < needed or any(row[len(header) :]):
                raise WorkloadError(
                    f"{where}: has {len(row)} columns, expected {len(header)}: {', '.join(header)}"
                )
            prompt = _tokens(row[prompt_index], columns.prompt, where)
            output = _tokens(row[output_index], columns.output, where)
            at = 0.0
            if time_index is not None:
                at = clock.at(_stamp(row[time_index], columns.time, where), where)
            if prompt == 0 or output == 0:
                continue
            yield Arrival(
                at,
                prompt,
                output,
                tenant="" if tenant_index is None else row[tenant_index].strip(),
                model="" if model_index is None else row[model_index].strip(),
            )


class _Clock:
    """Seconds since the first stamp; refuses to go backwards."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def at(self, stamp: float, where: str) -> float:
        if self._first is None:
            self._first = stamp
        at = stamp - self._first
        if at < self._last:
            raise WorkloadError(
                f"{where}: {at:.6f} s after the first row, but the row before came at "
                f"{self._last:.6f} s; sort the file by time"
            )
        self._last = at
        return at


def _tokens(text: str, name: str, where: str) -> int:
    try:
        value = float(text)
        if value != int(value) or value < 0:
            raise ValueError
    except (ValueError, OverflowError):
        raise WorkloadError(
            f"{where}: {name} is {text!r}, expected a whole number of tokens, 0 or more"
        ) from None
    return int(value)


def _stamp(text: str, name: str | None, where: str) -> float:
    """Seconds, from a number or a date with a time."""
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise WorkloadError(
                f"{where}: {name} is {text!r}, expected seconds or a date and time such as "
                "2023-11-16 18:01:51.921"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    if not abs(value) < 1e15:
        raise WorkloadError(f"{where}: {name} is {text!r}, expected finite seconds")
    return value


# ---------------------------------------------------------------------- JSON lines


def _read_mooncake(path: Path) -> Iterator[Arrival]:
    clock = _Clock()
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _parse_json(line, where)
            stamp: Any = row.get("timestamp")
            # not isinstance: True is no time
            if type(stamp) not in (int, float) or not abs(stamp) < 1e18:
                raise WorkloadError(f"{where}: timestamp is {stamp!r}, expected milliseconds")
            at = clock.at(stamp / 1e3, where)
            prompt = _whole(row, "input_length", where)
            output = _whole(row, "output_length", where)
            if prompt and output:
                yield Arrival(at, prompt, output, prefix=_prefix(row, prompt, where))


def _prefix(row: Mapping[str, Any], prompt: int, where: str) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise WorkloadError(f"{where}: hash_ids is {ids!r}, expected a list of whole numbers")
    if len(ids) > -(-prompt // MOONCAKE_BLOCK):
        raise WorkloadError(
            f"{where}: {len(ids)} hash_ids, but {prompt} tokens are at most "
            f"{-(-prompt // MOONCAKE_BLOCK)} pieces of {MOONCAKE_BLOCK}"
        )
    return tuple(ids)


def _parse_json(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _whole(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 0:
        raise WorkloadError(
            f"{where}: {name} is {value!r}, expected a whole number of tokens, 0 or more"
        )
    return value
