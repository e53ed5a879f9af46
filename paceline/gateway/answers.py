"""What a caller is sent besides what the engine said: notes of what was done, in headers and in the
body of an answer that is no stream.

This module does not know which engines are asked, or when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.gateway.bodies import Body
from paceline.gateway.dialects import map_error, map_status
from paceline.gateway.leg import Leg
from paceline.gateway.refusals import told
from paceline.http.upstream import Headers

__all__ = ["note_headers", "whole_answer"]


def note_headers(
    leg: Leg | None, path: str, body: Body, attempts: int, note: Mapping[str, Any]
) -> Headers:
    """What callers may want to know, in headers.

    Args:
        leg: whose answer it is; None: no engine was asked.
        note: what was done to the answer.
    """
    found = [(b"x-paceline-attempts", b"%d" % attempts)]
    if leg is None:
        return found
    engine = leg.site.engine
    found.append((b"x-paceline-engine", engine.name.encode()))
    if ignored := engine.dialect.ignored(path, body):
        found.append((b"x-paceline-ignored-fields", ignored.encode("ascii", "replace")))
    if "hedged" in note:
        found.append((b"x-paceline-hedged", b"true"))
    if "fallback" in note:
        name = leg.site.model.encode("ascii", "backslashreplace")
        found.append((b"x-paceline-fallback", name))
    return found


def whole_answer(
    leg: Leg, path: str, model: str, note: Mapping[str, Any]
) -> tuple[int, Headers, bytes]:
    """Status, headers and body of an answer that is no stream, in the API of ``path``.

    Args:
        model: its name as the caller knows it.
    """
    body = bytes(leg.body)
    if leg.status == 200:
        return 200, leg.headers, _noted(body, leg, model, note)
    body = map_error(path, leg.status, told(path, leg.status, body, leg.site.engine.key))
    headers = [header for header in leg.headers if header[0] != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    return map_status(path, leg.status), headers, body


def _noted(body: bytes, leg: Leg, model: str, note: Mapping[str, Any]) -> bytes:
    if leg.site.model == model and not note:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return body
    if "model" in fields:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    if note:
        fields["paceline"] = msgspec.Raw(msgspec.json.encode(note))
    return msgspec.json.encode(fields)
