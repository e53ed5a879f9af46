"""Counters in memory and in a real Redis: the same answers, and what happens when Redis is gone."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.http.rate_limits.rates import Rate
from paceline.http.rate_limits.store import RateStore, check_storage_url
from tests.http.rate_limits.redis_server import RedisServer

# windows of a day: no test runs across the end of one
HUNDRED = Rate(100, 86400)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.services)])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RateStore]:
    url = None if request.param == "memory" else request.getfixturevalue("redis").url
    made = RateStore(url, timeout=5.0)
    yield made
    assert made.up and made.failures == 0
    await made.close()


async def test_what_fits_is_counted_and_what_does_not_is_not(store: RateStore) -> None:
    assert (await store.look("tokens", "alice", HUNDRED)).remaining == 100
    taken, window = await store.take("tokens", "alice", HUNDRED, 70)
    assert taken and window.remaining == 30
    assert 0 < window.rolls_in <= 86400
    taken, window = await store.take("tokens", "alice", HUNDRED, 31)
    assert not taken and window.remaining == 30
    assert 0 < window.retry_after(31) <= 2 * 86400
    # the refused one was not counted
    taken, window = await store.take("tokens", "alice", HUNDRED, 30)
    assert taken and window.remaining == 0
    # neither another caller's nor another kind of limit
    assert (await store.take("tokens", "bob", HUNDRED, 100))[0]
    assert (await store.take("requests", "alice", HUNDRED, 100))[0]


async def test_what_is_given_back_can_be_taken_again(store: RateStore) -> None:
    taken, counted = await store.take("tokens", "carol", HUNDRED, 100)
    assert taken
    await store.give_back("tokens", "carol", counted, 60)
    taken, window = await store.take("tokens", "carol", HUNDRED, 60)
    assert taken and window.remaining == 0
    assert not (await store.take("tokens", "carol", HUNDRED, 1))[0]


async def test_a_window_fades(store: RateStore) -> None:
    rate = Rate(10, 1)
    assert (await store.take("requests", "dave", rate, 10))[0]
    taken, window = await store.take("requests", "dave", rate, 5)
    assert not taken
    await asyncio.sleep(window.retry_after(5) + 0.05)
    assert (await store.take("requests", "dave", rate, 5))[0]


async def test_many_at_once_get_no_more_than_there_is(store: RateStore) -> None:
    answers = await asyncio.gather(*(store.take("requests", "eve", HUNDRED, 3) for _ in range(60)))
    assert sum(taken for taken, _ in answers) == 33


async def test_callers_who_left_are_forgotten_and_not_looked_for_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = 0.0
    clock = SimpleNamespace(time=lambda: time.time() + later)
    monkeypatch.setattr("limits.aio.storage.memory.time", clock)
    store = RateStore(sweep_every=0.3)
    counters = store._memory.storage.storage
    short = Rate(5, 1)
    for number in range(50):
        await store.take("requests", f"caller {number}", short, 1)
        await asyncio.sleep(0)
    # a look for what expired is not begun before its time
    timer = store._memory.storage.timer
    await store.take("requests", "one more", short, 1)
    assert store._memory.storage.timer is timer and not timer.done()
    assert len(counters) == 51
    # twice their window is over, and so is the pause
    later = 2.5
    await timer
    for _ in range(2):
        await store.take("requests", "another", HUNDRED, 1)
        await asyncio.sleep(0.05)
    assert len(counters) <= 2
    await store.close()


@pytest.mark.services
async def test_two_servers_share_one_count(redis: RedisServer) -> None:
    first, second = RateStore(redis.url), RateStore(redis.url)
    assert (await first.take("tokens", "shared", HUNDRED, 80))[0]
    assert not (await second.take("tokens", "shared", HUNDRED, 30))[0]
    assert (await second.take("tokens", "shared", HUNDRED, 20))[0]
    await first.close()
    await second.close()


def lose(server: RedisServer) -> None:
    server.stop()


def hang(server: RedisServer) -> None:
    server.signal(signal.SIGSTOP)


def resume(server: RedisServer) -> None:
    server.signal(signal.SIGCONT)


@pytest.mark.services
@pytest.mark.parametrize(
    ("gone", "back"), [(lose, RedisServer.start), (hang, resume)], ids=["killed", "stopped"]
)
async def test_without_redis_this_process_counts_and_nobody_hangs(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gone: Callable[[RedisServer], None],
    back: Callable[[RedisServer], None],
) -> None:
    server = RedisServer(tmp_path)
    store = RateStore(server.url, timeout=0.2, probe_every=0.05)
    try:
        assert (await store.take("tokens", "alice", HUNDRED, 90))[0]
        with caplog.at_level(logging.WARNING, "paceline.server"):
            gone(server)
            started = time.monotonic()
            answers = [await store.take("tokens", "alice", HUNDRED, 60) for _ in range(2)]
            # the first waited for the timeout, whatever Redis' own client would have done
            assert time.monotonic() - started < 2.0
            # limits hold, by a count that begins anew
            assert [taken for taken, _ in answers] == [True, False]
            assert not store.up and store.failures == 1
            back(server)
            for _ in range(200):
                if store.up:
                    break
                await asyncio.sleep(0.02)
            assert store.up
        said = [record.getMessage() for record in caplog.records]
        assert [line.split(":")[0].split(" error")[0] for line in said] == [
            "rate_limit_storage up=false",
            "rate_limit_storage up=true",
        ]
        assert str(server.port) not in "".join(said)
        # what a Redis that was only stopped had counted is still there
        taken, _ = await store.take("tokens", "alice", HUNDRED, 60)
        assert taken == (gone is lose)
    finally:
        await store.close()
        server.signal(signal.SIGCONT)
        server.stop()


@pytest.mark.services
@pytest.mark.parametrize(
    ("gone", "back"), [(lose, RedisServer.start), (hang, resume)], ids=["killed", "stopped"]
)
async def test_no_counter_is_given_back_what_another_counted(
    tmp_path: Path, gone: Callable[[RedisServer], None], back: Callable[[RedisServer], None]
) -> None:
    server = RedisServer(tmp_path)
    store = RateStore(server.url, timeout=0.2, probe_every=0.05)

    async def most() -> int:
        """What may be taken now."""
        window = await store.look("tokens", "alice", HUNDRED)
        return window.rate.amount - window.used

    try:
        _, in_redis = await store.take("tokens", "alice", HUNDRED, 80)
        gone(server)
        # Redis does not answer to this very call: neither does it fall on the other's counter
        await store.give_back("tokens", "alice", in_redis, 70)
        assert not store.up and await most() == 100
        await store.give_back("tokens", "alice", in_redis, 70)
        assert await most() == 100
        _, in_memory = await store.take("tokens", "alice", HUNDRED, 60)
        await store.give_back("tokens", "alice", in_memory, 10)
        assert await most() == 50
        back(server)
        async with asyncio.timeout(5.0):
            while not store.up:
                await asyncio.sleep(0.02)
        before = await most()
        await store.give_back("tokens", "alice", in_memory, 50)
        await store.give_back("tokens", "alice", in_redis, 70)
        assert await most() == before <= 100
    finally:
        await store.close()
        server.signal(signal.SIGCONT)
        server.stop()


async def test_a_redis_that_was_never_there_does_not_keep_a_server_from_serving() -> None:
    store = RateStore("redis://127.0.0.1:1/0")
    assert (await store.take("tokens", "alice", HUNDRED, 90))[0]
    assert not store.up
    await store.close()


@pytest.mark.parametrize(
    "url", ["", "memory://", "http://host", "redis", "mongodb://user:secret@host"]
)
def test_other_urls_are_refused_without_being_told(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_storage_url(url)
    assert "secret" not in str(error.value)
