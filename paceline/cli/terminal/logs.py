"""Log lines on standard error, one line each, so that standard output has only answers."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["JsonFormatter", "configure_logging"]

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# loggers whose info lines are of no interest here
_QUIET: Final = ("httpx", "huggingface_hub", "filelock", "urllib3")
# messages are "event name=%s other=%d"
_FIELD: Final = re.compile(r"(\w+)=%[-+ #0-9.]*[a-zA-Z]|%[-+ #0-9.]*[a-zA-Z]")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the message's fields by name."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        names = [match[1] for match in _FIELD.finditer(str(record.msg))]
        values = record.args if isinstance(record.args, tuple) else ()
        if len(names) == len(values):
            fields = dict(zip(names, values, strict=True))
            line["fields"] = {name: _plain(value) for name, value in fields.items() if name}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def configure_logging(level: str, form: str = "text") -> None:
    """Set up the root logger of this process; a later call changes the level, or to JSON.

    Args:
        form: "text" or "json".
    """
    logging.basicConfig(level=level.upper(), format=_FORMAT)
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
    logging.getLogger().setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
