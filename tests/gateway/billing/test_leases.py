"""Budgets that several gateways share over Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.gateway.billing.leases import LeaseStore
from tests.http.rate_limits.redis_server import RedisServer


class CountingRedis:
    """As much of a Redis as leases take; ``down``: it says nothing."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.num_operations = 0
        self.commands: set[bytes] = set()
        self.down = False
        # operations after which it says nothing more
        self.down_after: int | None = None
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                if self.down:
                    continue
                self.commands.add(words[0].upper())
                if words[0].upper() == b"INCRBY":
                    self.num_operations += 1
                    if self.num_operations - 1 == self.down_after:
                        self.down = True
                        continue
                    self.numbers[words[1]] = self.numbers.get(words[1], 0) + int(words[2])
                    writer.write(b":%d\r\n" % self.numbers[words[1]])
                elif words[0].upper() == b"EXPIRE":
                    writer.write(b":1\r\n")
                else:
                    writer.write(b"+OK\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def counting_redis() -> AsyncIterator[CountingRedis]:
    redis = CountingRedis()
    server = await asyncio.start_server(redis.serve, "127.0.0.1", 0)
    redis.port = server.sockets[0].getsockname()[1]
    try:
        yield redis
    finally:
        server.close()
        for writer in redis.writers:
            writer.transport.abort()
        await asyncio.sleep(0)


async def test_leases_keep_redis_off_the_way_and_the_sum_below_the_budget() -> None:
    async with counting_redis() as redis:
        stores = [LeaseStore(f"redis://127.0.0.1:{redis.port}/0") for _ in range(3)]
        most, each = 1_000_000, 100
        taken = 0
        for number in range(10_600):
            fits, _ = await stores[number % 3].take("ann", "2026-03-31", each, most)
            taken += each * fits
        # all of it but what lies in the others' leases, and never more
        assert most - 3 * most // 100 <= taken <= most
        assert redis.num_operations < 1000
        for store in stores:
            await store.close()
        assert set(redis.numbers.values()) == {taken}


async def test_what_costs_less_goes_back_to_the_lease() -> None:
    async with counting_redis() as redis:
        store = LeaseStore(f"redis://127.0.0.1:{redis.port}/0")
        for _ in range(10):
            fits, _ = await store.take("ann", "", 900, 1000)
            assert fits
            store.give_back("ann", "", 890)
        fits, before = await store.take("ann", "", 901, 1000)
        assert not fits and before >= 100
        await store.close()
        assert redis.numbers == {b"paceline:budget:{ann}:": 100}


async def test_what_one_gateway_reserved_and_did_not_use_is_there_for_another() -> None:
    async with counting_redis() as redis:
        one, other = (LeaseStore(f"redis://127.0.0.1:{redis.port}/0") for _ in range(2))
        assert (await one.take("ann", "", 900, 1000))[0]
        one.give_back("ann", "", 899)
        await asyncio.gather(*one._tasks)
        assert (await other.take("ann", "", 900, 1000))[0]
        # nothing that a budget for good has spent is forgotten
        assert b"EXPIRE" not in redis.commands
        await one.close()
        await other.close()
        assert redis.numbers == {b"paceline:budget:{ann}:": 901}


async def test_without_redis_each_gateway_counts_from_what_it_saw() -> None:
    async with counting_redis() as redis:
        store = LeaseStore(f"redis://127.0.0.1:{redis.port}/0")
        assert (await store.take("ann", "", 400, 1000))[0]
        redis.down = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = [(await store.take("ann", "", 200, 1000))[0] for _ in range(6)]
        # neither an outage nor an open door, and no request waits twice
        assert found.count(True) in (2, 3) and loop.time() - began < 0.8
        redis.down = False
        store._away_until = 0.0
        await store.take("ann", "", 1, 1000)
        await store.close()
        assert 800 <= redis.numbers[b"paceline:budget:{ann}:"] <= 1001


async def test_what_was_taken_in_vain_goes_back_once_redis_is_there_again() -> None:
    async with counting_redis() as redis:
        one, other = (LeaseStore(f"redis://127.0.0.1:{redis.port}/0") for _ in range(2))
        assert (await other.take("ann", "", 890, 1000))[0]
        # too much is taken, and Redis goes away before it can go back
        redis.down_after = redis.num_operations + 1
        assert not (await one.take("ann", "", 200, 1000))[0]
        assert redis.numbers[b"paceline:budget:{ann}:"] > 1000
        redis.down, redis.down_after = False, None
        one._away_until = 0.0
        # what is left can be had all the same
        assert (await one.take("ann", "", 50, 1000))[0]
        for store in (one, other):
            await store.close()
        assert redis.numbers == {b"paceline:budget:{ann}:": 940}


async def test_what_was_spent_beyond_a_lease_is_told_at_once() -> None:
    async with counting_redis() as redis:
        one, other = (LeaseStore(f"redis://127.0.0.1:{redis.port}/0") for _ in range(2))
        assert (await one.take("ann", "", 100, 1000))[0]
        # it cost nine times what it was said to at most
        one.give_back("ann", "", -800)
        await asyncio.gather(*one._tasks)
        assert redis.numbers[b"paceline:budget:{ann}:"] >= 900
        assert not (await other.take("ann", "", 200, 1000))[0]
        await one.close()
        await other.close()
        assert redis.numbers == {b"paceline:budget:{ann}:": 900}


async def test_what_never_fits_is_not_asked_for() -> None:
    """More than Redis counts with would look as if it were away."""
    async with counting_redis() as redis:
        store = LeaseStore(f"redis://127.0.0.1:{redis.port}/0")
        assert not (await store.take("ann", "", 10**30, 1000))[0]
        assert redis.num_operations == 0 and store.failures == 0
        assert (await store.take("ann", "", 100, 1000))[0]
        await store.close()


@pytest.mark.services
async def test_over_a_real_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        stores = [LeaseStore(server.url) for _ in range(2)]
        found = [(await stores[number % 2].take("ann", "", 100, 1000))[0] for number in range(14)]
        assert found.count(True) >= 9 and not found[-1]
        for store in stores:
            await store.close()
    finally:
        server.stop()


def test_a_malformed_url() -> None:
    with pytest.raises(ConfigError, match="must be the URL of a Redis"):
        LeaseStore("ftp://x")
