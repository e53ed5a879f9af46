"""A request that ends its engine, among others that did nothing: alone it fails for good."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.core.slo import Slo
from paceline.engine.supervision import supervisor
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.types import GenerationRequest
from paceline.errors import EngineLostError, PoisonedRequestError
from tests.engine.process.test_client import VOCAB, make, until
from tests.engine.supervision.test_supervisor import (
    DIE,
    first,
    running,
    spawn,
    supervised,
    tokens,
    whole,
)


def innocent(number: int, max_tokens: int, **fields: object) -> GenerationRequest:
    prompt = (3, 5, number % 100)
    return make(f"r{number}", prompt, max_tokens=max_tokens, **fields)


def right(request: GenerationRequest) -> tuple[int, ...]:
    count = request.sampling.max_tokens
    return tuple(expected_tokens(request.prompt_token_ids, count, VOCAB))


# what the second brings, the first or one far behind brings as well
@pytest.mark.parametrize(
    "die_at", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 40))]
)
async def test_poison_beside_streams_and_a_queue(die_at: int) -> None:
    """At its first token, its second, or far into its answer. The engine has room for eight."""
    core = {"max_num_seqs": 8}
    async with supervised(die_on=DIE, die_at=die_at, core=core) as client:
        streams = [await first(client, innocent(i, 500)) for i in range(2)]
        beside = [innocent(10 + i, 300, whole=True) for i in range(4)]
        poison = make("poison", (DIE, 1), max_tokens=200, whole=True)
        queued = [innocent(20 + i, 40, whole=i % 2 == 0) for i in range(30)]
        tasks = spawn(client, *beside)
        await running(client, 6)
        (bad,) = spawn(client, poison)
        tasks += spawn(client, *queued)
        for number, (stream, begun) in enumerate(streams):
            # what a caller has read is gone on from
            got = list(tokens(begun))
            async for output in stream:
                got += tokens(output)
            assert tuple(got) == right(innocent(number, 500))
        answers = await asyncio.gather(*tasks)
        for request, answer in zip([*beside, *queued], answers, strict=True):
            assert tokens(answer) == right(request)
        with pytest.raises(PoisonedRequestError, match="under this request"):
            await bad
        faults = client.faults
        assert faults.num_poisoned == 1
        assert faults.num_lost == 0
        assert 2 <= dict(faults.losses)["exit"] <= 4
        again = innocent(99, 20)
        assert tokens(await whole(client, again)) == right(again)


async def sent(client: SupervisedEngineClient, number: int) -> None:
    """Until so many requests are with the engine."""
    await until(lambda: sum(call.engine is not None for call in client._calls.values()) == number)


async def begun(client: SupervisedEngineClient, number: int) -> None:
    """Until so many requests are in steps that the engine has under way."""

    def is_so() -> bool:
        return len(client._latest.requests_in_flight() or ()) == number

    await until(is_so)


async def test_who_was_only_queued_goes_on_at_once() -> None:
    # the next engine's first step takes for ever
    slow: Callable[[int], dict[str, float]] = lambda _: {"step_time": 30.0}  # noqa: E731
    async with supervised(core={"max_num_seqs": 2}, step_time=0.3, later=slow) as client:
        tasks = spawn(client, *(innocent(i, 50) for i in range(40)))
        await sent(client, 40)
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.faults.up)
        await until(lambda: client.faults.up)
        # all but the second of the two that had begun; where the engine was slow to take them in,
        # one alone had
        await until(lambda: sum(c.engine is not None for c in client._calls.values()) >= 39)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        os.kill(client.pid, signal.SIGKILL)


async def test_turns_end_by_time_and_who_hurries_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TURN_SECONDS", 0.6)
    slow: Callable[[int], dict[str, float]] = lambda _: {"step_time": 30.0}  # noqa: E731
    async with supervised(step_time=0.5, later=slow) as client:
        patient = innocent(1, 5, slo=Slo(best_effort=True), whole=True)
        hurried = innocent(2, 5, slo=Slo(ttft=0.01), whole=True)
        tasks = spawn(client, patient, hurried)
        await begun(client, 2)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.faults.up)
        await sent(client, 1)
        assert client._calls["r2"].engine is not None
        # no token came, and yet the other gets its turn
        await sent(client, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        os.kill(client.pid, signal.SIGKILL)


async def test_who_waits_for_a_turn_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_QUARANTINE_SECONDS", 1.0)
    slow: Callable[[int], dict[str, float]] = lambda _: {"step_time": 30.0}  # noqa: E731
    async with supervised(step_time=0.5, later=slow) as client:
        tasks = spawn(client, *(innocent(i, 5, whole=True) for i in range(4)))
        # a request that has not begun is no suspect and would go on at once
        await begun(client, 4)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.faults.up)
        await sent(client, 1)
        await client.abort("r3")
        answer = await tasks[3]
        assert answer.choices[0].finish_reason == "abort"
        await sent(client, 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        os.kill(client.pid, signal.SIGKILL)


async def test_engines_that_end_by_themselves_condemn_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a long answer, at other places each time: in the end its caller may try again."""
    monkeypatch.setattr(supervisor, "_MAX_LOSSES", 3)
    async with supervised(step_time=0.01, core={"max_num_seqs": 1}) as client:
        tasks = spawn(client, innocent(1, 1500, whole=True), innocent(2, 5))
        for place in (10, 40, 80):
            await until(lambda: client.faults.up)
            engine = client._latest
            await until(lambda: engine.num_output_tokens("r1") >= place)  # noqa: B023
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
        for task in tasks:
            with pytest.raises(EngineLostError, match="try again"):
                await task
        assert client.faults.num_poisoned == 0
