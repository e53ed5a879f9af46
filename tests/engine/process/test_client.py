"""Engine clients: one on a thread and one in a process must behave alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend, expected_tokens
from paceline.core.sampling_params import SamplingParams
from paceline.engine.local import LocalEngineClient
from paceline.engine.process.client import ProcessEngineClient
from paceline.engine.process.frontend import EngineFrontend, _Stream
from paceline.engine.process.messages import Refused
from paceline.engine.protocol import EngineClient
from paceline.engine.testing import ByteTokenizer, null_client
from paceline.engine.text.output_processor import merge_outputs
from paceline.engine.types import (
    ChoiceDelta,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
)
from paceline.errors import (
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    NeverFitsError,
    QueueFullError,
)
from tests.engine.null_engine import ARGV

VOCAB = 251
BACKEND = {"vocab_size": VOCAB, "num_blocks": 4096, "block_size": 4, "max_model_len": 2000}


async def start_process(
    *, stall_timeout: float = 60.0, core: dict[str, Any] | None = None, **backend: Any
) -> ProcessEngineClient:
    config = json.dumps({**BACKEND, **backend, "core": core or {}}).encode()
    return await ProcessEngineClient.start(
        ARGV, config, ByteTokenizer, ready_timeout=20.0, stall_timeout=stall_timeout
    )


async def start_local(
    *, stall_timeout: float = 60.0, core: dict[str, Any] | None = None, **backend: Any
) -> LocalEngineClient:
    made = NullBackend(**{**BACKEND, **backend})
    return null_client(made, stall_timeout=stall_timeout, **(core or {}))


Start = Callable[..., Awaitable[EngineFrontend]]


@pytest.fixture(params=["local", "process"])
def start(request: pytest.FixtureRequest) -> Start:
    return start_local if request.param == "local" else start_process


@asynccontextmanager
async def closing(client: EngineFrontend) -> AsyncIterator[EngineFrontend]:
    try:
        yield client
    finally:
        await client.close()


def make(
    request_id: str = "r", prompt: tuple[int, ...] = (3, 5), max_tokens: int = 6, **fields: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival_time=0.0,
        **fields,
    )


async def collect(client: EngineFrontend, request: GenerationRequest) -> GenerationOutput:
    async with aclosing(client.generate(request)) as outputs:
        return merge_outputs([output async for output in outputs])


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """``seconds`` is for machines that do much else: an engine process takes a while to start."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def is_healthy(client: EngineClient) -> bool:
    try:
        client.check_health()
    except EngineDeadError:
        return False
    return True


def is_empty(stats: EngineStats) -> bool:
    return (
        stats.scheduler.num_running == 0
        and stats.scheduler.num_waiting == 0
        and stats.scheduler.num_free_blocks == stats.scheduler.num_blocks
    )


async def test_tokens_text_and_description(start: Start) -> None:
    async with closing(await start()) as client:
        typed: EngineClient = client
        assert typed.info.vocab_size == VOCAB
        assert typed.info.max_model_len == 2000
        expected = expected_tokens((3, 5), 6, VOCAB)
        async with aclosing(client.generate(make())) as stream:
            outputs = [output async for output in stream]
        whole = merge_outputs(outputs)
        assert list(whole.choices[0].token_ids) == expected
        assert whole.choices[0].text == client.tokenizer.decode(expected)
        assert whole.choices[0].finish_reason == "length"
        assert (whole.num_prompt_tokens, whole.num_output_tokens) == (2, 6)
        assert whole.times is not None
        assert 0 < whole.times.first_scheduled <= whole.times.first_token <= whole.times.last_token
        client.check_health()


async def test_a_sink_takes_what_is_between_the_first_output_and_the_last(start: Start) -> None:
    taken: list[GenerationOutput] = []
    offered = 0

    def sink(output: GenerationOutput) -> bool:
        nonlocal offered
        offered += 1
        assert not output.finished
        # one in four goes the usual way
        if offered % 4 == 0:
            return False
        taken.append(output)
        return True

    async with closing(await start(step_time=0.002)) as client:
        told: list[GenerationOutput] = []
        async with aclosing(client.generate(make(max_tokens=60, n=2), sink)) as stream:
            async for output in stream:
                told.append(output)
                # its reader is not waiting now, so nothing may overtake
                seen = len(taken)
                await asyncio.sleep(0.01 if len(told) < 4 else 0.0)
                assert len(taken) == seen
    assert told[0].num_output_tokens < 10 and told[-1].finished
    assert taken and len(told) > 2
    in_order = sorted([*told, *taken], key=lambda output: output.num_output_tokens)
    whole = merge_outputs(in_order)
    for choice in whole.choices:
        assert list(choice.token_ids) == expected_tokens((3, 5), 60, VOCAB)
    # as they were given out, too
    assert [o.num_output_tokens for o in taken] == sorted(o.num_output_tokens for o in taken)


async def test_what_a_sink_raises_ends_the_request_alone(start: Start) -> None:
    def sink(output: GenerationOutput) -> bool:
        raise ValueError("it cannot be written")

    async with closing(await start(step_time=0.001)) as client:
        other = asyncio.ensure_future(collect(client, make("other", max_tokens=40)))
        with pytest.raises(ValueError, match="it cannot be written"):
            async for _ in client.generate(make(max_tokens=900), sink):
                pass
        assert (await other).num_output_tokens == 40
        await until(lambda: is_empty(client.stats))


@pytest.mark.parametrize("finished", [False, True])
async def test_nothing_follows_what_a_sink_raised(finished: bool) -> None:
    """Its reader has not had its turn when the next output comes, which may be the last one."""

    def sink(output: GenerationOutput) -> bool:
        raise ValueError("it cannot be written")

    def said(number: int, *, finished: bool = False) -> GenerationOutput:
        return GenerationOutput(
            request_id="r",
            choices=(ChoiceDelta(index=0, text=str(number), token_ids=(number,)),),
            num_prompt_tokens=1,
            num_cached_tokens=0,
            num_output_tokens=number,
            finished=finished,
        )

    stream = _Stream(sink, 0)
    stream.put(said(1))
    assert (await stream.get()).num_output_tokens == 1
    reading = asyncio.ensure_future(stream.get())
    await asyncio.sleep(0)
    stream.put(said(2))
    stream.put(said(3, finished=finished))
    with pytest.raises(ValueError, match="it cannot be written"):
        await reading


async def test_two_hundred_at_once(start: Start) -> None:
    async with closing(await start(core={"max_num_seqs": 32})) as client:
        requests = [
            make(f"r{i}", (i % 200 + 1, 2), max_tokens=i % 17 + 1, n=1 + i % 3) for i in range(200)
        ]
        answers = await asyncio.gather(*(collect(client, request) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            expected = expected_tokens(request.prompt_token_ids, request.sampling.max_tokens, VOCAB)
            assert len(answer.choices) == request.n
            for choice in answer.choices:
                assert list(choice.token_ids) == expected
        await until(lambda: is_empty(client.stats))


async def test_closing_the_iterator_frees_blocks(start: Start) -> None:
    async with closing(await start(step_time=0.002)) as client:
        async with aclosing(client.generate(make(max_tokens=900, n=2))) as stream:
            await anext(stream)
            assert client.num_unfinished == 1
        assert client.num_unfinished == 0
        steps = client.stats.num_steps
        await until(lambda: is_empty(client.stats))
        # at once, not when 900 tokens are done
        assert client.stats.num_steps - steps < 100


async def test_cancelling_tasks_frees_blocks(start: Start) -> None:
    async with closing(await start(step_time=0.002, core={"max_num_seqs": 8})) as client:
        tasks = [
            asyncio.create_task(collect(client, make(f"r{i}", max_tokens=900))) for i in range(20)
        ]
        await until(lambda: client.stats.scheduler.num_running == 8)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await until(lambda: is_empty(client.stats))
        assert (await collect(client, make("after"))).finished


async def test_abort_hands_in_a_last_delta(start: Start) -> None:
    async with closing(await start(step_time=0.002)) as client:
        await client.abort("unknown")
        task = asyncio.create_task(collect(client, make(max_tokens=900)))
        await until(lambda: client.stats.num_steps > 5)
        await client.abort("r")
        answer = await task
        assert answer.choices[0].finish_reason == "abort"
        assert 0 < answer.num_output_tokens < 900
        assert list(answer.choices[0].token_ids) == expected_tokens(
            (3, 5), answer.num_output_tokens, VOCAB
        )
        await until(lambda: is_empty(client.stats))


async def test_a_stop_string_stops_the_engine_too(start: Start) -> None:
    async with closing(await start(step_time=0.001)) as client:
        expected = expected_tokens((3, 5), 900, VOCAB)
        stop = bytes(expected[6:8]).decode("ascii")
        answer = await collect(client, make(max_tokens=900, stop=(stop,)))
        assert answer.choices[0].stop_reason == stop
        assert answer.num_output_tokens == 8
        await until(lambda: is_empty(client.stats))
        assert client.stats.num_steps < 200
        assert client.stats.scheduler.num_discarded_tokens == 0, "its answer was whole"


async def test_a_refused_request_is_alone(start: Start) -> None:
    async with closing(await start(step_time=0.001)) as client:
        good = asyncio.create_task(collect(client, make("good", max_tokens=50)))
        with pytest.raises(
            NeverFitsError, match="2 prompt tokens \\+ 5000 output tokens"
        ) as caught:
            await collect(client, make("long", max_tokens=5000, n=2))
        assert caught.value.param == "max_tokens"
        with pytest.raises(InvalidRequestError, match="token id 251, outside"):
            await collect(client, make("foreign", (VOCAB,)))
        with pytest.raises(InvalidRequestError, match="n must be at least 1"):
            await collect(client, make("none", n=0))
        with pytest.raises(InvalidRequestError, match="'good' is in use"):
            await collect(client, make("good"))
        assert (await good).num_output_tokens == 50
        assert client.num_unfinished == 0


async def test_with_a_choice_that_expires_end_those_that_were_started(start: Start) -> None:
    async with closing(await start(step_time=0.001)) as client:
        task = asyncio.create_task(collect(client, make(max_tokens=1900, n=3)))
        await until(lambda: client.stats.scheduler.num_running == 3)
        client._receive(Refused.of("r", QueueFullError("it waited", 2.0, "expired")))
        with pytest.raises(QueueFullError, match="it waited"):
            await task
        await until(lambda: is_empty(client.stats))
        assert client.stats.num_steps < 1900, "nobody reads what they would have said"


async def test_a_slow_reader_gets_joined_deltas(start: Start) -> None:
    async with closing(await start()) as client:
        async with aclosing(client.generate(make(max_tokens=800))) as stream:
            first = await anext(stream)
            await until(lambda: client.num_unfinished == 0)
            (unread,) = [list(s._unread) for s in client._streams.values()]
            assert len(unread) < 40
            rest = [output async for output in stream]
        assert len(rest) == 1
        whole = merge_outputs([first, *rest])
        assert list(whole.choices[0].token_ids) == expected_tokens((3, 5), 800, VOCAB)


async def test_drain_waits_for_what_runs(start: Start) -> None:
    async with closing(await start(step_time=0.001)) as client:
        task = asyncio.create_task(collect(client, make(max_tokens=50)))
        await until(lambda: client.num_unfinished == 1)
        await client.drain(10.0)
        assert (await task).choices[0].finish_reason == "length"
        with pytest.raises(EngineDrainingError):
            await collect(client, make("late"))
        client.check_health()


async def test_drain_aborts_what_takes_too_long(start: Start) -> None:
    async with closing(await start(step_time=0.005)) as client:
        task = asyncio.create_task(collect(client, make(max_tokens=900)))
        await until(lambda: client.stats.num_steps > 2)
        await client.drain(0.05)
        assert (await task).choices[0].finish_reason == "abort"


async def test_stats_tell_the_tokens_of_every_step(start: Start) -> None:
    async with closing(await start()) as client:
        seen: list[int] = []
        client.on_stats = lambda stats: seen.extend(stats.iteration_tokens)
        await collect(client, make("r", (1, 2, 3), max_tokens=5))
        # the prompt counts whole with its first token
        assert seen == [3 + 1, 1, 1, 1, 1]
        assert client.stats.num_steps == 5


async def test_a_prompt_counts_with_its_first_token_and_not_chunk_by_chunk(start: Start) -> None:
    async with closing(
        await start(core={"max_num_seqs": 8, "max_num_batched_tokens": 64})
    ) as client:
        seen: list[int] = []
        client.on_stats = lambda stats: seen.extend(stats.iteration_tokens)
        await collect(client, make("long", (3,) * 150, max_tokens=2))
        assert seen == [150 + 1, 1]
        assert client.stats.num_steps == 4


async def test_close_fails_what_is_unread_and_is_idempotent(start: Start) -> None:
    client = await start(step_time=0.002)
    deaths: list[EngineDeadError] = []
    client.on_dead = deaths.append
    task = asyncio.create_task(collect(client, make(max_tokens=900)))
    await until(lambda: client.stats.num_steps > 2)
    await asyncio.gather(client.close(), client.close())
    with pytest.raises(EngineDeadError, match="closed"):
        await task
    with pytest.raises(EngineDeadError, match="closed"):
        client.check_health()
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(client, make("late"))
    await client.close()
    assert deaths == []


async def test_two_engines_in_one_process() -> None:
    first = await start_local(vocab_size=101, block_size=2, num_blocks=64)
    second = await start_local(vocab_size=53, block_size=16)
    async with closing(first), closing(second):
        one, two = await asyncio.gather(
            collect(first, make("same id")), collect(second, make("same id"))
        )
        assert list(one.choices[0].token_ids) == expected_tokens((3, 5), 6, 101)
        assert list(two.choices[0].token_ids) == expected_tokens((3, 5), 6, 53)


async def test_a_broken_backend_on_a_thread_fails_its_requests() -> None:
    client = null_client(NullBackend(vocab_size=VOCAB))
    deaths: list[EngineDeadError] = []
    client.on_dead = deaths.append

    def broken(plan: object) -> Any:
        raise RuntimeError("no more steps")

    async with closing(client):
        assert (await collect(client, make())).finished
        client._core._backend.execute = broken  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="RuntimeError: no more steps"):
            await collect(client, make("second"))
        with pytest.raises(EngineDeadError, match="no more steps"):
            client.check_health()
        assert len(deaths) == 1


async def test_a_thread_that_makes_no_progress_is_unhealthy() -> None:
    client = await start_local(step_time=0.8, stall_timeout=0.3)
    async with closing(client):
        client.check_health()
        task = asyncio.create_task(collect(client, make(max_tokens=2)))
        # its one step takes longer than it may
        await until(lambda: client.num_unfinished == 1)
        client.check_health()
        await until(lambda: not is_healthy(client))
        with pytest.raises(EngineDeadError, match=r"for 0\.\d s \(limit 0\.3 s\)"):
            client.check_health()
        await task
