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


KEEP_ALIVES = (
    b"data:\n\ndata:   \n\nevent: ping\ndata:\n\nevent: ping\ndata: {}\n\ndata: null\n\n"
    b'event: keepalive\ndata: 17\n\ndata: {"type": "ping"}\n\n: hm\n\ndata\n\nevent: ping\n\n'
    b'data: {"choices": null}\n\nevent: status\ndata: busy\n\nid: 7\nretry: 9\n\n\n'
)


def _choice(content: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": content}, "finish_reason": reason, **more}


def _with_keep_alives(line_end: bytes, piece: int) -> Callable[[Open], list[Input]]:
    def serve(action: Open) -> list[Input]:
        said = chat_stream(action.body).replace(b"\n\n", b"\n\n" + KEEP_ALIVES)
        whole = b"\xef\xbb\xbf" + KEEP_ALIVES + said
        return streaming(whole.replace(b"\n", line_end), piece=piece)

    return serve


def _odd(action: Open) -> list[Input]:
    head = {"id": None, "model": 5}
    chunks: list[dict[str, Any]] = [
        head | {"choices": [_choice("a", index=None)], "error": empty, "usage": empty}
        for empty in ({}, "", None, [], False, 0)
    ]
    chunks += [
        {"choices": [_choice("b", "", token_ids=None, text="")], "usage": {"prompt_tokens": None}},
        {"choices": [{"delta": None, "text": None}], "prompt_token_ids": []},
        {"choices": [{"delta": {"tool_calls": [], "reasoning": ""}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": None, "id": "c1", "function": None}]}}]},
        {"choices": [{"index": 0.0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": 8}},
    ]
    return streaming(sse(*chunks, "[DONE]"))


def _named(action: Open) -> list[Input]:
    """The answer under names, and a word between that no reader of chunks knows."""
    first, *rest = chat_stream(action.body).split(b"\n\n")
    events = [
        b"event: message\n" + first,
        b"event: x\ndata: hm",
        *(b"event: c\n" + e for e in rest),
    ]
    return streaming(b"\n\n".join(events[:-1]) + b"\n\n")


def _failing(event: bytes) -> Callable[[], Play]:
    return lambda: Play(_then_whole(streaming(event + b"\n\n")))


def _behind_the_end(rest: bytes, **policy: Any) -> Callable[[], Play]:
    """All was said, and then that, and no more."""
    data = sse({"choices": [_choice("all", "stop")]}) + rest
    return lambda: Play(lambda _: streaming(data, closed=False), **policy)


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
    **{
        f"refused_{name}": lambda body=body: Play(in_turn(refusing(400, body)))  # type: ignore[misc]
        for name, body in {
            "without_words": b'{"error": {"message": null}}',
            "in_other_words": b'{"detail": [{"loc": ["body", "n"], "msg": "no"}]}',
            "in_a_list": b'[{"error": {"message": "no"}}]',
            "in_text": b"no",
        }.items()
    },
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
    "keep_alives": lambda: Play(_with_keep_alives(b"\n", 0)),
    "keep_alives_carriage_returns": lambda: Play(_with_keep_alives(b"\r", 113)),
    "keep_alives_cut_anywhere": lambda: Play(_with_keep_alives(b"\r\n", 61)),
    "odd_fields": lambda: Play(_odd),
    "named_events": lambda: Play(_named),
    "error_by_name": _failing(b"event: error\ndata: boom"),
    "error_by_name_without_data": _failing(b"event: error\ndata:"),
    "error_by_name_with_code": _failing(b'event: error\ndata: {"message": "no", "code": 404}'),
    "error_as_object": _failing(b'data: {"object": "error", "message": "no", "code": 400}'),
    "error_without_words": _failing(b'data: {"error": {"code": 500, "message": null}}'),
    "error_behind_the_end": _behind_the_end(
        sse({"error": {"message": "late", "code": 400}}), attempts=1
    ),
    "garbage_behind_the_end": _behind_the_end(b"data: {\n\n"),
    "silence_behind_the_end": _behind_the_end(b"", total_timeout=9.0),
    "null_among_choices": _failing(b'data: {"choices": [null]}'),
    "another_choice": _failing(b'data: {"choices": [{"index": true}]}'),
    "not_utf8": _failing(b": \xff\n\ndata: \xff"),
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
