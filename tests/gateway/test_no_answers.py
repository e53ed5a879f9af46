"""Engines that answer with status 200, or what looks like one, and say nothing that a caller of the
API could read: another engine is asked, and where there is none the caller is told why."""

from __future__ import annotations

import pytest

from tests.gateway.fault_server import Step
from tests.gateway.helpers import (
    CHAT,
    GOOD,
    WHOLE,
    WORDS,
    chat,
    prefer_others,
    serving,
    streamed,
    text_of,
)

PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 9\r\n\r\n<p>hi</p>"
UNNAMED = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(GOOD.parts)
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nx"


def _whole(body: bytes) -> Step:
    return Step(parts=(body,), stream=False)


def _status(status: int) -> Step:
    return Step(raw=b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status)


NO_ANSWERS = {
    "a page": (Step(raw=PAGE), "not follow its API: JSON is malformed"),
    "half an object": (_whole(b'{"choices": ['), "not follow its API: Input data was truncated"),
    "nothing": (_whole(b""), "not follow its API: Input data was truncated"),
    "null": (_whole(b"null"), "not follow its API: Expected `object`, got `null`"),
    "a list": (_whole(b"[]"), "not follow its API: Expected `object`, got `array`"),
    "an error": (_whole(b'{"error": {"message": "no"}}'), "its API: it reports an error"),
    "no choices": (_whole(b'{"id": "x"}'), "not follow its API: it has no choices"),
    "deep": (_whole(b'{"a":' + b"[" * 100_000), "not follow its API"),
    "status 999": (_status(999), "status 999, which HTTP does not define"),
    "status 600": (_status(600), "status 600, which HTTP does not define"),
    "another protocol": (Step(raw=UPGRADE), "the answer switches to another protocol"),
}
NO_STREAMS = {
    "a page": (Step(raw=PAGE), "expected a stream, and the answer is 'text/html'"),
    "an error": (_whole(b'{"error": {"message": "no"}}'), "its API: it reports an error"),
    "status 999": (_status(999), "status 999, which HTTP does not define"),
    "another protocol": (Step(raw=UPGRADE), "the answer switches to another protocol"),
}


ASKED = [(False, name) for name in NO_ANSWERS] + [(True, name) for name in NO_STREAMS]


@pytest.mark.parametrize(("stream", "name"), ASKED)
async def test_what_is_no_answer_is_asked_for_elsewhere(stream: bool, name: str) -> None:
    step, why = (NO_STREAMS if stream else NO_ANSWERS)[name]
    async with serving(step, GOOD if stream else WHOLE) as (_, _, gateway, client):
        prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
        if stream:
            assert text_of(streamed(answer)) == "".join(WORDS)
        else:
            assert answer.json()["choices"][0]["message"]["content"] == "hi"
    async with serving(step) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 503 and why in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [201, 202, 204, 206, 301, 304, 307])
async def test_neither_an_answer_nor_a_refusal_is_asked_for_elsewhere(
    status: int, stream: bool
) -> None:
    """None is left: 502, as for other faults of an engine's own."""
    body = b"" if status in (204, 304) else b"{}"
    head = b"HTTP/1.1 %d X\r\nlocation: http://127.0.0.1:9/\r\n" % status
    head += b"" if status in (204, 304) else b"content-length: 2\r\n"
    step = Step(raw=head + b"\r\n" + body)
    async with serving(step, GOOD if stream else WHOLE) as (bad, _, gateway, client):
        prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 200 and answer.headers["x-paceline-engine"] == "e2"
        assert len(bad.bodies) == 1, "it was asked first"
    async with serving(step) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=stream))
        assert answer.status_code == 502
        assert f"engine e1 answered with status {status}" in answer.json()["error"]["message"]


async def test_where_all_engines_redirect_the_last_one_is_named() -> None:
    async with serving(_status(307), _status(202)) as (first, second, gateway, client):
        prefer_others(gateway, "e2")
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 502 and len(first.bodies) == len(second.bodies) == 1
        assert "engine e2 answered with status 202" in answer.json()["error"]["message"]


async def test_a_stream_that_says_not_what_it_is_is_taken_for_one() -> None:
    async with serving(Step(raw=UNNAMED)) as (_, _, client):
        answer = await client.post(CHAT, json=chat(stream=True))
        assert text_of(streamed(answer)) == "".join(WORDS)
