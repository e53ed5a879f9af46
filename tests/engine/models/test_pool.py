"""A pool of null engines: leases over loads, unloads, failures and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.sampling_params import SamplingParams
from paceline.engine.models.client import LoadableClient
from paceline.engine.models.ledger import Account
from paceline.engine.models.model import ModelSpec, State
from paceline.engine.models.pool import ModelPool
from paceline.engine.models.states import ModelStates
from paceline.engine.protocol import EngineClient
from paceline.engine.testing import ByteTokenizer
from paceline.engine.types import GenerationRequest
from paceline.errors import (
    CheckpointError,
    EngineDeadError,
    EngineDrainingError,
    ModelFailedError,
    UnknownModelError,
)
from tests.engine.models.null_pool import null_pool

VOCAB = ByteTokenizer().vocab_size


def _backend(name: str, step_time: float = 0.0) -> NullBackend:
    if name == "broken":
        raise CheckpointError("broken.gguf is truncated: 10 of 20 bytes")
    return NullBackend(vocab_size=VOCAB, step_time=step_time)


@asynccontextmanager
async def _pool(sizes: dict[str, int], memory: int, **more: Any) -> AsyncIterator[ModelPool]:
    pool = await null_pool(sizes, memory, _backend, **more)
    try:
        yield pool
        pool.states.check_integrity()
    finally:
        await pool.close()


async def _generate(client: LoadableClient, count: int = 4, name: str = "r") -> list[int]:
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=count, temperature=0.0),
        arrival_time=0.0,
    )
    tokens: list[int] = []
    async for output in client.generate(request):
        for choice in output.choices:
            tokens += choice.token_ids
    return tokens


async def test_models_that_do_not_fit_together_take_turns_and_count_on() -> None:
    async with _pool({"a": 10, "b": 10}, 15) as pool:
        async with pool.lease("a") as client:
            first = await _generate(client)
        async with pool.lease("b") as other:
            assert await _generate(other) == first, "the same prompt, the same model"
            assert pool.states.models["a"].state is State.UNLOADED
        async with pool.lease("a") as again:
            assert again is client and await _generate(again) == first
        # statistics go on over loads
        for _ in range(500):
            if client.stats.scheduler.num_prompt_tokens == 6:
                break
            await asyncio.sleep(0.01)
        assert client.stats.scheduler.num_prompt_tokens == 6
        assert pool.states.evictions["room"] == 2


async def test_a_lease_keeps_a_model_and_the_next_waits_for_its_end() -> None:
    async with _pool({"a": 10, "b": 10}, 15, switch_wait=0.0) as pool:
        order: list[str] = []

        async def use_b() -> None:
            async with pool.lease("b"):
                order.append("b")

        async with pool.lease("a") as client:
            waits = asyncio.create_task(use_b())
            # longer than a's residence lets it take requests
            await asyncio.sleep(0.05)
            await _generate(client, 16)
            order.append("a")
        await waits
        assert order == ["a", "b"]


async def test_equal_loads_are_one_and_who_leaves_is_taken_out() -> None:
    loads: list[str] = []

    def make(name: str) -> NullBackend:
        loads.append(name)
        return _backend(name)

    pool = await null_pool({"a": 10, "b": 10}, 30, make)
    leaving = asyncio.create_task(pool.take("b"))
    staying = asyncio.create_task(pool.take("b"))
    await asyncio.sleep(0)
    leaving.cancel()
    ticket = await staying
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert loads == ["a", "b"] and pool.states.models["b"].leases == {ticket}
    pool.give(ticket)
    assert not pool.states.models["b"].leases
    await pool.close()


async def test_a_broken_model_fails_alone() -> None:
    async with _pool({"a": 10, "broken": 10}, 30) as pool:
        with pytest.raises(ModelFailedError, match=r"truncated: 10 of 20 bytes"):
            await pool.load("broken")
        assert pool.states.models["broken"].state is State.FAILED
        async with pool.lease("a") as client:
            assert len(await _generate(client)) == 4
        with pytest.raises(UnknownModelError):
            await pool.take("c")


async def test_an_engine_that_ends_for_good_takes_its_model_alone_and_is_loaded_later() -> None:
    async with _pool({"a": 10, "b": 10}, 30) as pool:
        await pool.load("b")
        client = pool.clients["a"]
        engine = client._engine
        assert engine is not None and engine.on_dead is not None
        lost = await pool.take("a")
        engine.on_dead(EngineDeadError("it ended too often"))
        assert pool.states.models["a"].state is State.FAILED
        assert pool.states.models["b"].state is State.READY
        pool.give(lost)
        with pytest.raises(ModelFailedError, match="it ended too often"):
            await pool.take("a")
        # a caller may have it tried before its rest is over
        await pool.load("a")
        assert len(await _generate(client)) == 4


async def test_a_file_that_was_broken_at_start_says_why_again() -> None:
    async with _pool({"a": 10}, 30) as pool:
        states = pool.states
        broken = ModelStates(
            [ModelSpec(name="b", account=Account(), broken="b.gguf is truncated")], 10
        )
        states.models |= broken.models
        states._by_name |= broken.models
        with pytest.raises(ModelFailedError, match=r"b\.gguf is truncated"):
            await pool.load("b")
        assert states.models["b"].num_crashes == 1, "no second try"


async def test_an_engine_that_ends_while_its_load_is_measured_is_not_served() -> None:
    async with _pool({"a": 10}, 30) as pool:
        pool.unload("a")

        def measure(engine: EngineClient, booked: Account) -> Account:
            assert engine.on_dead is not None
            dead = EngineDeadError("it was killed")
            loop.call_soon_threadsafe(engine.on_dead, dead)
            time.sleep(0.05)
            return booked

        loop = asyncio.get_running_loop()
        pool._measure = measure
        with pytest.raises(ModelFailedError, match="it was killed"):
            await pool.load("a")
        assert pool.states.models["a"].state is State.FAILED and pool.clients["a"].engine is None


async def test_the_end_waits_for_an_unload() -> None:
    pool = await null_pool({"a": 10}, 30, _backend)
    engine = pool.clients["a"].engine
    assert engine is not None
    close, ended = engine.close, False

    async def slowly() -> None:
        nonlocal ended
        await asyncio.sleep(0.05)
        await close()
        ended = True

    engine.close = slowly  # type: ignore[method-assign]
    pool.unload("a")
    await asyncio.sleep(0.01)
    await pool.close()
    assert ended


async def test_keep_alive_of_nothing_unloads_after_the_lease() -> None:
    async with _pool({"a": 10, "b": 10}, 30) as pool:
        async with pool.lease("a", keep_alive=0.0):
            pass
        while pool.states.models["a"].state is not State.UNLOADED:
            await pool.changed()
        assert pool.states.ledger.free == 30


async def test_bytes_after_the_load_are_what_was_measured() -> None:
    pool = await null_pool({"a": 10}, 30, _backend)
    pool._measure = lambda engine, booked: Account(weights=booked.total + 5)
    pool.unload("a")
    await pool.load("a")
    assert pool.states.ledger.accounts["a"].total == 15
    await pool.close()


async def test_draining_refuses_those_who_wait() -> None:
    async with _pool({"a": 10, "b": 10}, 15) as pool:
        held = await pool.take("a")
        waits = asyncio.create_task(pool.take("b"))
        await asyncio.sleep(0)
        draining = asyncio.create_task(pool.drain(30.0))
        with pytest.raises(EngineDrainingError):
            await waits
        assert not draining.done(), "a lease is left"
        pool.give(held)
        await draining
        with pytest.raises(EngineDrainingError):
            await pool.take("a")


async def test_a_load_that_hangs_is_ended_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("_LATE", 0.0), ("_LEAST_LATE", 0.02), ("_LEAST_HANGS", 0.5)):
        monkeypatch.setattr(f"paceline.engine.models.pool.{name}", seconds)
    monkeypatch.setattr("paceline.engine.models.pool._LONGEST", 0.5)
    async with _pool({"a": 10, "b": 10, "hangs": 10}, 30) as pool:
        started = pool._starts["b"]

        async def hangs(tokenizer: Any) -> EngineClient:
            await asyncio.Event().wait()
            raise AssertionError

        pool._starts = {"b": started, "hangs": hangs}
        waits = asyncio.create_task(pool.take("hangs"))
        await asyncio.sleep(0)
        began = time.monotonic()
        async with pool.lease("b") as client:
            assert len(await _generate(client)) == 4
        assert time.monotonic() - began < 0.5 and not waits.done(), "b waited for it"
        # it is tried twice
        with pytest.raises(ModelFailedError, match="it was not loaded within 0 s"):
            await waits
        assert pool.states.models["hangs"].num_crashes == 2


async def test_the_end_cuts_a_load_short() -> None:
    pool = await null_pool({"a": 10, "b": 10}, 30, _backend)
    ended = False

    async def hangs(tokenizer: Any) -> EngineClient:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True
        raise AssertionError

    pool._starts = {"b": hangs}
    pool.prefetch("b")
    await asyncio.sleep(0.01)
    await pool.close()
    assert ended
