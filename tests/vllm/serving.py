"""An application behind the middleware that answers by a script, and the other end of a channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.outputs import Timeline
from paceline.vllm.admission import Admission
from paceline.vllm.channel import Channel

__all__ = ["COUNTS", "REFUSED", "SERVED", "TIMELINE", "App", "Engine", "post"]

REFUSED = {
    "status": 429, "message": "not accepted: 3 requests wait already; retry in 2.5 s",
    "retry_after": 2.5, "reason": "queue-full", "param": None,
}  # fmt: skip
TIMELINE = Timeline((("tokens", 0.25),), 2, 0, 0, 0, False, 0.5)
SERVED: dict[str, Any] = {
    "refusal": None, "timeline": TIMELINE._asdict(), "ttft": 0.4, "tokens_per_second": 20.0,
    "targets": {"ttft_ms": 500.0},
    "violated": [],
}  # fmt: skip
COUNTS: dict[str, Any] = {
    "num_steps": 7, "num_amended": 1, "num_own_steps": 0, "num_faults": 0, "demoted": 6,
    "ended": {"standard": 3}, "kept": {"standard": 2}, "missed": [["standard", "ttft", 1]],
    "requests": [["standard", "running", 4], ["standard", "waiting", 5]], "pressure_level": 0,
    "step_tokens": {"prefill": 70, "decode": 14}, "wasted": {"recomputed": 1, "discarded": 2},
    "step_seconds": {"predicted": 1.5, "actual": 1.25}, "refused": {"queue-full": 8},
    "waited": {"slots": 2.5}, "blocked": {"slots": 1},
}  # fmt: skip


class Engine:
    """The other end of a channel: one answer for the fate of every tag, and one forecast."""

    def __init__(self) -> None:
        self.fate: Any = None
        self.forecast: Any = None
        self.foreseen: list[Mapping[str, Any]] = []
        self.asked: list[Mapping[str, Any]] = []
        self.channel = Channel(self._answer)

    def _answer(self, message: Mapping[str, Any]) -> Any:
        if "foresee" in message:
            self.foreseen.append(message)
            return self.forecast
        self.asked.append(message)
        return COUNTS if "counts" in message else self.fate


class App:
    """Answers with a status and these parts, and keeps what it was asked."""

    def __init__(
        self, status: int, *parts: bytes, path: str = "/v1/chat/completions", fails: bool = False,
        models: int = 200,
    ) -> None:  # fmt: skip
        self.status, self.parts, self.path, self.fails = status, parts, path, fails
        # what a caller with this request's headers gets for the list of models
        self.models = models
        self.body: Any = None
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/v1/models"):
            await send({"type": "http.response.start", "status": self.models, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        self.headers = dict(scope["headers"])
        self.body = (await receive())["body"]
        length = str(sum(map(len, self.parts))).encode()
        head = [(b"content-type", b"application/json")]
        head += [(b"content-length", length)] if len(self.parts) == 1 else []
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        for number, part in enumerate(self.parts, 1):
            more = number < len(self.parts) or self.fails
            await send({"type": "http.response.body", "body": part, "more_body": more})
        if self.fails:
            raise ValueError("no event for an error")


def post(
    app: App,
    body: Any,
    headers: Sequence[tuple[str, str]] = (),
    method: str = "POST",
    root: str = "",
) -> tuple[int, dict[str, str], bytes]:
    """The status, headers and body that a caller gets."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = [(b"content-length", str(len(raw)).encode())]
        pairs += [(name.encode(), value.encode()) for name, value in headers]
        scope = {"type": "http", "method": method, "path": root + app.path, "headers": pairs}
        scope |= {"root_path": root}
        await Admission(app)(scope, receive, send)

    asyncio.run(run())
    assert [each["type"] for each in sent] == [
        "http.response.start", *["http.response.body"] * (len(sent) - 1),
    ]  # fmt: skip
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(each["body"] for each in sent[1:])
