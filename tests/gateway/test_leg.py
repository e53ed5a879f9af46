"""What a leg makes of its engine's bytes, and of their absence, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.gateway import EngineConfig, GatewayConfig
from paceline.gateway.engines import Engine
from paceline.gateway.leg import Leg
from paceline.gateway.routes import Site
from paceline.gateway.splice import make_splice
from paceline.gateway.tracing import NO_TRACE
from paceline.http.upstream import Connection
from paceline.routing import Demand
from tests.gateway.fault_server import chat_chunks
from tests.gateway.helpers import CHAT, WORDS

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

    def __init__(self) -> None:
        engine = EngineConfig(name="e1", url="http://127.0.0.1:1")
        self.config = GatewayConfig(
            engines=(engine,), stall_timeout=1.0, first_byte_timeout=5.0, silence=2.0
        )
        self.clock = T
        self.wake = asyncio.Event()
        self.splice: Any = make_splice(CHAT, num_choices=1, note={})
        self.trace = NO_TRACE
        self.told: list[bytes] = []
        self.first: list[float] = []

    def now(self) -> float:
        return self.clock

    def write(self, data: bytes) -> None:
        self.told.append(data)

    def first_token(self, now: float) -> None:
        self.first.append(now)

    def tick(self, now: float) -> None:
        return

    def sent(self, leg: Leg) -> None:
        return

    def spare_spoke(self, leg: Leg) -> None:
        raise AssertionError("there is no second engine")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def started() -> tuple[Owner, Leg, Connection]:
    """A leg whose engine has said the first word."""
    owner = Owner()
    owner.splice.begin_leg()
    engine = Engine(owner.config.engines[0], owner.config, T)
    demand = Demand(prompt_tokens=3.0, max_tokens=9, output_tokens=9.0, prefix=())
    dispatch = engine.load.dispatch(demand, engine.load.view(demand, T), T)
    leg = Leg(owner, Site(engine, "m", 0), dispatch)  # type: ignore[arg-type]
    connection = Connection(engine.pool)
    connection.connection_made(Transport())  # type: ignore[arg-type]
    connection.send(b"POST / HTTP/1.1\r\n\r\n", leg)
    leg.connection = connection
    connection.data_received(HEAD + b"".join(map(chunk, chat_chunks(WORDS)[:2])))
    assert leg.tick(T)
    return owner, leg, connection


def test_a_tick_says_whether_the_engine_gave_a_sign() -> None:
    _, leg, connection = started()
    assert not leg.tick(T + 0.1)
    connection.data_received(chunk(COMMENT))
    assert leg.tick(T + 0.2) and not leg.tick(T + 0.3)
    connection.data_received(chunk(chat_chunks(WORDS)[2]))
    assert leg.tick(T + 0.4) and not leg.tick(T + 0.5)


def test_comments_are_no_part_of_the_answer() -> None:
    _, leg, connection = started()
    waited = 0.0
    while leg.verdict is None and waited < 3.0:
        waited += 0.1
        connection.data_received(chunk(COMMENT))
        leg.tick(T + waited)
    assert leg.verdict is not None and leg.verdict.why == "no part of the answer for 1 s"
    assert 1.0 < waited < 1.3


def test_parts_of_the_answer_are_whichever_way_they_go() -> None:
    """Read whole, relayed as the one before, or with comments beside them."""
    words = ("Once", " upon", " a", " time", " there", ".")
    parts = chat_chunks(words)
    for spoken in (parts[3], parts[4], COMMENT + parts[5]):
        _, leg, connection = started()
        connection.data_received(chunk(parts[2]))
        for step in range(1, 10):
            leg.tick(T + 0.1 * step)
        connection.data_received(chunk(spoken))
        for step in range(10, 19):
            leg.tick(T + 0.1 * step)
        assert leg.verdict is None
        leg.tick(T + 2.5)
        assert leg.verdict is not None


def test_what_its_caller_does_not_read_is_no_stall() -> None:
    _, leg, connection = started()
    connection.pause()
    for step in range(50):
        leg.tick(T + 0.1 * step)
    assert leg.verdict is None


def test_what_comes_after_the_end_is_nobodys() -> None:
    owner, leg, _ = started()
    leg.abandon()
    told = list(owner.told)
    leg.on_data(chat_chunks(WORDS)[2])
    assert owner.told == told and not leg.tick(T + 9.0)


def test_the_first_word_is_noted_once() -> None:
    owner, _, connection = started()
    owner.clock = T + 1.0
    for part in chat_chunks(WORDS)[2:]:
        connection.data_received(chunk(part))
    assert owner.first == [T] and owner.splice.done
    assert b"".join(owner.told).endswith(b"data: [DONE]\n\n")
