"""The short way of a token: the same bytes as the usual way, past the event loop's turns."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.protocol import Sink
from paceline.engine.testing import null_client
from paceline.engine.types import GenerationOutput, GenerationRequest
from paceline.http.body_writer import BODY_WRITER, BodyWriter
from paceline.server import ServerConfig, create_app, serve
from paceline.server.apis.openai.chat import ChatStream
from paceline.server.apis.openai.completions import CompletionStream
from tests.server.helpers import VOCAB, chat_body, events, metric, post_scope
from tests.server.protocol.test_tools import TOOLS

_TEXT = {"prompt": "xy", "max_tokens": 40, "stream": True, "request_id": "r", "ignore_eos": True}
_CHAT = chat_body(max_tokens=40, stream=True, request_id="r", ignore_eos=True)
_IDS = {
    "token_ids": [1, 2],
    "sampling_params": {"max_tokens": 40, "ignore_eos": True},
    "stream": True,
    "request_id": "r",
}
# where and what: each has a middle with news
_ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", _CHAT | {"n": 3, "explain": True}),
    ("/v1/chat/completions", _CHAT | {"logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", _CHAT | {"return_token_ids": True}),
    ("/v1/chat/completions", _CHAT | {"skip_special_tokens": False, "stop": ["no", "such"]}),
    (
        "/v1/chat/completions",
        _CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    # what has been said of a call decides what the next text means
    (
        "/v1/chat/completions",
        _CHAT | {"tools": TOOLS, "tool_choice": "required", "ignore_eos": False},
    ),
    ("/v1/chat/completions", _CHAT | {"tools": TOOLS, "tool_choice": "auto"}),
    ("/v1/completions", _TEXT),
    ("/v1/completions", _TEXT | {"n": 2, "logprobs": 1}),
    ("/v1/completions", _TEXT | {"echo": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", _TEXT | {"return_token_ids": True}),
    ("/inference/v1/generate", _IDS),
)


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngineClient]:
    """One whose steps take long enough to be told one by one."""
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.002))
    yield client
    await client.close()


class Replayed:
    """A client that answers every request as the engine answered the first one, output by output,
    with each of them a delivery of its own; and that tells its sink what ``Sink`` promises."""

    def __init__(self, engine: LocalEngineClient) -> None:
        self._engine = engine
        self._outputs: list[GenerationOutput] = []
        self.taken = 0
        self.on_dead = None
        self.on_stats = None
        self.on_timeline = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, request: GenerationRequest, sink: Sink
    ) -> AsyncIterator[GenerationOutput]:
        for _ in range(5):
            # on a busy machine outputs come joined, and then there is little between the ends
            if len(self._outputs) > 8:
                break
            self._outputs = [output async for output in self._engine.generate(request)]
        assert len(self._outputs) > 3, "there is a middle"
        for number, output in enumerate(self._outputs):
            if number and not output.finished and sink(output):
                self.taken += 1
            else:
                yield output


class Writer:
    """A BodyWriter behind the parts that were sent."""

    is_ready = True
    is_gone = False

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts
        self.num_bytes = 0

    def write(self, body: bytes) -> None:
        self.num_bytes += len(body)
        self.parts.append(body)


async def asked(app: Any, path: str, body: dict[str, Any], *, short: bool) -> tuple[str, int]:
    """What an app answers, less when; and how much of it went the short way."""
    parts: list[bytes] = []
    writer = Writer(parts)
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return requests.pop() if requests else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            parts.append(message["body"])

    scope = post_scope(path)
    if short:
        scope["extensions"] = {BODY_WRITER: writer}
    await app(scope, receive, send)
    of_time = r'("created"|"ttft_ms"|"queued_ms"|"tokens_per_second"):[\d.]+'
    text = re.sub(of_time, r"\1:0", b"".join(parts).decode())
    return re.sub(r'"call_\w+"', '"call"', text), writer.num_bytes


@pytest.mark.parametrize(("path", "body"), _ASKS)
async def test_both_ways_say_the_same(
    engine: LocalEngineClient, path: str, body: dict[str, Any]
) -> None:
    client: Any = Replayed(engine)
    app = create_app(client, ServerConfig())
    usual, none = await asked(app, path, body, short=False)
    assert (client.taken, none) == (0, 0)
    short, num_bytes = await asked(app, path, body, short=True)
    assert short == usual
    assert client.taken > 3 and num_bytes > 0
    # a writer that is never ready is as none
    Writer.is_ready, before = False, client.taken
    try:
        assert await asked(app, path, body, short=True) == (usual, 0)
    finally:
        Writer.is_ready = True
    assert client.taken == before


async def test_several_prompts_stay_off_the_short_way(engine: LocalEngineClient) -> None:
    client: Any = Replayed(engine)
    app = create_app(client, ServerConfig())
    body = _TEXT | {"prompt": ["xy", "xy"]}
    text, num_bytes = await asked(app, "/v1/completions", body, short=True)
    assert (client.taken, num_bytes) == (0, 0)
    said = ["", ""]
    for event in events(text):
        for choice in event["choices"]:
            said[choice["index"]] += choice["text"]
    assert said[0] == said[1] != ""


async def test_what_is_told_of_tokens_counts_both_ways(engine: LocalEngineClient) -> None:
    client: Any = Replayed(engine)
    app = create_app(client, ServerConfig())
    texts = []
    for short in (False, True):
        await asked(app, "/v1/completions", _TEXT, short=short)
        texts.append(app.state.service.metrics.render().decode())
    for name in (
        "vllm:generation_tokens_total",
        "vllm:inter_token_latency_seconds_count",
        "http_response_size_bytes_sum",
        "vllm:request_generation_tokens_sum",
    ):
        first, both = (metric(text, name) for text in texts)
        assert both == 2 * first > 30, name


async def test_an_error_on_the_short_way_ends_its_stream(
    engine: LocalEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(engine, ServerConfig())
    written: list[bytes] = []

    def fail(writer: Writer, body: bytes) -> None:
        written.append(body)
        if len(written) == 3:
            raise ValueError("no more")

    monkeypatch.setattr(Writer, "write", fail)
    text, _ = await asked(app, "/v1/completions", _TEXT | {"max_tokens": 400}, short=True)
    *_, error = events(text)
    assert error["error"]["code"] == 500
    assert len(written) == 3
    async with asyncio.timeout(5):
        while engine.num_unfinished or engine.stats.scheduler.num_running:
            await asyncio.sleep(0.01)


async def test_an_exchange_is_freed_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its last reference, not by the garbage collector."""
    exchanges: list[weakref.ref[Any]] = []
    original = BodyWriter.__init__

    def spy(writer: BodyWriter, cycle: Any) -> None:
        exchanges.append(weakref.ref(cycle))
        original(writer, cycle)

    monkeypatch.setattr(BodyWriter, "__init__", spy)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.001))
    serving = asyncio.ensure_future(
        serve(client, ServerConfig(), port=0, on_ready=lambda _, port: ready.set_result(port))
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", await ready)
    body = json.dumps(_TEXT).encode()
    gc.disable()
    try:
        for _ in range(2):
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                % len(body)
                + body
            )
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
        async with asyncio.timeout(5):
            # the connection holds on to the one that was last
            while exchanges[0]() is not None:
                await asyncio.sleep(0.01)
        assert exchanges[1]() is not None
    finally:
        gc.enable()
        writer.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [("/v1/chat/completions", _CHAT, ChatStream), ("/v1/completions", _TEXT, CompletionStream)],
)
async def test_a_stream_is_freed_when_it_is_over(
    engine: LocalEngineClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    stream: type[Any],
) -> None:
    """By its last reference: it holds the prompt's ids."""
    streams: list[weakref.ref[Any]] = []
    original = stream.__init__

    def spy(made: Any, *arguments: Any) -> None:
        streams.append(weakref.ref(made))
        original(made, *arguments)

    monkeypatch.setattr(stream, "__init__", spy)
    client: Any = Replayed(engine)
    app = create_app(client, ServerConfig())
    gc.disable()
    try:
        _, num_bytes = await asked(app, path, body, short=True)
        assert num_bytes and len(streams) == 1
        assert streams[0]() is None
    finally:
        gc.enable()


def test_an_end_waits_for_a_slow_reader() -> None:
    written: list[bytes] = []
    flow = SimpleNamespace(write_paused=True)
    cycle: Any = SimpleNamespace(
        flow=flow,
        disconnected=False,
        response_complete=False,
        response_started=True,
        chunked_encoding=True,
        keep_alive=True,
        message_event=asyncio.Event(),
        on_response=lambda: written.append(b"(the next one)"),
        transport=SimpleNamespace(write=written.append),
    )
    writer = BodyWriter(cycle)
    assert not writer.finish(b"end") and not writer.offer(b"more")
    assert (written, writer.num_bytes, cycle.response_complete) == ([], 0, False)
    flow.write_paused = False
    assert writer.finish(b"end") and cycle.response_complete
    assert written == [b"3\r\nend\r\n0\r\n\r\n", b"(the next one)"] and writer.num_bytes == 3
    # it is over
    assert not writer.finish(b"end") and not writer.offer(b"more")
    with pytest.raises(AssertionError, match="an end by itself"):
        writer.finish(b"")


async def test_a_real_connection_has_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    original = BodyWriter.write

    def spy(writer: BodyWriter, body: bytes) -> None:
        written.append(body)
        original(writer, body)

    monkeypatch.setattr(BodyWriter, "write", spy)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    client = null_client(NullBackend(vocab_size=VOCAB, max_model_len=512, step_time=0.001))
    serving = asyncio.ensure_future(
        serve(client, ServerConfig(), port=0, on_ready=lambda _, port: ready.set_result(port))
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", await ready)
    body = json.dumps(_TEXT | {"logit_bias": {"113": 100}}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    _, _, chunked = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    text = ""
    while (head := chunked.partition(b"\r\n"))[0] != b"0":
        size = int(head[0], 16)
        text += head[2][:size].decode()
        assert head[2][size : size + 2] == b"\r\n"
        chunked = head[2][size + 2 :]
    assert "".join(event["choices"][0]["text"] for event in events(text)) == "q" * 40
    assert len(written) > 3 and all(part.decode() in text for part in written)
