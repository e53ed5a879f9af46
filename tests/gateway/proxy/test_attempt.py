"""What an attempt makes of its engine's bytes, and of their absence, on a clock that the test
moves."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.gateway import EngineConfig, GatewayConfig
from paceline.gateway.observability.tracing import NO_TRACE
from paceline.gateway.proxy.attempt import Attempt
from paceline.gateway.proxy.wake import Wake
from paceline.gateway.routing.routes import Endpoint
from paceline.gateway.settings.config import EngineKind
from paceline.gateway.upstreams.upstream import Upstream
from paceline.http.upstream import Connection
from paceline.routing import Demand
from tests.gateway.fault_server import chat_chunks
from tests.gateway.helpers import CHAT, WORDS, make_relay
from tests.gateway.upstreams.dialects.samples import anthropic_events

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
COMMENT = b": alive\n\n"
# when the first word came
T = 100.0


class Transport:
    """One that leads nowhere."""

    def write(self, data: bytes) -> None:
        return

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        return

    def abort(self) -> None:
        return


class Owner:
    """A request whose caller takes everything."""

    def __init__(self, path: str = CHAT, kind: EngineKind = "auto") -> None:
        engine = EngineConfig(name="e1", url="http://127.0.0.1:1", kind=kind)
        self.config = GatewayConfig(
            engines=(engine,), stall_timeout=1.0, first_byte_timeout=5.0, liveness_timeout=2.0
        )
        self.clock = T
        self.demand = Demand(prompt_tokens=3.0, max_tokens=9, output_tokens=9.0, prefix=())
        # the part of a context that attempts read
        self.context: Any = SimpleNamespace(
            config=self.config,
            now=lambda: self.clock,
            wake=Wake(),
            path=path,
            demand=self.demand,
            trace=NO_TRACE,
            names_stored=False,
        )
        self.relay: Any = make_relay(path, num_choices=1, note={})
        self.told: list[bytes] = []
        # how many of them were written as the last one, and where among them
        self.lasts: list[int] = []
        self.first: list[float] = []

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def write_last(self, data: bytes) -> None:
        self.lasts.append(len(self.told))
        self.told.append(data)

    def first_token(self, now: float) -> None:
        self.first.append(now)

    def tick(self, now: float) -> None:
        return

    def may_leave(self, attempt: Attempt) -> bool:
        return True

    def again(self, attempt: Attempt, left_out: frozenset[str]) -> None:
        return

    def spare_spoke(self, attempt: Attempt) -> None:
        raise AssertionError("there is no second engine")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def started(
    path: str = CHAT,
    kind: EngineKind = "auto",
    first: Sequence[bytes] = chat_chunks(WORDS)[:2],
    probe: bool = False,
) -> tuple[Owner, Attempt, Connection]:
    """An attempt whose engine has said the first word."""
    owner = Owner(path, kind)
    owner.relay.begin_attempt()
    engine = Upstream(owner.config.engines[0], owner.config, T)
    dispatch = engine.load.dispatch(owner.demand, engine.load.view(owner.demand, T), T)
    second = make_relay(path, num_choices=1, note={}) if probe else None
    attempt = Attempt(owner, Endpoint(engine, "m", 0), dispatch, second)
    connection = Connection(engine.pool)
    connection.connection_made(Transport())  # type: ignore[arg-type]
    connection.send(b"POST / HTTP/1.1\r\n\r\n", attempt)
    attempt.connection = connection
    connection.data_received(HEAD + b"".join(map(chunk, first)))
    assert attempt.tick(T)
    return owner, attempt, connection


def pinged(attempt: Attempt, connection: Connection, alive: bytes, steps: range) -> None:
    """Its engine says ``alive`` each tenth of a second, and is not given up."""
    for step in steps:
        connection.data_received(chunk(alive))
        assert attempt.tick(T + 0.1 * step) and attempt.verdict is None, step


def test_a_tick_says_whether_the_engine_gave_a_sign() -> None:
    _, attempt, connection = started()
    assert not attempt.tick(T + 0.1)
    connection.data_received(chunk(COMMENT))
    assert attempt.tick(T + 0.2) and not attempt.tick(T + 0.3)
    connection.data_received(chunk(chat_chunks(WORDS)[2]))
    assert attempt.tick(T + 0.4) and not attempt.tick(T + 0.5)


def test_comments_are_no_part_of_the_answer() -> None:
    _, attempt, connection = started()
    waited = 0.0
    while attempt.verdict is None and waited < 3.0:
        waited += 0.1
        connection.data_received(chunk(COMMENT))
        attempt.tick(T + waited)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"
    assert 1.0 < waited < 1.3


@pytest.mark.parametrize("alone", ["the size", "the end", "all"])
def test_what_wraps_a_comment_is_no_part_of_the_answer(alone: str) -> None:
    """Where the size of a chunk, or the line break behind it, comes in a read of its own."""
    _, attempt, connection = started()
    size, end = b"%x\r\n" % len(COMMENT), b"\r\n"
    reads = {
        "the size": (size, COMMENT + end),
        "the end": (size + COMMENT, end),
        "all": (size, COMMENT, end),
    }[alone]
    for step in range(1, 12):
        assert attempt.verdict is None
        for read in reads:
            connection.data_received(read)
            attempt.tick(T + 0.1 * step)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"


@pytest.mark.parametrize(
    ("path", "kind"), [(CHAT, "openai"), ("/v1/messages", "anthropic"), (CHAT, "anthropic")]
)
def test_parts_of_one_long_event_are_no_silence(path: str, kind: EngineKind) -> None:
    parts = chat_chunks(WORDS) if kind == "openai" else MESSAGES
    _, attempt, connection = started(path, kind, parts[: 2 if kind == "openai" else 4])
    begins = b"data: {" if kind == "openai" else b"event: content_block_delta\ndata: {"
    connection.data_received(chunk(begins))
    for step in range(1, 30):
        connection.data_received(chunk(b" " * 300))
        attempt.tick(T + 0.1 * step)
        assert attempt.verdict is None
    for step in range(30, 42):
        attempt.tick(T + 0.1 * step)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"


PING = b'event: ping\ndata: {"type": "ping"}\n\n'
MESSAGES = anthropic_events(WORDS)
RESPONSES = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
) * 3


@pytest.mark.parametrize(
    ("path", "kind", "events", "alive"),
    [
        (CHAT, "openai", chat_chunks(WORDS), COMMENT * 2),
        # a comment that never ends, a name alone, a chunk of nothing
        (CHAT, "openai", chat_chunks(WORDS), b": "),
        (CHAT, "openai", chat_chunks(WORDS), b"event: ping\n\n"),
        (CHAT, "openai", chat_chunks(WORDS), b'data: {"choices": []}\n\n'),
        # translated, and as it is
        (CHAT, "anthropic", MESSAGES, PING),
        (CHAT, "anthropic", MESSAGES, PING[:20]),
        ("/v1/messages", "anthropic", MESSAGES, PING),
        ("/v1/messages", "paceline", MESSAGES, COMMENT),
        ("/v1/responses", "openai", RESPONSES, b'data: {"type":"keepalive"}\n\n'),
    ],
)
def test_an_engine_that_only_pings_has_stalled(
    path: str, kind: EngineKind, events: Sequence[bytes], alive: bytes
) -> None:
    """Its connection lives, its stream does not."""
    _, attempt, connection = started(path, kind, events[:4] if events is MESSAGES else events[:2])
    pinged(attempt, connection, alive, range(1, 10))
    connection.data_received(chunk(alive))
    attempt.tick(T + 1.1)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


# behind a sentence: thoughts that an engine keeps to itself, and a tool that it runs itself
THINKS = named("content_block_stop", index=0) + named(
    "content_block_start", index=1, content_block={"type": "thinking", "thinking": ""}
)
SEARCHES = named("response.output_item.done", output_index=0) + named(
    "response.output_item.added", output_index=1, item={"type": "web_search_call"}
)
KEEPALIVE = b'data: {"type":"keepalive"}\n\n'
BETWEEN = (
    (CHAT, "anthropic", MESSAGES[:4], THINKS, PING),
    ("/v1/messages", "anthropic", MESSAGES[:4], THINKS, PING),
    ("/v1/responses", "openai", RESPONSES[:2], SEARCHES, KEEPALIVE),
)


# an attempt between two parts, what shows that its engine lives, and its last words
Between = tuple[Attempt, Connection, bytes, bytes]


@pytest.fixture(params=BETWEEN)
def between(request: pytest.FixtureRequest) -> Between:
    path, kind, said, begins, alive = request.param
    _, attempt, connection = started(path, kind, said)
    connection.data_received(chunk(begins))
    return attempt, connection, alive, said[-1]


def test_who_pings_between_two_parts_may_take_as_long_as_for_the_first(between: Between) -> None:
    attempt, connection, alive, _ = between
    pinged(attempt, connection, alive, range(1, 50))
    # not for ever
    for step in range(50, 53):
        connection.data_received(chunk(alive))
        attempt.tick(T + 0.1 * step)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 5 s"


def test_who_gives_no_sign_between_two_parts_has_stalled(between: Between) -> None:
    attempt, connection, alive, _ = between
    pinged(attempt, connection, alive, range(1, 21))
    for step in range(21, 30):
        attempt.tick(T + 0.1 * step)
        assert attempt.verdict is None, step
    attempt.tick(T + 3.1)
    why = "no part of the answer and no ping for 1 s"
    assert attempt.verdict is not None and attempt.verdict.why == why


def test_between_two_parts_who_is_not_read_has_not_stalled(between: Between) -> None:
    attempt, connection, _, _ = between
    connection.pause()
    for step in range(1, 50):
        attempt.tick(T + 0.1 * step)
    assert attempt.verdict is None


TEXT_BEGINS = named("content_block_stop", index=0) + named(
    "content_block_start", index=1, content_block={"type": "text", "text": ""}
)
MESSAGE_BEGINS = named("response.output_item.done", output_index=0) + named(
    "response.output_item.added", output_index=1, item={"type": "message", "content": []}
)


@pytest.mark.parametrize(
    ("path", "kind", "said", "begins", "alive"),
    [
        (CHAT, "anthropic", MESSAGES[:4], TEXT_BEGINS, PING),
        ("/v1/messages", "anthropic", MESSAGES[:4], TEXT_BEGINS, PING),
        ("/v1/responses", "openai", RESPONSES[:2], MESSAGE_BEGINS, KEEPALIVE),
        (
            "/v1/responses", "openai", RESPONSES[:2],
            MESSAGE_BEGINS + named("response.content_part.added", part={"type": "output_text"}),
            KEEPALIVE,
        ),
        (
            "/v1/responses", "openai", RESPONSES[:2],
            named("response.output_text.annotation.added", annotation={"type": "url_citation"}),
            KEEPALIVE,
        ),
    ],
)  # fmt: skip
def test_within_a_text_who_only_pings_has_stalled(
    path: str, kind: EngineKind, said: Sequence[bytes], begins: bytes, alive: bytes
) -> None:
    """Where one has begun, and where something was noted beside it."""
    _, attempt, connection = started(path, kind, said)
    connection.data_received(chunk(begins))
    pinged(attempt, connection, alive, range(1, 11))
    attempt.tick(T + 1.2)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"


def test_who_speaks_again_may_stop_no_longer_than_before(between: Between) -> None:
    attempt, connection, alive, last = between
    pinged(attempt, connection, alive, range(1, 31))
    connection.data_received(chunk(last))
    pinged(attempt, connection, alive, range(31, 41))
    attempt.tick(T + 4.2)
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 1 s"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_behind_the_reason_of_its_end_a_message_has_no_other_part(path: str) -> None:
    _, attempt, connection = started(path, "anthropic", MESSAGES[:-1])
    pinged(attempt, connection, PING, range(1, 11))
    attempt.tick(T + 1.2)
    # all of it was said
    assert attempt.verdict is not None and attempt.verdict.kind == "done"


def test_a_part_among_pings_is_one() -> None:
    for path, kind, parts in (
        ("/v1/messages", "anthropic", MESSAGES),
        (CHAT, "anthropic", MESSAGES),
        ("/v1/messages", "anthropic", [b": beside\n" + event for event in MESSAGES]),
    ):
        _, attempt, connection = started(path, kind, parts[:4])  # type: ignore[arg-type]
        pinged(attempt, connection, PING, range(1, 10))
        connection.data_received(chunk(PING + parts[4]))
        pinged(attempt, connection, PING, range(10, 19))
        assert attempt.verdict is None, path
        connection.data_received(b"".join(map(chunk, parts[5:])))
        assert attempt.verdict is not None and attempt.verdict.kind == "done", path


def test_a_second_engine_that_only_pings_has_not_begun() -> None:
    owner, attempt, connection = started(first=(COMMENT,), probe=True)
    for step in range(1, 60):
        connection.data_received(chunk(COMMENT))
        attempt.tick(T + 0.1 * step)
    # nothing has come of it in all the time that a first token may take
    assert attempt.verdict is not None and attempt.verdict.why == "no part of the answer for 5 s"
    assert not owner.told


def test_parts_of_the_answer_are_whichever_way_they_go() -> None:
    """Read whole, relayed as the one before, or with comments beside them."""
    words = ("Once", " upon", " a", " time", " there", ".")
    parts = chat_chunks(words)
    for spoken in (parts[3], parts[4], COMMENT + parts[5]):
        _, attempt, connection = started()
        connection.data_received(chunk(parts[2]))
        for step in range(1, 10):
            attempt.tick(T + 0.1 * step)
        connection.data_received(chunk(spoken))
        for step in range(10, 19):
            attempt.tick(T + 0.1 * step)
        assert attempt.verdict is None
        attempt.tick(T + 2.5)
        assert attempt.verdict is not None


def test_what_its_caller_does_not_read_is_no_stall() -> None:
    _, attempt, connection = started()
    connection.pause()
    for step in range(50):
        attempt.tick(T + 0.1 * step)
    assert attempt.verdict is None


FAILS = b'data: {"error": {"message": "no", "code": 500}}\n\n'


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("path", "kind", "events"),
    [
        (CHAT, "openai", chat_chunks(WORDS)),
        (CHAT, "anthropic", MESSAGES),
        ("/v1/messages", "anthropic", MESSAGES),
    ],
)
def test_what_ends_an_answer_is_written_as_its_end(
    path: str, kind: EngineKind, events: Sequence[bytes], at_once: bool
) -> None:
    owner, attempt, connection = started(path, kind, events[:4])
    rest = [b"".join(events[4:])] if at_once else events[4:]
    for part in rest:
        assert not owner.lasts
        connection.data_received(chunk(part))
    assert attempt.verdict is not None and attempt.verdict.kind == "done"
    assert owner.lasts == [len(owner.told) - 1]
    end = b"event: message_stop" if path == "/v1/messages" else b"data: [DONE]\n\n"
    assert end in owner.told[-1] and not any(end in part for part in owner.told[:-1])


def test_a_stream_that_fails_has_no_last_write() -> None:
    """Neither where what was said before the error comes with it, nor where it is cut."""
    for part in (FAILS, chat_chunks(WORDS)[2] + FAILS, FAILS + b"data: [DONE]\n\n"):
        owner, attempt, connection = started()
        connection.data_received(chunk(part))
        assert attempt.verdict is not None and attempt.verdict.kind == "lost" and not owner.lasts
    owner, attempt, connection = started()
    connection.connection_lost(None)
    assert attempt.verdict is not None and attempt.verdict.kind == "lost" and not owner.lasts


def test_bytes_after_the_end_are_dropped() -> None:
    owner, attempt, _ = started()
    attempt.abandon()
    told = list(owner.told)
    attempt.on_data(chat_chunks(WORDS)[2])
    assert owner.told == told and not attempt.tick(T + 9.0)


def test_the_first_word_is_noted_once() -> None:
    owner, _, connection = started()
    owner.clock = T + 1.0
    for part in chat_chunks(WORDS)[2:]:
        connection.data_received(chunk(part))
    assert owner.first == [T] and owner.relay.done
    assert b"".join(owner.told).endswith(b"data: [DONE]\n\n")
