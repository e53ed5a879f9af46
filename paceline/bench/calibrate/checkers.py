"""Checkers: the quality of an answer, 0 to 1."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from paceline.bench.calibrate.asking import AskError, Source
from paceline.bench.calibrate.labels import Check, Label
from paceline.routing.cascade import plain_text, violation

__all__ = ["CheckFailedError", "quality", "text_of"]

_GRADE: Final = re.compile(r"\b(10|[0-9])(?:\s*/\s*10)?\b")
_MOST_GRADE: Final = 10
_INSTRUCTION: Final = (
    "Grade the answer to the question from 0 (useless or wrong) to 10 (right and complete). Reply "
    "with the number only.\n\nQuestion:\n{question}\n\nAnswer:\n{answer}"
)


class CheckFailedError(Exception):
    """A checker gave no verdict: it did not end, died, or a judge did not answer."""


def text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of a whole answer, or its first call as JSON."""
    message = answer["choices"][0].get("message") or {}
    text = message.get("content")
    if isinstance(text, str) and text:
        return text
    calls = message.get("tool_calls")
    return msgspec.json.encode(calls[0]["function"]).decode() if calls else ""


def quality(label: Label, text: str) -> float:
    """Return the quality of an answer. Raises CheckFailedError."""
    check = label.check
    if check.exact is not None:
        return float(plain_text(text) == plain_text(check.exact))
    if check.regex is not None:
        return float(re.search(check.regex, text) is not None)
    if check.json_schema is not None:
        try:
            return float(not violation(msgspec.json.decode(text), check.json_schema))
        except (msgspec.MsgspecError, RecursionError):
            return 0.0
    return _by_program(check, label, text) if check.program else _by_judge(check, label, text)


def _question(label: Label) -> str:
    return label.prompt or "\n".join(str(each.get("content", "")) for each in label.messages)


def _by_program(check: Check, label: Label, text: str) -> float:
    assert check.program, "the label has a program"
    name = check.program[0]
    told = msgspec.json.encode({"prompt": _question(label), "answer": text})
    try:
        done = subprocess.run(
            check.program, input=told, capture_output=True, timeout=check.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise CheckFailedError(f"{name} did not end within {check.timeout:g} s") from None
    except OSError as error:
        raise CheckFailedError(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode not in (0, 1):
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        raise CheckFailedError(f"{name} ended with {done.returncode}, not 0 or 1: {said}")
    return float(done.returncode == 0)


def _by_judge(check: Check, label: Label, text: str) -> float:
    asked = _INSTRUCTION.format(question=_question(label), answer=text)
    body = {
        "model": check.model,
        "messages": [{"role": "user", "content": asked}],
        "max_tokens": 8,
        "temperature": 0,
    }
    source = Source(check.judge or "", check.model)
    try:
        said = text_of(source.fetch("/chat/completions", body, check.timeout))
    except AskError as error:
        raise CheckFailedError(f"the judge gave no grade: {error}") from None
    except (AttributeError, KeyError, IndexError, TypeError):
        raise CheckFailedError(f"the judge {check.judge} answers without choices") from None
    found = _GRADE.search(said)
    if found is None:
        raise CheckFailedError(f"the judge gave no grade from 0 to 10, but {said[:80]!r}")
    return int(found[1]) / _MOST_GRADE
