"""Both clients over real sockets, against a server that fails as it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.client import (
    AsyncClient,
    Client,
    ClientError,
    Event,
    Finished,
    NoAnswerError,
    NotParsedError,
    Policy,
    RefusedError,
    Resumed,
    Retrying,
    StreamInterruptedError,
    Target,
    TextDelta,
)
from paceline.http.fields import show_url
from tests.client.scripted import TEXT, Reply, chat_stream, scripted_server, sse

# a limit is only met where a test is about it, however busy the machine is
POLICY = Policy(backoff_base=0.02)
QUICK = replace(POLICY, first_token_timeout=0.3, gap_timeout=0.3)
HI = [{"role": "user", "content": "hi"}]
Read = Callable[..., tuple[list[Event], ClientError | None]]


def read_sync(urls: list[str], policy: Policy = POLICY, **options: Any) -> Any:
    client = Client([Target(url, "m", "key") for url in urls], policy=policy)
    events: list[Event] = []
    try:
        with client.chat(HI, **options) as stream:
            events.extend(stream)
    except ClientError as error:
        return events, error
    return events, None


def read_async(urls: list[str], policy: Policy = POLICY, **options: Any) -> Any:
    async def read() -> Any:
        client = AsyncClient([Target(url, "m", "key") for url in urls], policy=policy)
        events: list[Event] = []
        try:
            async with client.chat(HI, **options) as stream:
                async for event in stream:
                    events.append(event)
        except ClientError as error:
            return events, error
        return events, None

    return asyncio.run(read())


READERS = pytest.mark.parametrize("read", [read_sync, read_async], ids=["sync", "async"])


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@READERS
def test_a_stream(read: Read) -> None:
    with scripted_server() as server:
        events, error = read([server.url], max_tokens=9)
        assert error is None and isinstance(events[-1], Finished)
        assert text_of(events) == events[-1].text == TEXT
        assert server.bodies[0]["max_tokens"] == 9 and server.bodies[0]["messages"] == HI
        assert server.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")
        assert "Authorization: Bearer key\r\n" in server.heads[0]


@READERS
@pytest.mark.parametrize("stall", [False, True])
def test_cuts_and_stalls(read: Read, stall: bool) -> None:
    length = len(chat_stream({"return_token_ids": True, "stream_options": {}}))
    cuts = range(0, length, 400 if stall else 53)
    with scripted_server() as server:
        for cut in cuts:
            server._replies = [Reply(cut=cut, stall=stall)]
            events, error = read([server.url], QUICK if stall else POLICY)
            assert error is None and text_of(events) == TEXT, cut


@READERS
@pytest.mark.parametrize(
    "reply",
    [
        Reply(raw=b""),
        Reply(raw=b"garbage\r\n\r\n"),
        Reply(raw=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000),
        Reply(raw=b"HTTP/1.1 200 OK\r\n", stall=True),
        Reply(body=b"data: garbage\n\n"),
        Reply(body=sse({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})),
        Reply(cut=200, half_close=True),
        Reply(503, body=b"{}"),
        Reply(503, body=b"{}", cut=0, stall=True),
        Reply(429, {"Retry-After": "0.1"}, b"{}"),
    ],
    ids=lambda reply: str(reply)[:60],
)
def test_faults_cost_an_attempt(read: Read, reply: Reply) -> None:
    with scripted_server(reply) as server:
        events, error = read([server.url], QUICK if reply.stall else POLICY)
        assert error is None and text_of(events) == TEXT
        assert len(server.bodies) == 2
        assert sum(isinstance(event, Retrying) for event in events) == 1


@READERS
def test_an_answer_is_whole_without_done(read: Read) -> None:
    counts = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'
    body = chat_stream({"stream_options": {}}).replace(b"data: [DONE]\n\n", counts)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    with scripted_server(Reply(body=body), Reply(raw=head + body)) as server:
        for _ in range(2):
            events, error = read([server.url])
            assert error is None and text_of(events) == TEXT
        assert len(server.bodies) == 2


@READERS
def test_interim_answers_and_chunks(read: Read) -> None:
    body = chat_stream({"stream_options": {}})
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    head = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with scripted_server(Reply(raw=head + chunks + b"0\r\n\r\n", stall=True)) as server:
        events, error = read([server.url])
        assert error is None and text_of(events) == TEXT and len(server.bodies) == 1


@READERS
def test_refusals_and_dead_targets(read: Read) -> None:
    with scripted_server(Reply(401, body=b'{"error": {"message": "no key"}}')) as server:
        _, error = read([server.url])
        assert isinstance(error, RefusedError) and error.message == "no key"
        # nobody listens at the first
        events, error = read(["http://127.0.0.1:1", server.url])
        assert error is None and text_of(events) == TEXT
    _, error = read(["http://127.0.0.1:1"])
    assert isinstance(error, NoAnswerError) and error.attempts == 3


@READERS
def test_a_stream_moves_to_another_server(read: Read) -> None:
    with scripted_server(Reply(cut=600)) as first, scripted_server() as second:
        events, error = read([first.url, second.url])
        assert error is None and text_of(events) == TEXT
        (resumed,) = [event for event in events if isinstance(event, Resumed)]
        assert resumed.target == 1
        assert len(second.bodies[0]["resume_output_ids"]) == resumed.position > 0


@READERS
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(cut=600), "the connection was closed"),
        (Reply(raw=b"garbage\r\n\r\n", stall=True), "the answer is not HTTP"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, stall=True), "head has over 65536"),
        # what comes behind the garbage is not taken for the next answer
        (Reply(body=b"data: garbage\n\n"), "no JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_reasons(read: Read, reply: Reply, reason: str) -> None:
    with scripted_server(reply) as first, scripted_server() as second:
        events, error = read([first.url, second.url])
        assert error is None and text_of(events) == TEXT
        (retrying,) = [event for event in events if isinstance(event, Retrying)]
        assert reason in retrying.reason
        assert len(first.bodies) == len(second.bodies) == 1


@READERS
def test_an_honest_end(read: Read) -> None:
    def without_ids(body: dict[str, Any]) -> bytes:
        return chat_stream(body, ids=False)

    with scripted_server(Reply(cut=600), stream=without_ids) as server:
        events, error = read([server.url])
        assert isinstance(error, StreamInterruptedError) and error.partial == text_of(events)


def test_closing_hangs_up() -> None:
    with scripted_server(Reply(cut=600, stall=True), Reply(cut=600, stall=True)) as server:
        stream = Client([Target(server.url, "m")]).chat(HI)
        next(stream)
        assert not server.hung_up.is_set()
        stream.close()
        assert server.hung_up.wait(5)
        assert list(stream) == []
        with pytest.raises(ValueError, match="read or closed"):
            stream.result()
        server.hung_up.clear()

        async def read() -> None:
            async with AsyncClient([Target(server.url, "m")]).chat(HI) as answer:
                async for _ in answer:
                    break
            assert await asyncio.to_thread(server.hung_up.wait, 5)

        asyncio.run(read())


def test_cancelling_a_task_hangs_up() -> None:
    async def main() -> None:
        with scripted_server(Reply(cut=600, stall=True)) as server:
            client = AsyncClient([Target(server.url, "m")])
            task = asyncio.create_task(client.chat(HI).result())
            while not server.bodies:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await asyncio.to_thread(server.hung_up.wait, 5)

    asyncio.run(main())


def test_a_slow_reader_does_not_run_into_the_gap() -> None:
    with scripted_server() as server:
        stream = Client([Target(server.url, "m")], policy=QUICK).chat(HI)
        next(stream)
        time.sleep(0.5)
        assert stream.result().text == TEXT and len(server.bodies) == 1


def test_what_came_in_time_counts_though_the_loop_was_held_up() -> None:
    """The answer and the end of its time are there at once when the loop goes on."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        held_up, sent = threading.Event(), threading.Event()

        def hold_up() -> None:
            held_up.set()
            assert sent.wait(10)
            time.sleep(QUICK.first_token_timeout)

        def stream(body: dict[str, Any]) -> bytes:
            loop.call_soon_threadsafe(hold_up)
            assert held_up.wait(10)
            # once the answer is written
            asyncio.get_running_loop().call_soon(sent.set)
            return chat_stream(body)

        with scripted_server(stream=stream) as server:
            client = AsyncClient([Target(server.url, "m")], policy=QUICK)
            assert (await client.chat(HI).result()).text == TEXT
            assert len(server.bodies) == 1

    asyncio.run(main())


@dataclass
class Place:
    name: str
    parts: list[Place]


class City(msgspec.Struct):
    name: str
    people: int


class LikePydantic:
    """What this room asks of a pydantic model, which is no dependency."""

    def __init__(self, text: str) -> None:
        self.text = text

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object"}

    @classmethod
    def model_validate_json(cls, text: str) -> LikePydantic:
        return cls(text)


def saying(text: str, reason: str = "stop") -> Callable[[dict[str, Any]], bytes]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return lambda body: sse({"choices": [choice]}, "[DONE]")


def test_answers_of_a_type() -> None:
    with scripted_server(stream=saying('{"name": "Rome", "people": 3}')) as server:
        client = Client([Target(server.url, "m")])
        assert client.chat(HI, parse=City).result().parsed == City("Rome", 3)
        told = server.bodies[0]["response_format"]
        assert told["type"] == "json_schema" and told["json_schema"]["name"] == "City"
        assert told["json_schema"]["schema"]["properties"]["people"] == {"type": "integer"}
        parsed = client.chat(HI, parse=LikePydantic).result().parsed
        assert isinstance(parsed, LikePydantic) and "Rome" in parsed.text
        with pytest.raises(NotParsedError, match="parts") as info:
            client.chat(HI, parse=Place).result()
        assert info.value.text.startswith('{"name"')
        assert server.bodies[-1]["response_format"]["json_schema"]["schema"]["type"] == "object"
    with (
        scripted_server(stream=saying('{"name": "R', "length")) as server,
        pytest.raises(NotParsedError, match="ended by length"),
    ):
        Client([Target(server.url, "m")]).chat(HI, parse=City).result()


def test_what_the_client_says_itself() -> None:
    client = Client([Target("http://127.0.0.1:1", "m")])
    for options, error in (
        ({"stream": False}, TypeError),
        ({"model": "x"}, TypeError),
        ({"n": 2}, ValueError),
        ({"parse": City, "response_format": {"type": "text"}}, TypeError),
    ):
        with pytest.raises(error):
            client.chat(HI, **options)  # type: ignore[arg-type]
    for options, words in (
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"logit_bias": {"7": float("-inf")}}, "logit_bias.7 is -inf"),
        ({"slo": {"ttfts": [1.0, float("inf")]}}, r"slo\.ttfts\[1\] is inf"),
    ):
        with pytest.raises(ValueError, match=words):
            client.chat(HI, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content is nan"):
        AsyncClient([Target("http://127.0.0.1:1", "m")]).chat([{"content": float("nan")}])
    with pytest.raises(ValueError, match="target"):
        Client([])


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("127.0.0.1:8000", ""),
        ("ftp://a", ""),
        ("http://u:p@a", ""),
        ("http://a?x=1", ""),
        ("http://a", "k\r\nX: y"),
        ("http://a b", ""),
        ("http://a:99999", ""),
        ("http://a:0", ""),
        # resolvers raise errors of their own for these, which are no connection's
        ("http://a..b", ""),
        (f"http://{'a' * 64}.com", ""),
    ],
)
def test_targets_that_are_none(url: str, key: str) -> None:
    with pytest.raises(ValueError):
        Target(url, "m", key)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://user:secret@host/v1",
        "https//user:secret@host",
        "user:secret@host",
        "http://user:secret@",
        "http://user:se/cr?et#secret@host",
        "http://user:secret@host:port",
        "http://:secret@host",
        "user:secret@//host",
        "http://user:secret@[::1",
        "http://user:secret\u2100@host",
        "ftp://host?key=secret",
        "ftp://host#secret",
        "http://host:0?key=secret",
    ],
)
def test_a_url_that_is_none_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        Target(url, "m")
    error = caught.value
    assert "secret" not in str(error) and "base_url" in str(error)
    # as everything else of ours shows it
    shown = show_url(url)
    assert "secret" not in shown and (shown in str(error) or "has a user" in str(error))
    # a traceback shows what an error was raised from
    assert error.__context__ is None or error.__suppress_context__


@given(st.text("ab@/:?#[]%\u2100 ", max_size=16))
@example("//user:pass@host:1/v1?key#part")
@example("//us@er:pa/ss@host")
@example("@//host" + "a" * 300)
def test_a_url_is_shown_as_everywhere_else(rest: str) -> None:
    """The client, which imports nothing of ours, has a copy of what shows one."""
    url = f"ftp:{rest}"
    with pytest.raises(ValueError) as caught:
        Target(url, "m")
    shown = show_url(url)
    assert str(caught.value) in (
        f"base_url {shown} has no valid host or port",
        f"base_url must be http(s)://host..., got {shown}",
    )


def test_a_target_does_not_show_its_key() -> None:
    assert "secret" not in repr(Target("http://a", "m", "secret"))


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"gap_timeout": 0}, {"backoff_max": -1}])
def test_policies_that_are_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Policy(**fields)
