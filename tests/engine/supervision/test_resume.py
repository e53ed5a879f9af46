"""Requests go on behind what an engine that ended has delivered: nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

from paceline.backends.reference.null import expected_tokens
from paceline.core.outputs import RequestUpdate
from paceline.core.request import FinishReason
from paceline.engine.supervision.supervisor import SupervisedEngineClient
from paceline.engine.types import GenerationOutput, GenerationRequest
from tests.engine.process.test_client import VOCAB, make, until
from tests.engine.supervision.test_supervisor import running, supervised


class Reader:
    """Reads one stream, and keeps what came by choice."""

    def __init__(self, client: SupervisedEngineClient, request: GenerationRequest) -> None:
        self._client, self.request = client, request
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self.texts = [""] * request.n
        self.ends: list[str | None] = [None] * request.n
        self.last: GenerationOutput | None = None
        self.reading = asyncio.create_task(self._read())

    def _take(self, output: GenerationOutput) -> bool:
        for choice in output.choices:
            assert self.ends[choice.index] is None, "news of a choice after its end"
            self.tokens[choice.index] += choice.token_ids
            self.texts[choice.index] += choice.text
            self.ends[choice.index] = choice.finish_reason
        assert output.num_output_tokens == sum(map(len, self.tokens))
        self.last = output
        return True

    async def _read(self) -> None:
        # the sink takes what the reader need not be woken for
        async for output in self._client.generate(self.request, self._take):
            self._take(output)


def asked(number: int, rng: random.Random) -> GenerationRequest:
    """Streams, whole answers, several choices, stop strings, penalties and seeds."""
    fields: dict[str, Any] = {"max_tokens": rng.randrange(40, 160), "whole": number % 5 == 0}
    if number % 4 == 1:
        fields["n"] = 3
    if number % 4 == 2:
        # of the null backend's bytes some text ends there now and then
        fields["stop"] = ("a", "zz", "\n")
    prompt = [3 + rng.randrange(VOCAB - 9) for _ in range(rng.randrange(1, 30))]
    return make(f"r{number}", tuple(prompt), **fields)


async def answers(
    kills: int, requests: list[GenerationRequest]
) -> tuple[list[Reader], SupervisedEngineClient]:
    async with supervised(step_time=0.004, core={"max_num_seqs": 24}) as client:
        readers = [Reader(client, request) for request in requests]
        rng = random.Random(kills)
        for _ in range(kills):
            await until(lambda: client.faults.up)
            await until(lambda: client.stats.scheduler.num_running > 0)
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: not client.faults.up)
        await asyncio.gather(*(reader.reading for reader in readers))
        await running(client, 0)
        assert sum(dict(client.faults.losses).values()) == kills
        return readers, client


async def test_streams_go_on_as_if_nothing_had_happened() -> None:
    requests = [asked(number, random.Random(number)) for number in range(64)]
    unfaulted, _ = await answers(0, requests)
    resumed, client = await answers(3, requests)
    for before, after in zip(unfaulted, resumed, strict=True):
        assert (after.tokens, after.texts, after.ends) == (before.tokens, before.texts, before.ends)
        assert after.last is not None and before.last is not None
        assert after.last.num_output_tokens == before.last.num_output_tokens
        assert after.last.finished
    faults = client.faults
    assert (faults.num_lost, faults.num_poisoned) == (0, 0) and faults.num_resent >= 64


async def test_times_are_those_of_the_whole_answer() -> None:
    async with supervised(step_time=0.01) as client:
        reader = Reader(client, make("r", max_tokens=100))
        await until(lambda: len(reader.tokens[0]) >= 10)
        assert reader.last is not None and reader.last.times is not None
        first = reader.last.times.first_token
        os.kill(client.pid, signal.SIGKILL)
        await reader.reading
        times = reader.last.times
        assert times is not None and times.first_token == first
        # an engine was started meanwhile
        assert times.longest_gap > 0.05
        assert reader.tokens[0] == expected_tokens(reader.request.prompt_token_ids, 100, VOCAB)


async def test_a_choice_that_has_ended_is_not_made_again() -> None:
    async with supervised(step_time=0.01) as client:
        request = make("r", (9, 8), max_tokens=300, n=2, stop=("\x00impossible",))
        reader = Reader(client, request)
        await until(lambda: len(reader.tokens[0]) >= 5)
        # the engine is told that a choice is over, as by a stop string
        ended = RequestUpdate("r/1", (), None, FinishReason.STOP, None, 0, 0.0, 0)
        client._latest._processor.process([ended], 0.0)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.faults.up)
        await until(lambda: client.faults.up)
        resume = client._calls["r"].request.resume
        assert resume is not None and [c.ended for c in resume.choices] == [False, True]
        await reader.reading
        assert reader.tokens[0] == expected_tokens([9, 8], 300, VOCAB)
        assert len(reader.tokens[1]) < 300


async def test_it_is_aborted_while_there_is_no_engine() -> None:
    async with supervised(step_time=0.01, later=lambda _: {"on_load": "hang"}) as client:
        reader = Reader(client, make("r", max_tokens=1000))
        await until(lambda: len(reader.tokens[0]) >= 5)
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: not client.faults.up)
        await client.abort("r")
        await reader.reading
        assert reader.ends == ["abort"] and reader.last is not None
        assert reader.last.num_output_tokens == len(reader.tokens[0]) >= 5
