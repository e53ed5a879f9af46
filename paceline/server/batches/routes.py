"""``/v1/files`` and ``/v1/batches``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, BinaryIO, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.errors import InvalidRequestError
from paceline.http.fields import check_object, check_string, show
from paceline.server.batches.answering import URLS
from paceline.server.batches.folder import Batches
from paceline.server.batches.records import Batch
from paceline.server.batches.store import BatchStore
from paceline.server.batches.upload import PURPOSES, upload_file
from paceline.server.generation.service import Service
from paceline.server.protocol import schemas
from paceline.server.protocol.body import Body, schema_of
from paceline.server.protocol.field_types import described, needed, refused, string
from paceline.server.protocol.rules import RequestRules
from paceline.server.transport.middleware import principal_of, read_object
from paceline.server.transport.responses import Routes, encoded

__all__ = ["BatchBody", "batch_router"]

_PIECE: Final = 256 * 2**10
_MAX_PAGE: Final = {"files": 10_000, "batches": 100}
_PAGE: Final = {"files": 1000, "batches": 20}
_PURPOSES_LISTED: Final = (*PURPOSES, "batch_output")
_WINDOW: Final = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW: Final = 30 * 86_400
_MAX_METADATA: Final = 16
_ENDPOINTS: Final = f"must be one of {', '.join(URLS)}"
_WINDOWS: Final = "must be a time such as 24h, 90m or 2d, 30 days at most"

_FORM_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


def _json_body(schema: schemas.Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _query(kind: str, **more: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a list, as ``_page`` reads them."""
    limit = {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE[kind], "default": _PAGE[kind]}
    parameters = {"after": {"type": "string"}, "limit": limit, **more}
    return {
        "parameters": [
            {"name": name, "in": "query", "schema": schema} for name, schema in parameters.items()
        ]
    }


def _endpoint(value: Any, name: str, _: RequestRules) -> str:
    if check_string(value, name, 1, 256) not in URLS:
        raise InvalidRequestError(f"{name} {_ENDPOINTS}, got {show(value)}", name)
    return str(value)


def _window(value: Any, name: str, _: RequestRules) -> tuple[str, int]:
    """Return the window as given, and in seconds."""
    match = _WINDOW.fullmatch(check_string(value, name, 1, 16))
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW:
        raise InvalidRequestError(f"{name} {_WINDOWS}, got {show(value)}", name)
    return value, seconds


def _metadata(value: Any, name: str, _: RequestRules) -> dict[str, str]:
    metadata = check_object(value, name)
    if len(metadata) > _MAX_METADATA or not all(
        len(key) <= 64 and isinstance(text, str) and len(text) <= 512
        for key, text in metadata.items()
    ):
        raise InvalidRequestError(
            f"{name} has up to {_MAX_METADATA} strings of up to 512 characters, under names of "
            "up to 64",
            name,
        )
    return metadata


class BatchBody(Body, refuses_unknown="{names}: unknown here"):
    """``POST /v1/batches``."""

    input_file_id = needed(string(1, 256))
    endpoint = needed(
        described(_endpoint, schemas.string(*URLS)),
        f"{_ENDPOINTS}, got None",
        note="chat, completions, responses, generate",
    )
    completion_window = needed(
        described(_window, {"type": "string", "pattern": f"^{_WINDOW.pattern}$"}),
        f"{_WINDOWS}, got None",
        note="`24h`, or any time up to 30 days: `90m`, `2d`",
    )
    metadata = described(
        _metadata,
        {
            "type": "object",
            "maxProperties": _MAX_METADATA,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": schemas.string(high=512),
        },
    )
    output_expires_after = refused(
        " is not served yet: files are kept", (), note="files are kept until they are deleted"
    )


def batch_router(service: Service, batches: Batches) -> Routes:
    routes = Routes(service)

    async def shown(batch: Batch) -> Response:
        runner = await batches.runner()
        return encoded(batch.json(runner.troubles.get(batch.id)))

    async def file_create(request: Request) -> Response:
        service.refuse_if_draining()
        file = await upload_file(batches, request, principal_of(request))
        return encoded(file.json())

    async def file_list(request: Request) -> Response:
        page = _page(request, "files", ("purpose", "order"))
        purpose, order = page["purpose"], page["order"]
        if purpose is not None and purpose not in _PURPOSES_LISTED:
            raise InvalidRequestError(
                f"purpose must be one of {', '.join(_PURPOSES_LISTED)}, got {show(purpose)}",
                "purpose",
            )
        if order not in (None, "asc", "desc"):
            raise InvalidRequestError(f"order must be asc or desc, got {show(order)}", "order")
        files, more = await batches.call(
            BatchStore.files,
            principal_of(request),
            purpose=purpose,
            after=page["after"],
            limit=page["limit"],
            newest_first=order != "asc",
        )
        return _listed([file.json() for file in files], more)

    async def file_get(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        return encoded((await batches.call(BatchStore.file, file_id, principal_of(request))).json())

    async def file_delete(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await batches.call(BatchStore.delete_file, file_id, principal_of(request))
        return encoded({"id": file_id, "object": "file", "deleted": True})

    async def file_content(request: Request) -> Response:
        file_id = request.path_params["file_id"]
        found, file = await batches.call(BatchStore.open_file, file_id, principal_of(request))
        return StreamingResponse(
            _pieces(file),
            media_type="application/octet-stream",
            headers={
                "Content-Length": str(found.size),
                "Content-Disposition": f'attachment; filename="{found.id}.jsonl"',
                "X-Content-Type-Options": "nosniff",
            },
        )

    async def batch_create(request: Request) -> Response:
        service.refuse_if_draining()
        asked = BatchBody.read(await read_object(request, service.config), service.rules)
        window, seconds = asked.completion_window
        batch = await batches.call(
            BatchStore.create_batch,
            owner=principal_of(request),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            window=window,
            seconds=seconds,
            metadata=asked.metadata,
            now=batches.clock(),
        )
        (await batches.runner()).wake()
        return await shown(batch)

    async def batch_list(request: Request) -> Response:
        page = _page(request, "batches")
        found, more = await batches.call(
            BatchStore.batches, principal_of(request), after=page["after"], limit=page["limit"]
        )
        troubles = (await batches.runner()).troubles
        return _listed([batch.json(troubles.get(batch.id)) for batch in found], more)

    async def batch_get(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        return await shown(await batches.call(BatchStore.batch, batch_id, principal_of(request)))

    async def batch_cancel(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        batch = await batches.call(
            BatchStore.cancel, batch_id, principal_of(request), batches.clock()
        )
        (await batches.runner()).cancel(batch.id)
        return await shown(batch)

    listed = {"type": "string", "enum": list(_PURPOSES_LISTED)}
    orders = {"type": "string", "enum": ["asc", "desc"], "default": "desc"}
    routes.add("POST", "/v1/files", file_create, _FORM_BODY)
    routes.add("GET", "/v1/files", file_list, _query("files", purpose=listed, order=orders))
    routes.add("GET", "/v1/files/{file_id}", file_get)
    routes.add("DELETE", "/v1/files/{file_id}", file_delete)
    routes.add("GET", "/v1/files/{file_id}/content", file_content)
    created = _json_body(schema_of(BatchBody, service.rules))
    routes.add("POST", "/v1/batches", batch_create, created)
    routes.add("GET", "/v1/batches", batch_list, _query("batches"))
    routes.add("GET", "/v1/batches/{batch_id}", batch_get)
    routes.add("POST", "/v1/batches/{batch_id}/cancel", batch_cancel)
    return routes


def _page(request: Request, kind: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the query of a list: ``after``, ``limit`` and ``more``."""
    query = request.query_params
    limit = query.get("limit", str(_PAGE[kind]))
    most = _MAX_PAGE[kind]
    # nine digits exceed any bound; parsing thousands of digits would be slow
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= most):
        raise InvalidRequestError(f"limit must be between 1 and {most}, got {show(limit)}", "limit")
    return {"limit": int(limit), "after": query.get("after"), **{n: query.get(n) for n in more}}


def _listed(data: list[dict[str, Any]], more: bool) -> Response:
    return encoded(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": more,
        }
    )


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with closing(file):
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece
