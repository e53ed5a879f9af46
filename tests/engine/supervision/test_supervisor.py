"""Engines that end, hang or are stopped, and what becomes of the requests they had."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.supervision.supervised import KnownAdapter, added
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.testing import ByteTokenizer
from paceline.engine.text.output_processor import merge_outputs
from paceline.engine.types import (
    BlockStats,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    SchedulerStats,
)
from paceline.errors import (
    ConfigError,
    EngineDeadError,
    EngineDrainingError,
    EngineLostError,
    PoisonedRequestError,
)
from tests.engine.null_engine import ARGV
from tests.engine.process.test_client import BACKEND, make, until
from tests.engine.process.test_process import is_alive

DIE, HANG = 200, 201


@asynccontextmanager
async def supervised(
    *,
    max_restarts: int = 5,
    stall_timeout: float = 60.0,
    later: Callable[[int], dict[str, Any]] = lambda _: {},
    **backend: Any,
) -> AsyncIterator[SupervisedEngineClient]:
    """A supervised null engine. ``later`` changes the settings of engine 1, 2..."""

    async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
        settings = {**BACKEND, "step_time": 0.002, **backend}
        if before is not None:
            assert not is_alive(before.pid), "two engines at once"
            settings |= later(number)
        return await ProcessEngineClient.start(
            ARGV,
            json.dumps(settings).encode(),
            ByteTokenizer,
            ready_timeout=20.0,
            stall_timeout=stall_timeout,
        )

    client = await SupervisedEngineClient.start(start, max_restarts=max_restarts)
    try:
        yield client
    finally:
        await client.close()
        assert not is_alive(client.pid)


async def whole(client: SupervisedEngineClient, request: GenerationRequest) -> GenerationOutput:
    """The answer as a server puts it together."""
    held: list[GenerationOutput] = []
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            held.append(output)
    return merge_outputs(held)


def tokens(output: GenerationOutput) -> tuple[int, ...]:
    return output.choices[0].token_ids


def spawn(client: SupervisedEngineClient, *requests: GenerationRequest) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(whole(client, request)) for request in requests]


async def running(client: SupervisedEngineClient, number: int) -> None:
    await until(lambda: client.stats.scheduler.num_running == number)


async def first(client: SupervisedEngineClient, request: GenerationRequest) -> Any:
    """A stream whose first delta was read, and that delta."""
    stream = client.generate(request)
    return stream, await anext(stream)


class TestReplacing:
    async def test_killed_under_requests(self) -> None:
        async with supervised() as client:
            unfaulted = tokens(await whole(client, make("before", max_tokens=300)))
            tasks = spawn(client, *(make(f"r{i}", max_tokens=300, whole=True) for i in range(20)))
            stream, begun = await first(client, make("stream", max_tokens=600))
            got = list(tokens(begun))
            await running(client, 21)
            pid, steps = client.pid, client.stats.num_steps
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
            with pytest.raises(
                EngineLostError, match=r"SIGKILL; another engine.*try again"
            ) as lost:
                client.check_health()
            assert lost.value.retry_after >= 1.0
            # one that comes meanwhile waits
            tasks += spawn(client, make("late", max_tokens=300))
            async for output in stream:
                got += tokens(output)
            assert len(got) == 600 and tuple(got[:300]) == unfaulted
            for answer in await asyncio.gather(*tasks):
                assert tokens(answer) == unfaulted
            client.check_health()
            assert client.pid != pid
            # counters go on where they were, gauges do not
            assert client.stats.num_steps > steps
            await running(client, 0)
            assert client.stats.scheduler.num_free_blocks == client.stats.scheduler.num_blocks
            faults = client.faults
            assert faults.up and faults.losses == (("exit", 1),)
            assert (faults.num_resent, faults.num_lost, faults.num_poisoned) == (21, 0, 0)
            assert faults.recovery_seconds > 0

    async def test_stopped_while_idle(self) -> None:
        async with supervised() as client:
            os.kill(client.pid, signal.SIGSTOP)
            await until(lambda: not client.faults.up)
            assert tokens(await whole(client, make()))
            assert client.faults.losses == (("stopped", 1),)

    async def test_a_short_stop_is_none(self) -> None:
        async with supervised() as client:
            pid = client.pid
            for _ in range(2):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.4)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.3)
            assert client.pid == pid and client.faults.losses == ()

    async def test_an_unstreamed_first_token(self) -> None:
        # the first step takes longer than anything here: nothing is out when the engine ends
        async with supervised(step_time=30.0, later=lambda _: {"step_time": 0.002}) as client:
            tasks = spawn(client, make(max_tokens=2))
            await until(lambda: bool(client._latest.requests_in_flight()))
            os.kill(client.pid, signal.SIGKILL)
            (answer,) = await asyncio.gather(*tasks)
            assert len(tokens(answer)) == 2
            assert client.faults.num_resent == 1

    @pytest.mark.parametrize("stall_timeout", [0.5, pytest.param(60.0, marks=pytest.mark.thorough)])
    async def test_stall_timeout_ends_a_hanging_step(self, stall_timeout: float) -> None:
        async with supervised(stall_timeout=stall_timeout, hang_on=HANG) as client:
            tasks = spawn(client, make("hangs", (HANG, 1)))
            if stall_timeout > 1:
                await asyncio.sleep(1.0)
                assert client.faults.losses == ()
                tasks[0].cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                os.kill(client.pid, signal.SIGKILL)
                return
            with pytest.raises(PoisonedRequestError, match=r"limit 0\.5 s.*it was ended"):
                await tasks[0]
            assert client.faults.losses == (("stalled", 2),)
            assert tokens(await whole(client, make()))


class TestPoison:
    async def test_the_one_to_blame_fails_alone(self) -> None:
        async with supervised(die_on=DIE) as client:
            unfaulted = tokens(await whole(client, make("before", max_tokens=100)))
            good = spawn(client, *(make(f"r{i}", max_tokens=100, whole=True) for i in range(10)))
            await running(client, 10)
            (bad,) = spawn(client, make("bad", (DIE, 1)))
            answers = await asyncio.gather(*good)
            assert [tokens(answer) for answer in answers] == [unfaulted] * 10
            with pytest.raises(PoisonedRequestError, match="ended 2 times under this request"):
                await bad
            assert client.faults.losses == (("exit", 2),)
            assert client.faults.num_poisoned == 1
            assert tokens(await whole(client, make("after", max_tokens=100))) == unfaulted

    @pytest.mark.thorough
    async def test_not_to_blame_for_a_suspect(self) -> None:
        """The first request of the second engine ends it; whoever came fresh is tried on."""
        async with supervised(die_on=DIE, later=lambda n: {"step_time": 0.05}) as client:
            (bad,) = spawn(client, make("bad", (DIE, 1)))
            await until(lambda: not client.faults.up)
            fresh = spawn(client, make("fresh", max_tokens=3))
            with pytest.raises(PoisonedRequestError):
                await bad
            assert len(tokens((await asyncio.gather(*fresh))[0])) == 3


class TestGivingUp:
    @pytest.mark.parametrize("max_restarts", [0, pytest.param(2, marks=pytest.mark.thorough)])
    async def test_after_so_many_restarts(self, max_restarts: int) -> None:
        async with supervised(max_restarts=max_restarts) as client:
            deaths: list[EngineDeadError] = []
            client.on_dead = deaths.append
            for number in range(max_restarts + 1):
                await until(lambda: client.faults.up)
                assert tokens(await whole(client, make(f"r{number}")))
                assert not deaths
                os.kill(client.pid, signal.SIGKILL)
                await until(lambda: not client.faults.up)
            await until(lambda: bool(deaths))
            assert "SIGKILL" in str(deaths[0])
            if max_restarts:
                assert "2 restarts within 300 s" in str(deaths[0])
            for ask in (client.check_health, lambda: asyncio.create_task(whole(client, make()))):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    asked = ask()
                    if asked is not None:
                        await asked

    @pytest.mark.thorough
    async def test_a_start_that_fails_is_a_restart(self) -> None:
        def later(number: int) -> dict[str, Any]:
            if number == 1:
                raise OSError("no space left for a socket")
            return {"on_load": "bad checkpoint"} if number == 2 else {}

        async with supervised(later=later) as client:
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
            assert tokens(await whole(client, make()))
            # engine 1 did not start, engine 2 did not load
            assert client.faults.losses == (("exit", 1),)

    async def test_an_engine_without_sockets_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

        def bind(*_: object) -> None:
            raise zmq.ZMQError(24)

        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "bind", bind)
            with pytest.raises(EngineDeadError, match="could not be started"):
                await ProcessEngineClient.start(ARGV, b"{}", ByteTokenizer)
        assert not list(tmp_path.iterdir())
        tmp_path.rmdir()
        with pytest.raises(EngineDeadError, match="no directory"):
            await ProcessEngineClient.start(ARGV, b"{}", ByteTokenizer)

    async def test_the_first_start_fails_as_it_is(self) -> None:
        async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
            raise ConfigError("--num-blocks 7 is odd")

        with pytest.raises(ConfigError, match="7 is odd"):
            await SupervisedEngineClient.start(start)

    async def test_requests_that_wait_are_told(self) -> None:
        async with supervised(max_restarts=1, later=lambda _: {"on_load": "exit"}) as client:
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
            with pytest.raises(EngineDeadError, match="exit code 7"):
                await whole(client, make())


class TestEnding:
    async def test_a_drain_lets_requests_end_on_the_next_engine(self) -> None:
        async with supervised() as client:
            tasks = spawn(client, make(max_tokens=50, whole=True))
            await running(client, 1)
            draining = asyncio.create_task(client.drain(20.0))
            os.kill(client.pid, signal.SIGKILL)
            await draining
            assert len(tokens(await tasks[0])) == 50
            with pytest.raises(EngineDrainingError):
                await whole(client, make("late"))

    @pytest.mark.thorough
    async def test_a_drain_that_runs_out_of_time(self) -> None:
        async with supervised(later=lambda _: {"on_load": "hang"}) as client:
            tasks = spawn(client, make("runs", max_tokens=1900, whole=True))
            await running(client, 1)
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
            tasks += spawn(client, make("waits", n=2))
            await asyncio.sleep(0.05)
            await client.drain(0.2)
            for task in tasks:
                answer = await task
                assert {choice.finish_reason for choice in answer.choices} == {"abort"}
            # and closing does not wait for the engine that never gets ready
            await asyncio.wait_for(client.close(), timeout=10.0)

    async def test_an_engine_that_ends_during_the_close_has_no_successor(self) -> None:
        started: list[ProcessEngineClient] = []

        async def start(before: ProcessEngineClient | None, number: int) -> ProcessEngineClient:
            made = await ProcessEngineClient.start(
                ARGV, json.dumps(BACKEND).encode(), ByteTokenizer, ready_timeout=20.0
            )
            started.append(made)
            return made

        client = await SupervisedEngineClient.start(start)

        async def ended_while_awaited() -> None:
            try:
                await asyncio.sleep(60.0)
            finally:
                started[0].kill("just now")

        client._watching.cancel()
        client._watching = asyncio.create_task(ended_while_awaited())
        await asyncio.sleep(0)
        before = set(asyncio.all_tasks())
        await client.close()
        assert not {task for task in asyncio.all_tasks() - before if not task.done()}
        assert len(started) == 1 and not is_alive(started[0].pid)

    async def test_hanging_up_while_there_is_no_engine(self) -> None:
        async with supervised() as client:
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
            (task,) = spawn(client, make())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.drain(0.0)


def test_sums_of_statistics_never_fall() -> None:
    before = EngineStats(
        time=9.0,
        num_steps=5,
        scheduler=SchedulerStats(
            num_running=3,
            num_preemptions=2,
            actual_step_seconds=1.5,
            refused=(("queue-full", 1), ("pressure", 2)),
            waited=(("memory", 0.5),),
        ),
    )
    now = EngineStats(
        time=1.0,
        num_steps=1,
        scheduler=SchedulerStats(
            num_running=1,
            num_preemptions=1,
            actual_step_seconds=0.25,
            refused=(("pressure", 3),),
            waited=(("slots", 1.0), ("memory", 0.25)),
        ),
        iteration_tokens=(4,),
        blocks=BlockStats(fetched=(("disk", "hit", 5), ("disk", "late", 1)), store_bytes=7),
    )
    before = msgspec.structs.replace(
        before, blocks=BlockStats(fetched=(("disk", "hit", 64), ("peer", "hit", 2)), store_bytes=9)
    )
    total = added(before, now)
    assert total.blocks == BlockStats(
        fetched=(("disk", "hit", 69), ("peer", "hit", 2), ("disk", "late", 1)), store_bytes=7
    )
    # also while there is no engine
    resting = added(before, EngineStats(time=0.0, num_steps=0)).blocks
    assert resting == BlockStats(fetched=(("disk", "hit", 64), ("peer", "hit", 2)))
    sums = total.scheduler
    assert (total.num_steps, sums.num_preemptions, sums.actual_step_seconds) == (6, 3, 1.75)
    assert dict(sums.refused) == {"queue-full": 1, "pressure": 5}
    assert dict(sums.waited) == {"memory": 0.75, "slots": 1.0}
    # the rest is as it is
    assert (total.time, sums.num_running, total.iteration_tokens) == (1.0, 1, (4,))


async def test_pinned_adapters_are_loaded_by_the_next_engine_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    register = ProcessEngineClient.register_adapter

    def note(self: ProcessEngineClient, key: str, *args: Any, **more: Any) -> None:
        told.append(key)
        register(self, key, *args, **more)

    monkeypatch.setattr(ProcessEngineClient, "register_adapter", note)
    async with supervised() as client:
        for key, pinned in (("a", False), ("b", True), ("c", False), ("d", True)):
            await client.load_adapter(key, f"/{key}", pinned=pinned)
        client.unload_adapter("d")
        stream, _ = await first(client, make("r", max_tokens=600, adapter="c"))
        os.kill(client.pid, signal.SIGKILL)
        async for _ in stream:
            pass
        assert client.faults.num_resent == 1
        assert told[4:] == ["b", "a", "c"]
        found = {key: each.status for key, each in client.adapters.items()}
        # no request has named the pinned one
        assert found == {"a": "registered", "b": "resident", "c": "resident"}


async def test_the_next_engine_is_told_the_contents_that_one_learned_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, str]] = []
    register = ProcessEngineClient.register_adapter

    def note(self: ProcessEngineClient, key: str, path: str, digest: str = "", **more: Any) -> None:
        told.append((key, digest))
        register(self, key, path, digest, **more)

    monkeypatch.setattr(ProcessEngineClient, "register_adapter", note)
    async with supervised() as client:
        # as a model that was not in memory then
        client.register_adapter("a", "/a")
        stream, _ = await first(client, make("r", max_tokens=600, adapter="a"))
        digest = client.adapters["a"].digest
        os.kill(client.pid, signal.SIGKILL)
        async for _ in stream:
            pass
        assert digest
        assert told == [("a", ""), ("a", digest)]


async def test_an_adapter_whose_load_ends_the_engine_twice_is_not_loaded_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with supervised() as client:
        for key in ("x#0", "x#1"):
            with pytest.raises(EngineLostError, match="another engine is being started"):
                await client.load_adapter(key, "/deadly")
            await until(lambda: client.faults.up)
        pid = client.pid
        with pytest.raises(EngineLostError, match="ended 2 times while this adapter was") as found:
            await client.load_adapter("x#2", "/deadly")
        assert 0 < found.value.retry_after <= 60
        # requests that name it are answered alike, and others are served
        client._adapters["x#3"] = KnownAdapter("/deadly", "digest")
        with pytest.raises(EngineLostError, match="while this adapter was loaded"):
            await whole(client, make("r", adapter="x#3"))
        assert (await whole(client, make("s"))).finished
        assert client.pid == pid
        # then it has one more try, which ends the engine once more
        client._deadly._until["/deadly"] = 0.0
        with pytest.raises(EngineLostError, match="another engine is being started"):
            await client.load_adapter("x#4", "/deadly")
        await until(lambda: client.faults.up)
        with pytest.raises(EngineLostError, match="ended 3 times"):
            await client.load_adapter("x#5", "/deadly")
