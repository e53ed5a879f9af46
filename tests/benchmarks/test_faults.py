"""The parts of the fault benchmark that are arithmetic."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.faults.callers import Seen, ask, counted, mismatches
from benchmarks.faults.malformed import malformed
from benchmarks.faults.server import metric


def test_a_lost_or_doubled_token_is_found() -> None:
    expected = [1, 2, 3, 4]

    def seen(ids: list[int], finished: bool = True) -> int:
        return mismatches([(Seen(status=200, ids={0: ids}, finished=finished), expected)])

    assert seen([1, 2, 3, 4]) == 0
    # broken off: what came has to be the beginning
    assert seen([1, 2], finished=False) == seen([], finished=False) == 0
    assert seen([1, 3], finished=False) == 1
    assert seen([1, 1, 2], finished=False) == 1
    # whole: nothing may be missing
    assert seen([1, 2, 3]) == 1
    assert seen([1, 2, 3, 4, 4]) == 1


def test_outcomes_are_told_apart() -> None:
    found = counted(
        [
            Seen(status=200, finished=True),
            Seen(status=200, error=503),
            Seen(status=200),
            Seen(status=503, error=503),
            Seen(),
        ]
    )
    assert found == {
        "200 complete": 1,
        "200 then error 503": 1,
        "200 then broken off": 1,
        "503": 1,
        "no answer": 1,
    }


@pytest.mark.parametrize(
    ("answer", "outcome", "ids"),
    [
        (
            b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n'
            b'data: {"choices":[{"index":0,"token_ids":[6]}]}\n\n'
            b"data: [DONE]\n\n",
            "200 complete",
            [5, 6],
        ),
        (
            b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n'
            b'data: {"error":{"code":503,"message":"x"}}\n\ndata: [DONE]\n\n',
            "200 then error 503",
            [5],
        ),
        (b'data: {"choices":[{"index":0,"token_ids":[5]}]}\n\n', "200 then broken off", [5]),
    ],
)
def test_what_a_client_writes_down(answer: bytes, outcome: str, ids: list[int]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + answer)
        await writer.drain()
        writer.close()

    async def run() -> Seen:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(port, {"prompt": "x", "stream": True})

    seen = asyncio.run(run())
    assert (seen.outcome, seen.token_ids) == (outcome, ids)


def test_malformed_requests_are_many_and_the_same_every_time() -> None:
    made = malformed(130, random.Random(3))
    assert made == malformed(130, random.Random(3))
    assert len(set(made)) > 100


def test_samples_of_a_metric_add_up() -> None:
    text = 'a_total{x="1"} 2.0\na_total{x="2"} 3.5\na_total_more 9\nb 1\n'
    assert (metric(text, "a_total"), metric(text, "b")) == (5.5, 1.0)
    with pytest.raises(KeyError):
        metric(text, "c")
