"""The machine's transcripts as JSON, for clients in other languages: what went in, what came out.

``python -m tests.client.vectors`` writes ``vectors/*.json`` anew; read the difference before it is
committed. A file has ``targets``, ``policy``, ``budget`` and ``request``; all jitter is drawn as
``draw``. In ``steps`` the machine is told ``in`` at the time ``at``, answers ``out``, and wants to
be woken at ``deadline`` (null: the call is over). Data is ``text`` in UTF-8, or ``base64``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.client import ClientError, NoAnswerError, RefusedError, Target
from paceline.client.steps import Action, Data, Emit, Fail, Input, Open
from paceline.statuses import retry_of
from tests.client.play import DRAW, SEED, Play, in_turn, refusing, streaming, unreachable
from tests.client.scripted import chat_stream, sse

__all__ = ["FOLDER", "SCENARIOS", "STATUSES", "action_of", "text_of", "told_of_statuses"]

FOLDER = Path(__file__).parent / "vectors"
STATUSES = Path(__file__).parent / "statuses.json"

TWO = (Target("http://a", "m"), Target("http://b", "m"))


def _cut(after: bytes, **server: bool) -> Callable[[Open], list[Input]]:
    """The first answer ends behind ``after``; the others are whole."""
    first = [True]

    def serve(action: Open) -> list[Input]:
        data = chat_stream(action.body, **server)
        end = data.index(after) + len(after) if first else len(data)
        first.clear()
        return streaming(data[:end])

    return serve


def _whole(action: Open) -> list[Input]:
    return streaming(chat_stream(action.body), piece=150)


def _then_whole(*attempts: list[Input]) -> Callable[[Open], list[Input]]:
    left = list(attempts)
    return lambda action: left.pop(0) if left else streaming(chat_stream(action.body))


def _strict(action: Open) -> list[Input]:
    for name in ("return_token_ids", "stream_options"):
        if name in action.body:
            return refusing(422, b'{"error": {"message": "unknown field %b"}}' % name.encode())
    return streaming(chat_stream({**action.body, "stream_options": {}}))


def _completion(action: Open) -> list[Input]:
    choice = {"index": 0, "text": " three", "finish_reason": "length", "token_ids": [9]}
    return streaming(sse({"id": "cmpl-1", "model": "m", "choices": [choice]}))


def _tools(action: Open) -> list[Input]:
    parts: list[dict[str, Any]] = [
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"at": '}},
        {"index": 0, "function": {"arguments": "5}"}},
    ]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in parts
    ]
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    return streaming(sse(thought, *chunks, last, "[DONE]"))


SCENARIOS: dict[str, Callable[[], Play]] = {
    "whole": lambda: Play(_whole),
    "carriage_returns_and_comments": lambda: Play(
        lambda action: streaming(
            b": hm\r\n\r\n" + chat_stream(action.body).replace(b"\n", b"\r\n"), piece=97
        )
    ),
    "completion_without_done": lambda: Play(_completion, path="/completions", body={"prompt": "x"}),
    "tool_call_and_reasoning": lambda: Play(_tools),
    "resumed": lambda: Play(_cut(b"[102]}]}")),
    "resumed_elsewhere": lambda: Play(_cut(b"[102]}]}\n\n"), targets=TWO),
    "resume_passed_over": lambda: Play(_cut(b"[102]}]}\n\n", resumes=False)),
    "no_text_yet": lambda: Play(_cut(b'"content": ""}', ids=False)),
    "interrupted": lambda: Play(_cut(b'"sum"}, "finish_reason": null}]}\n\n', ids=False)),
    "restarted": lambda: Play(
        _cut(b'" is "}, "finish_reason": null}]}\n\n', ids=False), restart_allowed=True
    ),
    "retry_after_seconds": lambda: Play(_then_whole(refusing(429, retry_after="7"))),
    "retry_after_date": lambda: Play(
        _then_whole(refusing(503, retry_after="Tue, 24 Nov 2026 00:00:11 GMT"))
    ),
    "retry_after_too_long": lambda: Play(in_turn(refusing(429, retry_after="61"))),
    "refused": lambda: Play(in_turn(refusing(400, b'{"error": {"message": "no"}}'))),
    "proxy_without_a_server": lambda: Play(_then_whole(refusing(522)), targets=TWO),
    "account_refused": lambda: Play(in_turn(refusing(402, b'{"error": {"message": "no"}}'))),
    "account_refused_at_one": lambda: Play(
        _then_whole(refusing(401), refusing(507), refusing(503)), targets=TWO, attempts=4
    ),
    "no_such_model_in_an_event": lambda: Play(
        _then_whole(streaming(sse({"error": {"message": "no", "code": 404}}))), targets=TWO
    ),
    "strict_server": lambda: Play(_strict),
    "unreachable": lambda: Play(lambda _: unreachable(), targets=TWO),
    "stalled": lambda: Play(lambda _: streaming(b": hm\n\n", closed=False), attempts=2),
    "error_event": lambda: Play(_then_whole(streaming(sse({"error": {"message": "died"}})))),
    "garbage": lambda: Play(_then_whole(streaming(b"data: {\n\n"))),
}


def _tagged(value: object) -> dict[str, Any]:
    return {"type": type(value).__name__, **msgspec.to_builtins(value)}


def _input_of(given: Input) -> dict[str, Any]:
    if isinstance(given, Data):
        try:
            return {"type": "Data", "text": given.data.decode()}
        except UnicodeDecodeError:
            return {"type": "Data", "base64": base64.b64encode(given.data).decode()}
    return _tagged(given)


def _error_of(error: ClientError) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, RefusedError):
        return fields | {"status": error.status, "message": error.message}
    if isinstance(error, NoAnswerError):
        return fields | {"status": error.status, "retry_after": error.retry_after}
    return fields | {"partial": getattr(error, "partial", "")}


def action_of(action: Action) -> dict[str, Any]:
    """As the files have it; words of errors that only people read are left out."""
    if isinstance(action, Emit):
        return {"type": "Emit", "event": _tagged(action.event)}
    if isinstance(action, Fail):
        return {"type": "Fail", "error": _error_of(action.error)}
    return _tagged(action)


def text_of(play: Play) -> str:
    """A file."""
    request = {"path": play.request.path, "body": play.request.body, "seed": SEED}
    steps = [
        {
            "at": step.at,
            "in": _input_of(step.given),
            "out": [action_of(action) for action in step.actions],
            "deadline": step.deadline,
        }
        for step in play.steps
    ]
    vector = {
        "targets": msgspec.to_builtins(play.targets),
        "policy": msgspec.to_builtins(play.policy),
        "budget": {"ratio": 0.1, "minimum": 10},
        "draw": DRAW,
        "request": request,
    }
    head = json.dumps(vector, indent=1, ensure_ascii=False)
    lines = ",\n".join("  " + json.dumps(step, ensure_ascii=False) for step in steps)
    return f'{head[:-2]},\n "steps": [\n{lines}\n ]\n}}\n'


def told_of_statuses() -> str:
    """Where requests that were refused may be answered, by status, for the client in TypeScript."""
    table = {str(status): retry_of(status) for status in range(200, 700)}
    return json.dumps(table, indent=1) + "\n"


if __name__ == "__main__":
    STATUSES.write_text(told_of_statuses())
    for name, make in SCENARIOS.items():
        (FOLDER / f"{name}.json").write_text(text_of(make()))
