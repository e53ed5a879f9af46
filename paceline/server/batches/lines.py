"""The lines of a batch, for ``/v1/batches`` and ``paceline generate``: JSON lines in and out.

Each non-blank input line is one request, in one of three forms::

    {"prompt": "Once upon a time", "max_tokens": 64}
    {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

The first two forms, for the command only, may carry a ``custom_id`` too.

This module does not know how a request is answered, nor where lines are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final

import msgspec

from paceline.errors import InvalidRequestError
from paceline.http.bounds import Bounds, check_json_depth, check_json_items
from paceline.http.fields import decode_object, show
from paceline.server.protocol.responses import encode

__all__ = [
    "Answer",
    "BatchLine",
    "LineReader",
    "bounded_lines",
    "find_faults",
    "openai_record",
    "read_lines",
    "unanswered_record",
]

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
MAX_CUSTOM_ID_CHARS: Final = 512
# maximum faults reported for one file
_MAX_FAULTS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch, or the error of its line."""

    # number of the line in the input, from 0, blank lines counted
    index: int
    # custom_id as given, or None
    custom_id: str | None
    # first 16 hex digits of the line's SHA-256
    digest: str
    # bytes of the line
    size: int = 0
    # endpoint and body; "" and {} when error is set
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    # the line was {custom_id, method, url, body}
    is_openai: bool = False
    error: str | None = None
    # the error's code, for programs
    code: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the request across runs of the command: its ``custom_id``, else line number
        and digest, so that answers to another input are noticed, not reused."""
        if self.custom_id is not None:
            return ("id", self.custom_id)
        return (str(self.index), self.digest)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one line."""

    # HTTP status
    status: int
    # JSON
    body: bytes
    request_id: str


class _Fault(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def bounded_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file; of a longer line, only its first ``max_bytes`` + 1 bytes."""
    while line := file.readline(max_bytes + 1):
        rest = line
        while len(rest) > max_bytes and not rest.endswith(b"\n"):
            rest = file.readline(max_bytes + 1)
        yield line


def read_lines(
    source: Iterable[bytes],
    urls: Collection[str],
    *,
    max_bytes: int | None = None,
    bounds: Bounds | None = None,
) -> Iterator[BatchLine]:
    """Parse input lines one at a time; a bad line becomes a BatchLine with ``error``.

    Args:
        urls: endpoints that a line of the third form may name.
        max_bytes: maximum size of one line.
        bounds: bounds of one body, as over HTTP; None: the caller's own lines, without bounds.
    """
    lines = LineReader(urls, max_bytes=max_bytes, bounds=bounds)
    for raw in source:
        line = lines.read(raw)
        if line is not None:
            yield line


class LineReader:
    """Reads the lines of one input, given one at a time; see ``read_lines``."""

    def __init__(
        self,
        urls: Collection[str],
        *,
        max_bytes: int | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._urls, self._max_bytes, self._bounds = urls, max_bytes, bounds
        self._seen: dict[str, int] = {}
        self._count = 0

    def read(self, raw: bytes) -> BatchLine | None:
        """Return the next line of the input; None for a blank one."""
        index, self._count = self._count, self._count + 1
        text = raw.strip()
        if not text:
            return None
        digest = hashlib.sha256(text).hexdigest()[:16]
        line = BatchLine(index=index, custom_id=None, digest=digest, size=len(text))
        try:
            if self._max_bytes is not None and len(text) > self._max_bytes:
                raise _Fault("line_too_long", f"a line may have {self._max_bytes} bytes")
            value = _decode(text, self._bounds)
            line = replace(line, custom_id=_custom_id(value, index, self._seen))
            line = _with_request(line, value, self._urls)
            if self._bounds is not None:
                _check_depth(line.body, self._bounds)
        except _Fault as fault:
            line = replace(line, error=str(fault), code=fault.code)
        return line


def _decode(text: bytes, bounds: Bounds | None) -> dict[str, Any]:
    try:
        if bounds is not None:
            check_json_items(text, bounds.max_json_items, "it")
        return decode_object(text, "it")
    except InvalidRequestError as error:
        raise _Fault("invalid_json_line", str(error)) from None


def _check_depth(body: dict[str, Any], bounds: Bounds) -> None:
    try:
        check_json_depth(body, bounds.max_json_depth, "body")
    except InvalidRequestError as error:
        raise _Fault("invalid_body", str(error)) from None


def _custom_id(value: dict[str, Any], index: int, seen: dict[str, int]) -> str | None:
    custom_id = value.pop("custom_id", None)
    if custom_id is None:
        return None
    if not isinstance(custom_id, str) or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise _Fault(
            "invalid_custom_id",
            f"custom_id must be a string of up to {MAX_CUSTOM_ID_CHARS} characters, got "
            f"{show(custom_id)}",
        )
    # a second line must not get the record of the first, whose answer differs
    first = seen.setdefault(custom_id, index)
    if first != index:
        raise _Fault(
            "duplicate_custom_id",
            f"custom_id {show(custom_id)} is already that of line {first + 1}",
        )
    return custom_id


def _with_request(line: BatchLine, value: dict[str, Any], urls: Collection[str]) -> BatchLine:
    if "body" in value:
        url, body, method = value.get("url"), value["body"], value.get("method", "POST")
        if not isinstance(url, str) or url not in urls or method != "POST":
            raise _Fault(
                "invalid_url",
                f"only POST to {', '.join(urls)}, got {show(method)} {show(url)}",
            )
        if not isinstance(body, dict):
            raise _Fault("invalid_body", f"body must be an object, got {type(body).__name__}")
    elif "messages" in value and "prompt" not in value:
        url, body = CHAT_URL, value
    elif "prompt" in value and "messages" not in value:
        url, body = COMPLETIONS_URL, value
    else:
        raise _Fault("invalid_line", "a line needs exactly one of 'prompt', 'messages' or 'body'")
    if body.get("stream") or body.get("background"):
        raise _Fault("invalid_body", "stream and background are not for batches: leave them out")
    return replace(line, url=url, body=body, is_openai="body" in value)


def find_faults(
    lines: Iterable[BatchLine], endpoint: str, max_lines: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of requests of a batch's input, and its first hundred faults, as entries of
    ``errors.data`` of OpenAI's batch object."""
    count = 0
    faults: list[dict[str, Any]] = []

    def add(code: str, message: str, param: str | None, number: int | None) -> None:
        faults.append({"code": code, "message": message, "param": param, "line": number})

    for line in lines:
        count += 1
        number = line.index + 1
        if count > max_lines:
            add("too_many_requests", f"a batch may have {max_lines} requests", None, None)
        elif line.error is not None:
            add(line.code or "invalid_line", line.error, None, number)
        elif not line.is_openai:
            what = "custom_id, method, url and body are needed"
            add("missing_required_parameter", what, "body", number)
        elif line.custom_id is None:
            add("missing_required_parameter", "custom_id is missing", "custom_id", number)
        elif line.url != endpoint:
            what = f"the batch is for {endpoint}, this line for {line.url}"
            add("mismatched_url", what, "url", number)
        if len(faults) >= _MAX_FAULTS or count > max_lines:
            break
    if not count:
        add("empty_file", "the input file has no requests", "input_file_id", None)
    return count, faults


def openai_record(line: BatchLine, record_id: str, answer: Answer) -> dict[str, Any]:
    """Return the record of an answered line of the third form; ``encode`` makes JSON of it."""
    return {
        "id": record_id,
        "custom_id": line.custom_id,
        "response": {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": msgspec.Raw(answer.body),
        },
        "error": None,
    }


def unanswered_record(line: BatchLine, record_id: str, code: str, message: str) -> bytes:
    """Return the JSON record of a line that was never answered."""
    error = {"code": code, "message": message}
    return encode({"id": record_id, "custom_id": line.custom_id, "response": None, "error": error})
