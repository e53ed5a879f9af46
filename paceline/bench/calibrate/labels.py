"""Labelled prompts: a file of JSON lines, each a prompt and what a good answer to it is::

{"prompt": "What is 2 + 2?", "check": {"exact": "4"}, "kind": "sums"}
{"prompt": "...", "check": {"regex": "(?i)paris"}}
{"messages": [...], "check": {"json_schema": {"type": "object"}}}
{"prompt": "...", "check": {"program": ["python3", "check.py"], "timeout": 5}}
{"prompt": "...", "check": {"judge": "http://127.0.0.1:9000/v1", "model": "grader"}}
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.gateway.requests.body import Body, read_body

__all__ = ["Check", "Label", "read_labels"]


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Checker of an answer: one of these."""

    exact: str | None = None
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    # command that reads {"prompt", "answer"} as JSON; it ends with 0 for a good answer, 1 for a bad
    program: list[str] | None = None
    # URL of a server with OpenAI's API that grades from 0 to 10
    judge: str | None = None
    # the judge's name there
    model: str = ""
    # seconds that a program or a judge may take
    timeout: float = 10.0


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One labelled prompt."""

    check: Check
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    # name of a group, for figures by group
    kind: str = ""
    max_tokens: int = 256
    # fields of a chat that came through a gateway, instead of a prompt or messages
    fields: dict[str, Any] = {}

    @property
    def chat(self) -> list[dict[str, Any]]:
        return self.messages or [{"role": "user", "content": self.prompt}]

    @property
    def digest(self) -> str:
        """Digest of the request: measured answers to it are used again."""
        text = msgspec.json.encode([self.chat, self.max_tokens])
        return hashlib.sha256(text).hexdigest()[:32]

    def body(self, model: str = "") -> dict[str, Any]:
        """Return the request's body."""
        asked = {
            "model": model,
            "messages": self.chat,
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        return asked | self.fields

    def as_read(self) -> Body:
        """Return the body as a gateway reads it."""
        return read_body(msgspec.json.encode(self.body()))


def read_labels(path: Path) -> list[Label]:
    """Read a file of labels. Raises ConfigError, which names the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"labels {path} cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label = msgspec.json.decode(line, type=Label)
            _check(label)
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"labels {path}, line {number}: {error}") from None
        found.append(label)
    if not found:
        raise ConfigError(f"labels {path}: there is no label")
    return found


def _check(label: Label) -> None:
    check = label.check
    names = ("exact", "regex", "json_schema", "program", "judge")
    told = [name for name in names if getattr(check, name) is not None]
    if len(told) != 1:
        raise ConfigError(f"check needs one of {', '.join(names)}, got {', '.join(told) or 'none'}")
    if label.fields:
        raise ConfigError("fields are for shadow traffic alone")
    if bool(label.prompt) == bool(label.messages):
        raise ConfigError("give either a prompt or messages")
    if check.program == []:
        raise ConfigError("program needs a command")
    if not 0.0 < check.timeout <= 600.0:
        raise ConfigError(f"timeout must be above 0 and at most 600 s, got {check.timeout:g}")
    if label.max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {label.max_tokens}")
    if check.regex is not None:
        try:
            re.compile(check.regex)
        except re.error as error:
            raise ConfigError(f"regex {check.regex[:80]!r}: {error}") from None
