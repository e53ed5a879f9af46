"""A file uploaded as ``multipart/form-data``, written straight to disk.

Only one buffer of it is in memory at a time. The caller's file name is shown, never used as a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from paceline.errors import InvalidRequestError
from paceline.http.errors import ClientDisconnectedError, HttpError
from paceline.http.fields import show
from paceline.server.batches.folder import Batches
from paceline.server.batches.records import StoredFile
from paceline.server.batches.store import BatchStore

__all__ = ["PURPOSES", "upload_file"]

# purposes of files that can be uploaded
PURPOSES: Final = ("batch",)
_FIELDS: Final = ("purpose", "file")
# bytes buffered before a write
_BUFFER: Final = 2**20
# bytes of a body in addition to the file: names, boundaries, the other field
_OVERHEAD: Final = 64 * 2**10
_MAX_VALUE: Final = 256
_MAX_BOUNDARY: Final = 256
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")


async def upload_file(batches: Batches, request: Request, owner: str) -> StoredFile:
    """Read the request's body and store its file.

    Raises:
        InvalidRequestError: not such a form, or a bad purpose.
        HttpError: 413 for a file that is too large or does not fit; or as ``Batches.settings``.
        ClientDisconnectedError: the caller hung up halfway.
    """
    max_bytes = batches.settings.max_file_bytes
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= _MAX_BOUNDARY:
        raise InvalidRequestError(
            "a file is uploaded as multipart/form-data with the fields purpose and file"
        )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes + _OVERHEAD:
        raise _too_long(max_bytes, f"a body of {declared[:20]} bytes")
    form = _Form(boundary)
    part = await batches.call(BatchStore.begin_upload)
    try:
        received, more = 0, True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            data, more = message.get("body", b""), message.get("more_body", False)
            received += len(data)
            form.feed(data)
            if part.size + len(form.content) > max_bytes or received > max_bytes + _OVERHEAD:
                raise _too_long(max_bytes, f"more than {max_bytes} bytes")
            if len(form.content) >= _BUFFER or not more:
                await batches.call(BatchStore.write, part, bytes(form.content))
                form.content.clear()
        filename = form.finish()
        return await batches.call(
            BatchStore.keep, part, owner=owner, filename=filename, now=batches.clock()
        )
    except BaseException:
        await batches.call(BatchStore.drop, part)
        raise


def _too_long(limit: int, got: str) -> HttpError:
    return HttpError(413, f"a file may have {limit} bytes, got {got}")


@dataclass(slots=True)
class _Part:
    """The headers of one part."""

    name: str = ""
    filename: str | None = None


class _Form:
    """The two fields of an upload; the file's bytes collect in ``content``."""

    def __init__(self, boundary: bytes) -> None:
        self.content = bytearray()
        self._filename: str | None = None
        self._values: dict[str, bytearray] = {}
        self._part = _Part()
        self._header = (bytearray(), bytearray())
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_content,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse more of the body. Raises InvalidRequestError if it is not such a form."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequestError(
                f"the body is not valid multipart/form-data: {error}"
            ) from None

    def finish(self) -> str:
        """Return the file's name after the whole body. Raises InvalidRequestError if incomplete."""
        if not self._ended:
            raise InvalidRequestError("the multipart/form-data body ends too early")
        if "purpose" not in self._values:
            raise InvalidRequestError("purpose is missing", "purpose")
        if self._filename is None:
            raise InvalidRequestError("file is missing", "file")
        return self._filename

    def _begin(self) -> None:
        self._part = _Part()

    def _add_header(self, index: int, data: bytes) -> None:
        self._header[index].extend(data)

    def _end_header(self) -> None:
        name, value = (bytes(part) for part in self._header)
        for part in self._header:
            part.clear()
        if name.lower() != b"content-disposition":
            return
        _, options = parse_options_header(value)
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            self._part.filename = options[b"filename"].decode("utf-8", "replace")

    def _begin_content(self) -> None:
        part = self._part
        if part.name not in _FIELDS:
            raise InvalidRequestError(
                f"an upload has the fields purpose and file; {show(part.name)} is not served",
                part.name[:64],
            )
        if part.name in self._values or (part.name == "file" and self._filename is not None):
            raise InvalidRequestError(f"{part.name} is there twice", part.name)
        if part.name == "file":
            if part.filename is None:
                raise InvalidRequestError("file must be a file, with a file name", "file")
            name = _UNPRINTABLE.sub("", re.split(r"[/\\]", part.filename)[-1])
            self._filename = name[:255] or "file"
        else:
            self._values[part.name] = bytearray()

    def _add(self, data: bytes) -> None:
        if self._part.name == "file":
            self.content += data
            return
        value = self._values[self._part.name]
        value += data
        if len(value) > _MAX_VALUE:
            raise InvalidRequestError(
                f"{self._part.name} has more than {_MAX_VALUE} bytes", self._part.name
            )

    def _end(self) -> None:
        self._ended = True
        purpose = self._values.get("purpose")
        if purpose is not None and purpose.decode("utf-8", "replace") not in PURPOSES:
            raise InvalidRequestError(
                f"purpose must be {' or '.join(PURPOSES)}, got "
                f"{show(purpose.decode('utf-8', 'replace'))}",
                "purpose",
            )
