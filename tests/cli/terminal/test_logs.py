"""Log lines as JSON: fields by name, whatever is in them."""

from __future__ import annotations

import json
import logging
from typing import Any

from paceline.cli.terminal.logs import JsonFormatter


def line(message: str, *args: Any, **extra: Any) -> dict[str, Any]:
    record = logging.LogRecord("paceline.server", logging.INFO, "", 0, message, args, None)
    record.__dict__.update(extra)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_fields_come_out_by_name() -> None:
    found = line("request id=%s tokens=%d seconds=%.3f end=%s", 'a "b"\nc', 7, 0.5, None)
    assert found["fields"] == {"id": 'a "b"\nc', "tokens": 7, "seconds": 0.5, "end": None}
    assert found["message"].startswith("request id=") and found["level"] == "info"
    assert found["logger"] == "paceline.server" and found["time"].endswith("+00:00")


def test_other_messages_are_left_whole() -> None:
    assert "fields" not in line("all %s of it") and line("plain")["message"] == "plain"
    assert line("%s and x=%d", "y", 2)["fields"] == {"x": 2}
    try:
        raise ValueError("broken")
    except ValueError as error:
        found = line("failed", exc_info=(ValueError, error, error.__traceback__))
    assert "ValueError: broken" in found["exception"]
