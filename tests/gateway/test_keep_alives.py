"""Events of a stream that say nothing are passed over, and those that report an error never are,
until all of the answer was said: then nothing that follows, or fails to, makes less of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.gateway.settings.config import EngineKind
from tests.gateway.fault_server import Step, chat_chunks
from tests.gateway.helpers import (
    CHAT,
    WORDS,
    chat,
    is_clean,
    make_relay,
    serving,
    streamed,
    text_of,
    until,
)
from tests.gateway.proxy.test_attempt import T, chunk, started
from tests.gateway.upstreams.dialects.samples import anthropic_events

TEXT = "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(fields: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(fields)}\n\n".encode()


def completion(text: str, reason: str | None = None) -> bytes:
    choice = {"index": None, "text": text, "finish_reason": reason}
    return event({"id": "c", "choices": [choice], "error": None})


def response(kind: str) -> bytes:
    return event({"type": f"response.{kind}"}, f"response.{kind}")


MESSAGE = anthropic_events(WORDS)
CHATS = chat_chunks(WORDS)
# of each API: what an engine sends up to where all is said, and what it would send behind that
STREAMS: dict[str, tuple[str, EngineKind, Sequence[bytes], Sequence[bytes]]] = {
    "chat": (CHAT, "openai", CHATS[:-2], CHATS[-2:]),
    "completions": (
        TEXT, "openai", [completion("a"), completion("b", "stop")], [b"data: [DONE]\n\n"],
    ),
    "messages": (MESSAGES, "anthropic", MESSAGE[:-1], MESSAGE[-1:]),
    "messages as chat": (CHAT, "anthropic", MESSAGE[:-1], MESSAGE[-1:]),
    "responses": (
        RESPONSES, "openai",
        [response("created"), response("output_text.delta"), response("completed")], [],
    ),
}  # fmt: skip
ENDS = {MESSAGES: b"event: message_stop\n", RESPONSES: b"event: response.completed\n"}

NOTHING = (
    b"data:\n\n", b"data: \r\n\r\n", b"data\n\n", b"event: ping\ndata:\n\n", b": alive\r\r",
    b"event: ping\ndata: {}\n\n", b"event: heartbeat\ndata: 3\n\n", b"id: 4\nretry: 10\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n',
)  # fmt: skip
# of chunks alone: other APIs have types
NO_CHUNKS = (
    b"data: {}\n\n", b"data: null\n\n", b'data: {"choices": null}\n\n',
    b'data: {"type": "ping"}\n\n', b'event: status\ndata: {"queue": 3}\n\n',
    b"event: status\ndata: busy\n\n",
)  # fmt: skip
ERRORS = (
    b"event: error\ndata: died\n\n", b"event: error\ndata:\n\n",
    b'event: error\ndata: {"message": "died"}\n\n', b'data: {"error": {"message": "died"}}\n\n',
    b'data: {"error": "died"}\n\n', b'data: {"type": "error", "error": {"message": "died"}}\n\n',
)  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_what_says_nothing_is_passed_over(name: str) -> None:
    path, kind, said, rest = STREAMS[name]
    quiet = NOTHING + (NO_CHUNKS if kind == "openai" and path in (CHAT, TEXT) else ())
    for alive in quiet:
        plain, _, connection = started(path, kind, [*said, *rest])
        owner, attempt, connection = started(path, kind, [b"\xef\xbb\xbf" + alive + said[0]])
        for part in (*said[1:], *rest):
            for piece in (alive, part[:9], part[9:], alive):
                if attempt.verdict is None:
                    connection.data_received(chunk(piece))
        assert attempt.verdict is not None and attempt.verdict.kind == "done", alive
        assert without_comments(owner.told) == without_comments(plain.told), alive


def without_comments(told: Sequence[bytes]) -> list[bytes]:
    """And without pings, which go through as they are where the caller's API has them; of what a
    translation dates."""
    events = b"".join(told).split(b"\n\n")
    kept = [e for e in events if not e.startswith((b":", b"event: ping", b"event: heartbeat"))]
    return [e.partition(b'"created"')[0] for e in kept]


@pytest.mark.parametrize("name", STREAMS)
def test_an_error_is_never_passed_over(name: str) -> None:
    path, kind, said, rest = STREAMS[name]
    for error in ERRORS:
        for at in range(1, len(said)):
            owner, attempt, connection = started(path, kind, said[:at])
            connection.data_received(chunk(error + b"".join(said[at:]) + b"".join(rest)))
            assert attempt.verdict is not None and attempt.verdict.kind == "lost", (error, at)
            assert attempt.verdict.why == "the engine reported an error"
            assert not owner.lasts


def test_errors_in_shapes_of_chunks() -> None:
    for error in (
        b'data: {"object": "error", "message": "died", "code": 400}\n\n',
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}], "error": "died"}),
    ):
        _, attempt, connection = started()
        connection.data_received(chunk(error))
        assert attempt.verdict is not None and attempt.verdict.why == "the engine reported an error"
    for none in ("", {}, [], None, False):
        relay = make_relay(CHAT, num_choices=1)
        relay.begin_attempt()
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
        relay.feed(event({"choices": [choice], "error": none}))
        relay.end_attempt()
        assert relay.done


@pytest.mark.parametrize("trouble", ["silence", "pings", "garbage", "error", "reset", "too long"])
@pytest.mark.parametrize("name", STREAMS)
def test_behind_the_reason_of_its_end_nothing_makes_less_of_an_answer(
    name: str, trouble: str
) -> None:
    path, kind, said, _ = STREAMS[name]
    owner, attempt, connection = started(path, kind, said)
    behind = {
        "garbage": b"data: {oops\n\n", "error": ERRORS[3], "too long": b"data: " + b"x" * (1 << 20),
    }  # fmt: skip
    if trouble in behind and attempt.verdict is None:
        connection.data_received(chunk(behind[trouble]))
    if trouble == "reset":
        connection.connection_lost(ConnectionResetError())
    for step in range(1, 13):
        if trouble == "pings" and attempt.verdict is None:
            connection.data_received(chunk(NOTHING[step % len(NOTHING)]))
        attempt.tick(T + 0.1 * step)
    assert attempt.verdict is not None and attempt.verdict.kind == "done"
    told = b"".join(owner.told)
    assert told.count(ENDS.get(path, b"data: [DONE]\n\n")) == 1 and b"error" not in told.replace(
        b'"error":null', b""
    ).replace(b'"error": null', b"")
    assert attempt.endpoint.upstream.breaker.state(T + 2) == "closed"


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "responses"])
def test_before_the_reason_of_its_end_an_answer_is_not_whole(name: str) -> None:
    """A stream that ends there, in whatever way, was cut."""
    path, kind, said, _ = STREAMS[name]
    for at in range(1, len(said) - 1):
        _, attempt, connection = started(path, kind, said[:at])
        connection.data_received(b"0\r\n\r\n")
        assert attempt.verdict is not None and attempt.verdict.kind == "lost", at
        owner, attempt, connection = started(path, kind, said[:at])
        owner.clock += owner.config.liveness_timeout + 0.1
        assert attempt.engine_gone("it gives no sign")
        assert attempt.verdict.kind == "lost" and attempt.verdict.why == "it gives no sign"  # type: ignore[union-attr]


def test_each_choice_has_a_reason_of_its_own() -> None:
    def said(index: int, reason: str | None) -> bytes:
        return event(
            {"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": reason}]}
        )

    relay = make_relay(CHAT, num_choices=2)
    relay.begin_attempt()
    relay.feed(said(0, "stop") + said(1, None) + ERRORS[3])
    assert relay.failed and not relay.end_attempt() and not relay.done
    relay.begin_attempt()
    relay.feed(said(1, "stop") + ERRORS[3] + b"data: {oops\n\n")
    assert relay.failed is None and relay.end_attempt().endswith(b"[DONE]\n\n") and relay.done


@pytest.mark.parametrize("choices", [{"choices": None}, {}])
def test_counts_without_a_list_of_choices(choices: dict[str, Any]) -> None:
    """Clients read them with one."""
    relay = make_relay(CHAT, num_choices=1, hide_usage=False)
    relay.begin_attempt()
    counts = event({"id": "x", **choices, "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    out = relay.feed(b"".join(chat_chunks(WORDS, usage=False, done=False)) + counts)
    assert json.loads(out.split(b"data: ")[-1])["choices"] == []
    assert relay.prompt_tokens == 3 and relay.num_output_tokens == 5


async def test_a_caller_reads_the_whole_answer_of_an_engine_that_falls_silent() -> None:
    step = Step(parts=(b"data:\n\n", *CHATS[:-2], ERRORS[3]), then="stall")
    async with serving(step, stall_timeout=0.2) as (engine, gateway, client):
        found = streamed(await client.post(CHAT, json=chat(stream=True)))
        assert text_of(found) == "".join(WORDS) and found[-1] == "[DONE]"
        assert not any("error" in part for part in found)
        await until(lambda: engine.hung_up == 1 and is_clean(gateway))
        counted = (await client.get("/metrics")).text
        assert 'result="ok"' in counted and 'result="broken"} 1' not in counted
