"""Readers of public trace formats. They read lengths, times and identities, and no texts.

CSV, recognised by the header:

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
one for each 512 tokens of prompt (Mooncake, FAST'25); equal ids are equal tokens. ``bailian`` is
the same with chat_id, in seconds and with 16 tokens per hash (Qwen-Bailian usage traces, ATC'25).
``recording`` is a file of ``paceline serve --record``: the requests that it answered (read whole,
not streamed).

Rows with 0 prompt or output tokens are requests that failed; they are left out. Times start at the
first row's. Stamps that go backwards are an error: a stream cannot be sorted. Stamps in another
unit than a format's would make a thousand times the load, or a thousandth: those that can only be
in another unit are an error, and ``Trace.doubt`` reports an unlikely rate. A unit that the caller
names is not doubted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, cast

from paceline.sim.arrival import Arrival
from paceline.sim.recording import Recording
from paceline.sim.workload.base import WorkloadError

__all__ = ["MOONCAKE_BLOCK", "Trace", "open_trace", "read_lengths"]

# first bytes of a gzip file
_GZIP = b"\x1f\x8b"
# tokens per hash_id of Mooncake, and of Bailian
MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16
# units of stamps by name, and their number in a second
_UNITS: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_NAMED: Final = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# seconds since 1970 of times from 2001 to 2286: no time has the same number in another unit
_EPOCH: Final = (1e9, 1e10)
# requests per second below and above which a trace's unit is doubted
_SLOWEST: Final = 0.01
_FASTEST: Final = 10.0
# number of rows that ``Trace.doubt`` reads
_JUDGED: Final = 1000


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file in a known format; ``arrivals`` reads it from the start."""

    # "azure", "burstgpt", "arena", "lengths", "mooncake", "bailian" or "recording"
    format: str
    prefix_block: int
    # whether the file has no times: ``at`` is 0 in every arrival
    timeless: bool
    arrivals: Callable[[], Iterator[Arrival]]
    # unit assumed because it is the format's; "" where the caller named one
    assumed: str = ""

    def doubt(self) -> str:
        """Say why its stamps may be in another unit, with the numbers; "" without any sign."""
        if not self.assumed:
            return ""
        last, count = 0.0, 0
        # an error in a row is raised when the row is read
        with suppress(WorkloadError):
            for arrival in islice(self.arrivals(), _JUDGED):
                last, count = arrival.at, count + 1
        rate = (count - 1) / last if last else 1.0
        if _SLOWEST <= rate <= _FASTEST:
            return ""
        other = "ms" if rate < _SLOWEST else "s"
        if other == self.assumed:
            return ""
        return (
            f"{count} requests come in {last:g} s, {rate:g} a second, if stamps are "
            f"{_NAMED[self.assumed]}; they may be {_NAMED[other]}"
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Choice of what to read of a file."""

    # unit of stamps; "": the format's
    unit: str = ""
    # tokens per hash; None: the format's
    block: int | None = None
    # if false, every arrival's time is 0 and stamps are not read
    timed: bool = True
    # if false, arrivals have no prefix and hashes are not read
    hashed: bool = True


@dataclass(frozen=True, slots=True)
class _Columns:
    """A CSV layout: the header's names of the columns that are read."""

    format: str
    prompt: str
    output: str
    time: str | None = None
    tenant: str | None = None
    model: str | None = None

    def names(self) -> list[str]:
        every = (self.time, self.prompt, self.output, self.tenant, self.model)
        return [name for name in every if name is not None]


# a layout matches when all its columns exist; the first match is taken
_LAYOUTS = (
    _Columns("azure", "ContextTokens", "GeneratedTokens", time="TIMESTAMP"),
    _Columns("burstgpt", "Request tokens", "Response tokens", time="Timestamp", model="Model"),
    _Columns("arena", "prompt_tokens", "output_tokens", time="arrived_at_s", tenant="client"),
    _Columns("azure", "prompt_tokens", "output_tokens", time="arrived_at_s"),
    _Columns("azure", "num_prefill_tokens", "num_decode_tokens", time="arrived_at"),
    _Columns("lengths", "prompt_tokens", "output_tokens"),
    _Columns("lengths", "num_prefill_tokens", "num_decode_tokens"),
)


def open_trace(
    path: Path, *, unit: str = "", block: int | None = None, timed: bool = True
) -> Trace:
    """Recognise a file by its first line.

    Args:
        unit: of its stamps: s, ms, us or ns; "": the format's.
        block: tokens per hash_id; None: the format's.
        timed: False where no times are wanted: they are all 0.

    Raises:
        WorkloadError: it cannot be read, or is in no known format; the message lists them. Or it
            has no stamps for ``unit``, or no hashes for ``block``.
    """
    if unit and unit not in _UNITS:
        raise WorkloadError(f"unit is {unit!r}; known are {', '.join(_UNITS)}")
    if block is not None and block < 1:
        raise WorkloadError(f"block must be at least 1 token, got {block}")
    return _open(path, _Reading(unit, block, timed))


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Return (prompt, output) tokens of a trace's rows, in order; at least 16 bytes per row."""
    trace = _open(path, _Reading(timed=False, hashed=False))
    pairs = [(a.prompt_tokens, a.output_tokens) for a in trace.arrivals()]
    if not pairs:
        raise WorkloadError(f"{path}: has no rows with tokens")
    return pairs


def _open(path: Path, reading: _Reading) -> Trace:
    with _opened(path) as file:
        first = file.readline(1 << 20)
        is_json = first.lstrip().startswith("{")
        header = [] if is_json else next(csv.reader([first]), [])
        row = [] if is_json else next(filter(None, csv.reader([file.readline(1 << 20)])), [])
    if is_json:
        return _json_trace(path, first, reading)
    names = [name.strip() for name in header]
    for layout in _LAYOUTS:
        if set(names).issuperset(layout.names()):
            return _csv_trace(path, layout, names, row, reading)
    known = "; ".join(f"{x.format}: {', '.join(x.names())}" for x in _LAYOUTS)
    raise WorkloadError(
        f"{path}:1: not a known trace: the columns are {', '.join(header) or 'missing'}; "
        f"known are {known}; mooncake and bailian: JSON lines with timestamp, input_length, "
        "output_length"
    )


def _csv_trace(
    path: Path, layout: _Columns, names: list[str], row: list[str], reading: _Reading
) -> Trace:
    """Make a trace from a header's ``names`` and the first ``row``."""
    timeless = layout.time is None
    dated = False
    if layout.time is not None and len(row) > names.index(layout.time):
        dated = not _is_number(row[names.index(layout.time)])
    if reading.block is not None:
        raise WorkloadError(f"{path}: block= is of hash_ids, and {layout.format} has none")
    if reading.unit and (timeless or dated):
        what = "dates" if dated else "no times"
        raise WorkloadError(f"{path}: unit= is of numbers, and this trace has {what}")
    start = partial(_read_csv, path, layout, reading)
    assumed = "" if timeless or dated or reading.unit or not reading.timed else "s"
    return Trace(layout.format, MOONCAKE_BLOCK, timeless, start, assumed)


def _json_trace(path: Path, first: str, reading: _Reading) -> Trace:
    row = _parse_json(first, f"{path}:1")
    if "input_length" in row:
        bailian = "chat_id" in row
        name, unit = ("bailian", "s") if bailian else ("mooncake", "ms")
        block = reading.block or (_BAILIAN_BLOCK if bailian else MOONCAKE_BLOCK)
        start = partial(_read_lines, path, unit, block, reading)
        assumed = unit if reading.timed and not reading.unit else ""
        return Trace(name, block, False, start, assumed)
    if "paceline_recording" in row:
        if reading.unit or reading.block:
            raise WorkloadError(f"{path}: a recording says itself in which unit and blocks it is")
        return Trace("recording", MOONCAKE_BLOCK, False, partial(_read_recording, path))
    raise WorkloadError(
        f"{path}:1: not a known trace: the fields are {', '.join(map(str, row))}; known are "
        "mooncake: timestamp, input_length, output_length, hash_ids; bailian: the same and "
        "chat_id; recording: paceline_recording"
    )


def _read_recording(path: Path) -> Iterator[Arrival]:
    return Recording.read(path).workload()


# ---------------------------------------------------------------------- CSV


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open the file as text; errors of reading it become a WorkloadError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if cast(BufferedReader, file.buffer).peek(2)[:2] == _GZIP:
                raise WorkloadError(f"{path}: is compressed; unpack it first: gunzip -k {path}")
            yield file
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error


def _read_csv(path: Path, columns: _Columns, reading: _Reading) -> Iterator[Arrival]:
    with _opened(path) as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows)]
        prompt_index, output_index = header.index(columns.prompt), header.index(columns.output)
        time_index = header.index(columns.time) if columns.time and reading.timed else None
        tenant_index = header.index(columns.tenant) if columns.tenant else None
        model_index = header.index(columns.model) if columns.model else None
        needed = 1 + max(header.index(name) for name in columns.names())
        clock = _Clock(columns.time or "", "s", reading.unit)
        for row in rows:
            if not row:
                continue
            where = f"{path}:{rows.line_num}"
            # one comma too many moves the columns behind it, unless all additional ones are empty
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
    """Seconds since the first stamp; refuses stamps that go backwards or have another unit.

    Args:
        name: name of the stamps, for messages.
        assumed: the format's unit.
        unit: the one that was asked for; "": none.
    """

    def __init__(self, name: str, assumed: str, unit: str) -> None:
        self._name = name
        self._assumed = "" if unit else assumed
        self._unit = unit or assumed
        self._first: float | None = None
        self._last = 0.0

    def at(self, stamp: float | datetime, where: str) -> float:
        if isinstance(stamp, datetime):
            seconds = stamp.timestamp()
        else:
            if self._assumed:
                self._doubt(stamp, where)
            seconds = stamp / _UNITS[self._unit]
        if not abs(seconds) < 1e15:
            raise WorkloadError(
                f"{where}: {self._name} is '{stamp}', expected finite {_NAMED[self._unit]}"
            )
        if self._first is None:
            self._first = seconds
        at = seconds - self._first
        if at < self._last:
            raise WorkloadError(
                f"{where}: {at:.6f} s after the first row, but the row before came at "
                f"{self._last:.6f} s; sort the file by time"
            )
        self._last = at
        return at

    def _doubt(self, stamp: float, where: str) -> None:
        """Raise WorkloadError where a stamp is in another unit than the format's."""
        unit = self._assumed
        if unit == "ms" and stamp != stamp // 1:
            raise WorkloadError(
                f"{where}: {self._name} is {stamp!r}, and fractions of a millisecond are a sign of "
                "seconds: say unit=s, or unit=ms where they are milliseconds"
            )
        if self._first is not None:
            return
        for other, per_second in _UNITS.items():
            if other != unit and _EPOCH[0] <= stamp / per_second < _EPOCH[1]:
                raise WorkloadError(
                    f"{where}: {self._name} is {stamp!r}, which is a moment of our time in "
                    f"{_NAMED[other]}, not in {_NAMED[unit]}: say unit={other}, or unit={unit} "
                    f"where it is in {_NAMED[unit]}"
                )


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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _stamp(text: str, name: str | None, where: str) -> float | datetime:
    """Parse a number, or a date with a time."""
    if _is_number(text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise WorkloadError(
            f"{where}: {name} is {text!r}, expected seconds or a date and time such as "
            "2023-11-16 18:01:51.921"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# ---------------------------------------------------------------------- JSON lines


def _read_lines(path: Path, assumed: str, block: int, reading: _Reading) -> Iterator[Arrival]:
    """Yield the arrivals of Mooncake's lines, or similar ones; ``assumed`` is the format's unit."""
    clock = _Clock("timestamp", assumed, reading.unit)
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _parse_json(line, where)
            at = 0.0
            if reading.timed:
                stamp: Any = row.get("timestamp")
                # not isinstance: True is not a time
                if type(stamp) not in (int, float) or not abs(stamp) < 1e20:
                    known = _NAMED[reading.unit or assumed]
                    raise WorkloadError(f"{where}: timestamp is {stamp!r}, expected {known}")
                at = clock.at(stamp, where)
            prompt = _whole(row, "input_length", where)
            output = _whole(row, "output_length", where)
            prefix = _prefix(row, prompt, block, where) if reading.hashed else ()
            if prompt and output:
                yield Arrival(at, prompt, output, prefix=prefix)


def _prefix(row: Mapping[str, Any], prompt: int, block: int, where: str) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(x) is int for x in ids):
        raise WorkloadError(f"{where}: hash_ids is {ids!r}, expected a list of whole numbers")
    if len(ids) > -(-prompt // block):
        fits = [size for size in (2**n for n in range(12)) if -(-prompt // size) == len(ids)]
        say = fits[-1] if fits else "TOKENS"
        raise WorkloadError(
            f"{where}: {len(ids)} hash_ids, but {prompt} tokens are at most "
            f"{-(-prompt // block)} pieces of {block}; say block={say} where each stands for "
            f"{'so many' if fits else 'another number of'} tokens"
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
