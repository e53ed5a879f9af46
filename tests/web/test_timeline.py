"""``/ui/api/timeline``: who may see it, from where on, and that no viewer costs the engine."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from paceline.backends.reference.null import NullBackend
from paceline.engine.local import LocalEngineClient
from paceline.engine.models.client import Start
from paceline.engine.models.front import FrontClient
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import ModelSpec
from paceline.engine.models.pool import ModelPool
from paceline.engine.models.states import ModelStates
from paceline.engine.protocol import EngineClient, Tokenizer
from paceline.engine.testing import null_client
from paceline.server import ServerConfig, create_app
from paceline.server.app import SeveralModels
from paceline.timeline.codec import Decoder, encode
from paceline.timeline.events import (
    VERSION,
    Announce,
    End,
    FrameType,
    Keyframe,
    LaneState,
    Plan,
    Told,
)
from paceline.timeline.model import Model
from paceline.web.feed import MOST_VIEWERS, Feed, TooManyViewersError
from paceline.web.routes import ui_router
from tests.driving import make_request
from tests.server.helpers import VOCAB
from tests.timeline.watching import Watched, named


@pytest.fixture
async def told_engine() -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.002), timeline=True)
    yield client
    await client.close()


def at(engine: LocalEngineClient, **config: Any) -> httpx.AsyncClient:
    app = create_app(engine, ServerConfig(**config), page=ui_router)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=20
    )


def model_of(data: bytes) -> Model:
    decoder, model = Decoder(), Model()
    for frame in decoder.feed(data):
        model.take(frame)
    assert not decoder.num_broken and not decoder.lost
    return model


async def test_what_ran_is_there(told_engine: LocalEngineClient) -> None:
    ended = []
    async with at(told_engine) as http:
        body = {"model": "null", "prompt": "whisper", "max_tokens": 12, "n": 2, "explain": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        await asyncio.sleep(0.15)
        got = await http.get("/ui/api/timeline?seconds=60")
    assert got.headers["content-type"] == "application/octet-stream"
    assert got.headers["cache-control"] == "no-store"
    model = Model(on_ended=ended.append)
    for frame in Decoder().feed(got.content):
        model.take(frame)
    assert model.hello["version"] == VERSION and model.hello["reasons"][0] == "step"
    # the engine's name of a request begins with the answer's id
    assert all(named(seen).startswith(answer["id"]) for seen in ended)
    assert [seen.ended.output_tokens for seen in ended] == [12, 12]
    # what its caller was told, the timeline says too
    for seen, explained in zip(ended, answer["usage"]["timeline"], strict=True):
        told = dict(zip(model.hello["reasons"], seen.ended.waits, strict=True))
        waited = explained["waited_ms"]
        assert {k: round(1e3 * v, 1) for k, v in told.items() if v} == pytest.approx(
            {k: round(v, 1) for k, v in waited.items()}, abs=1.0
        )
    assert b"whisper" not in got.content


async def test_each_of_several_models_has_a_timeline_of_its_own() -> None:
    def start(name: str) -> Start:
        async def started(tokenizer: Tokenizer | None) -> EngineClient:
            backend = NullBackend(vocab_size=VOCAB, step_time=0.001)
            return null_client(backend, tokenizer=tokenizer, model=name, timeline=True)

        return started

    specs = [ModelSpec(name=n, account=Account(weights=9), aliases=(f"{n}{n}",)) for n in "abc"]
    # room for one
    pool = ModelPool(ModelStates(specs, 10), {name: start(name) for name in "abc"})
    await pool.load("a")
    configs = {n: (lambda n=n: ServerConfig(served_model_names=(n, 2 * n))) for n in "abc"}  # type: ignore[misc]
    app = create_app(
        FrontClient(pool, "a"), configs["a"](), page=ui_router,
        models=SeveralModels(pool=pool, configs=configs, first="a"),
    )  # fmt: skip
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:

        async def outputs(query: str) -> list[int]:
            ended: list[Any] = []
            model = Model(on_ended=ended.append)
            got = await http.get(f"/ui/api/timeline?seconds=60{query}")
            assert got.status_code == 200, got.text
            for frame in Decoder().feed(got.content):
                model.take(frame)
            return [seen.ended.output_tokens for seen in ended]

        for name, count in (("a", 3), ("b", 5), ("a", 4), ("bb", 6)):
            body = {"model": name, "prompt": "x", "max_tokens": count, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.15)
        # loads of a model follow one another, and what came before is there
        assert await outputs("") == await outputs("&model=a") == [3, 4]
        assert await outputs("&model=b") == await outputs("&model=bb") == [5, 6]
        got = await http.get("/ui/api/timeline?model=c")
        assert got.status_code == 409, got.text
        assert (await http.get("/ui/api/timeline?model=d")).status_code == 404
    await pool.close()


async def test_a_server_of_one_model_knows_its_own_name(told_engine: LocalEngineClient) -> None:
    async with at(told_engine) as http:
        assert (await http.get("/ui/api/timeline?model=null")).status_code == 200
        assert (await http.get("/ui/api/timeline?model=other")).status_code == 404


async def test_without_a_timeline_it_says_so(told_engine: LocalEngineClient) -> None:
    async with at(told_engine, timeline_history=0) as http:
        got = await http.get("/ui/api/timeline")
        assert got.status_code == 404 and "--no-timeline" in got.json()["error"]["message"]
    assert told_engine.on_timeline is None, "nobody listens"
    async with at(told_engine, ui=False) as http:
        assert (await http.get("/ui/api/timeline")).status_code == 404


@pytest.mark.parametrize(
    "query", ["since=x", "since=1", "since=1.2.3", "seconds=-1", "seconds=nan", "follow=yes"]
)
async def test_a_bad_question_is_told_what_is_wrong(
    told_engine: LocalEngineClient, query: str
) -> None:
    async with at(told_engine) as http:
        got = await http.get(f"/ui/api/timeline?{query}")
    assert got.status_code == 400 and query.partition("=")[0] in got.json()["error"]["message"]


async def test_a_name_made_to_point_here_is_refused(told_engine: LocalEngineClient) -> None:
    async with at(told_engine) as http:
        got = await http.get("/ui/api/timeline", headers={"Host": "evil.example"})
    assert got.status_code == 421


class _Client:
    """What a feed asks of an engine."""

    on_timeline: Any = None

    def __init__(self, real: LocalEngineClient) -> None:
        self.info, self.stats, self.faults = real.info, real.stats, real.faults


def busy(steps: int = 60, requests: int = 6) -> Watched:
    watched = Watched(num_blocks=64, step_seconds=0.1)
    watched.add(*(make_request(f"r{i}", 10, 60, arrival=100.0) for i in range(requests)))
    for _ in range(steps):
        watched.step()
    return watched


def feed_of(told_engine: LocalEngineClient, most: int = 2**20) -> tuple[Feed, Any, Watched]:
    """A feed that was told what a watched engine did, step by step at its times."""
    watched = busy(0)
    client = _Client(told_engine)
    feed = Feed(client, most, clock=lambda: watched.now)  # type: ignore[arg-type]
    sent = 0
    client.on_timeline(watched.data)
    for _ in range(60):
        sent = len(watched.data)
        watched.step()
        client.on_timeline(watched.data[sent:])
    return feed, client, watched


async def test_any_place_to_begin_leads_to_the_same(told_engine: LocalEngineClient) -> None:
    feed, _, watched = feed_of(told_engine)
    for seconds in (0.0, 1.0, 3.0, 5.0, 60.0):
        model = model_of(feed.history(seconds=seconds))
        assert model.lanes == watched.model.lanes, seconds
        assert model.num_doubts == 0 and not model.gaps
        assert {named(s) for s in model.requests.values()} == {
            named(s) for s in watched.model.requests.values()
        }
    sizes = [len(feed.history(seconds=s)) for s in (0.0, 3.0, 60.0)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2]
    since = model_of(feed.history(since=(1, 45)))
    assert since.lanes == watched.model.lanes
    first = min(f.step for f in Decoder().feed(feed.history(since=(1, 45))) if isinstance(f, Plan))
    assert 10 < first <= 45


async def test_memory_is_bounded_and_what_went_is_said(told_engine: LocalEngineClient) -> None:
    feed, client, watched = feed_of(told_engine, most=65536)
    for _ in range(40):
        # others come and go; names are long, so that it fills up
        for number in range(8):
            name = f"{watched.now}-{number}-{'x' * 100}"
            before = len(watched.data)
            watched.add(make_request(name, 4, 2, arrival=watched.now))
            client.on_timeline(watched.data[before:])
        while watched.core.has_work:
            before = len(watched.data)
            watched.step()
            client.on_timeline(watched.data[before:])
        watched.now += 2.0
        assert feed.num_bytes <= 65536 + 16384
    assert len(feed._announced) < 320, "what has ended and is out of reach is forgotten"
    model = model_of(feed.history(since=(1, 0)))
    assert model.gaps and model.gaps[0]["why"] == "history"


async def test_a_slow_viewer_loses_what_waits_and_nobody_else_does(
    told_engine: LocalEngineClient,
) -> None:
    feed, client, watched = feed_of(told_engine)
    slow = feed.follow(since=None, seconds=60.0, ends=lambda: False)
    quick = feed.follow(since=None, seconds=60.0, ends=lambda: False)
    models = {"slow": Model(), "quick": Model()}
    decoders = {"slow": Decoder(), "quick": Decoder()}

    def read(name: str, data: bytes) -> None:
        for frame in decoders[name].feed(data):
            models[name].take(frame)

    read("slow", await anext(slow))
    read("quick", await anext(quick))
    before = len(watched.data)
    watched.add(*(make_request(f"more{i}", 10, 200, arrival=watched.now) for i in range(8)))
    client.on_timeline(watched.data[before:])
    for _ in range(150):
        before = len(watched.data)
        watched.step()
        client.on_timeline(watched.data[before:])
        read("quick", await anext(quick))
    waiting = max(len(viewer.waiting) for viewer in feed._viewers)
    assert waiting <= 64
    read("slow", await anext(slow))
    assert models["slow"].gaps[-1]["why"] == "slow viewer" and not models["quick"].gaps
    for model in models.values():
        assert model.lanes == watched.model.lanes and model.num_doubts == 0
    await slow.aclose()
    await quick.aclose()
    assert feed.num_viewers == 0


async def test_places_for_viewers_are_few(told_engine: LocalEngineClient) -> None:
    feed, _, _ = feed_of(told_engine)
    streams = [
        feed.follow(since=None, seconds=1.0, ends=lambda: False) for _ in range(MOST_VIEWERS)
    ]
    for stream in streams:
        await anext(stream)
    with pytest.raises(TooManyViewersError, match="without follow"):
        feed.follow(since=None, seconds=1.0, ends=lambda: False)
    await streams[0].aclose()
    again = feed.follow(since=None, seconds=1.0, ends=lambda: False)
    await anext(again)
    for stream in (*streams[1:], again):
        await stream.aclose()


async def test_a_place_is_taken_when_it_is_asked_for(told_engine: LocalEngineClient) -> None:
    """Not when it is first read: pages that open at once are counted too."""
    feed, _, _ = feed_of(told_engine)

    def ask() -> AsyncIterator[bytes]:
        return feed.follow(since=None, seconds=1.0, ends=lambda: True)

    streams = [ask() for _ in range(MOST_VIEWERS)]
    with pytest.raises(TooManyViewersError):
        ask()
    # one whose caller was gone before anything was sent has its place no longer
    del streams[0]
    gc.collect()
    assert feed.num_viewers == MOST_VIEWERS - 1
    late = ask()
    assert model_of(await anext(late)).synced


async def test_what_waits_for_a_viewer_is_bounded_by_bytes(told_engine: LocalEngineClient) -> None:
    feed, client, watched = feed_of(told_engine)
    slow = feed.follow(since=None, seconds=60.0, ends=lambda: False)
    await anext(slow)
    known = watched.model.step
    # two messages of a keyframe that is larger than all that may wait
    lanes = (LaneState(*[0] * 6, 0.5, 0.5),) * 12_000
    large = encode(Keyframe(known + 1, watched.now, False, lanes))
    (viewer,) = feed._viewers
    client.on_timeline(large)
    assert not viewer.behind, "alone, one of any size may wait"
    client.on_timeline(large)
    assert viewer.behind and not viewer.waiting and not viewer.num_bytes
    frames = Decoder().feed(await anext(slow))
    (gap,) = [f for f in frames if isinstance(f, Told) and f.type is FrameType.GAP]
    assert gap.told["from"] == known


@pytest.mark.parametrize("replaced", [1, 2])
async def test_a_viewer_that_missed_an_engine_is_told_which_one_it_sees(
    told_engine: LocalEngineClient, replaced: int
) -> None:
    """It did not keep up while one was replaced, and reads on behind the START of the next."""
    feed, client, first = feed_of(told_engine)
    stream = feed.follow(since=None, seconds=60.0, ends=lambda: False)
    model, decoder = Model(), Decoder()
    engines: list[int] = []

    async def read() -> None:
        for frame in decoder.feed(await anext(stream)):
            model.take(frame)
            if isinstance(frame, Told) and frame.type is FrameType.HELLO:
                engines.append(frame.told["first"])
            elif isinstance(frame, Told) and frame.type is FrameType.START:
                engines[-1] += 1

    await read()
    assert engines[-1] == 1 and len(model.requests) == len(first.model.requests) > 0
    for _ in range(replaced):
        client.on_timeline(None)
        watched = Watched(num_blocks=32, step_seconds=0.1)
        watched.add(*(make_request(f"n{i}", 10, 80, arrival=100.0) for i in range(3)))
        client.on_timeline(watched.data)
        for _ in range(70):
            before = len(watched.data)
            watched.step()
            client.on_timeline(watched.data[before:])
    await read()
    assert engines[-1] == 1 + replaced and model.gaps[-1]["why"] == "slow viewer"
    assert model.start["num_blocks"] == 32
    assert model.lanes == watched.model.lanes and model.num_doubts == 0
    assert {named(seen) for seen in model.requests.values()} == {"n0", "n1", "n2"}
    await stream.aclose()


async def test_whoever_begins_late_knows_the_engine_too(told_engine: LocalEngineClient) -> None:
    """Its START is out of reach, or before what was asked for."""
    feed, _, watched = feed_of(told_engine)
    for begin in ({"seconds": 1.0}, {"since": (0, 7)}, {"since": (7, 7)}):
        model = model_of(feed.history(**begin))  # type: ignore[arg-type]
        assert model.start["num_blocks"] == 64, begin
        assert model.lanes == watched.model.lanes and model.num_doubts == 0
    # one that reads on where it was knows it already, and keeps what it has seen of the requests
    on = Decoder().feed(feed.history(since=(1, 45)))
    assert not [f for f in on if isinstance(f, Told) and f.type is FrameType.START]


async def test_announcements_count_and_never_take_more_than_half(
    told_engine: LocalEngineClient,
) -> None:
    client = _Client(told_engine)
    feed = Feed(client, 65536)  # type: ignore[arg-type]
    for number in range(1, 1001):
        told = Announce(number, 0, 0.0, 0.0, 1, 1, 0, False, False, *[0.0] * 4, "x" * 90, "", "")
        client.on_timeline(encode(told))
        if number % 50 == 0:
            client.on_timeline(encode(Keyframe(number, 1.0, True, ())))
        assert feed.num_bytes <= 65536
    assert 0 < feed._announced_size <= 32768
    # the newest are known
    names = model_of(feed.history(seconds=0.0)).requests
    assert 1000 in names and 1 not in names
    # what began and ended between two keyframes is told by its own frames
    before = len(feed._announced)
    ended = encode(End(1001, 1.0, 0, False, (0.0,) * 7, 1, 0, 0, 0, 0, 1, 0.0, 0.0, 0.0))
    told = Announce(1001, 0, 0.0, 0.0, 1, 1, 0, False, False, *[0.0] * 4, "y", "", "")
    client.on_timeline(encode(told) + ended)
    assert len(feed._announced) == before


async def test_an_engine_that_is_lost_and_replaced_is_told(told_engine: LocalEngineClient) -> None:
    feed, client, watched = feed_of(told_engine)
    client.on_timeline(None)
    lost = model_of(feed.history())
    assert lost.notices[-1]["kind"] == "engine_failed"
    # its last steps are still there to look at
    assert lost.step == watched.model.step
    client.on_timeline(busy(5, 2).data)
    model = model_of(feed.history())
    assert len(model.requests) == 2 and model.hello["engine"] == 2
    # and who begins at the new one is told nothing of the old one's requests
    late = Decoder().feed(feed.history(seconds=0.0))
    assert sum(isinstance(frame, Announce) for frame in late) == 2


async def test_a_quiet_stream_says_that_it_lives(told_engine: LocalEngineClient) -> None:
    feed, _, _ = feed_of(told_engine)
    over = False
    stream = feed.follow(since=None, seconds=0.0, ends=lambda: over)
    await anext(stream)
    (gauges,) = Decoder().feed(await anext(stream))
    assert isinstance(gauges, Told) and gauges.type is FrameType.GAUGES
    assert gauges.told["up"] is True and gauges.told["blocks"] > 0
    over = True
    (notice,) = Decoder().feed(await anext(stream))
    assert isinstance(notice, Told) and notice.told["kind"] == "draining"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_without_keyframes_memory_is_bounded_too(told_engine: LocalEngineClient) -> None:
    client = _Client(told_engine)
    feed = Feed(client, 65536)  # type: ignore[arg-type]
    announce = encode(Announce(1, 0, 0.0, 0.0, 1, 1, 0, False, False, *[0.0] * 4, "x" * 90, "", ""))
    for _ in range(1000):
        client.on_timeline(announce)
    assert feed.num_bytes <= 65536 + len(announce)
    client.on_timeline(encode(Keyframe(5, 1.0, True, ())))
    assert model_of(feed.history(seconds=0.0)).synced


async def test_where_history_was_cut_those_who_live_are_announced(
    told_engine: LocalEngineClient,
) -> None:
    """No keyframe came for so long that nothing of it could be kept."""
    client = _Client(told_engine)
    feed = Feed(client, 65536)  # type: ignore[arg-type]

    def announced(number: int) -> bytes:
        told = (number, 0, 0.0, 0.0, 1, 1, 0, False, False, *[0.0] * 4, "x" * 90, "", "")
        return encode(Announce(*told))  # type: ignore[arg-type]

    client.on_timeline(encode(Keyframe(7, 1.0, True, ())) + announced(1) + announced(2))
    client.on_timeline(encode(End(2, 1.0, 0, False, (0.0,) * 7, 1, 0, 0, 0, 0, 1, 0.0, 0.0, 0.0)))
    assert feed.num_requests == 2
    many = encode(Told(FrameType.NOTICE, {"kind": "x" * 1000}))
    for step in range(8, 108):
        plan = Plan(step, 1.0, 0.0, math.inf, 64, 0, 9, 0, 1, 0, 0, 255, 0, False, ())
        client.on_timeline(encode(plan) + many)
    assert feed.num_bytes <= 65536
    # who began and ended in what is gone is not counted any more
    assert feed.num_requests == 1
    client.on_timeline(
        encode(Keyframe(107, 2.0, True, (LaneState(1, 0, 3, False, 5, 0, 0.5, 0.0),)))
    )
    model = model_of(feed.history(seconds=60.0))
    assert [gap["why"] for gap in model.gaps] == ["history"]
    (seen,) = model.requests.values()
    assert seen.told is not None and seen.told.request_id == "x" * 90 and seen.lane == 0
    # and who asks for what is gone is told so once
    (gap,) = model_of(feed.history(since=(0, 1))).gaps
    assert gap["from"] == 1 and 8 < gap["to"] < 107
