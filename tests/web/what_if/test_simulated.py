"""``/ui/api/what-if``: what is simulated, and what is too little for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.timeline.codec import Decoder
from paceline.timeline.model import Model
from tests.web.what_if.helpers import CARD, PATH, TRACE, Ask


async def test_this_servers_last_minutes(ask: Ask) -> None:
    asker = ask()
    body = {"model": "null", "prompt": "hello there", "max_tokens": 40, "user": "ada"}
    body |= {"slo": {"class": "interactive", "ttft_ms": 5000}}
    await asyncio.gather(*(asker.http.post("/v1/completions", json=body) for _ in range(6)))
    await asker.told_of(6)
    told = await asker.tell()
    assert told["minutes"]["requests"] == 6 and told["job"] == {"status": "idle"}
    assert told["server"]["policy"] in told["choices"]["policies"]
    answer = await asker.start(policies=["fcfs", "deadline"], loads=[1, 4])
    assert answer.status_code == 200 and answer.json()["status"] == "running"
    job = await asker.ended()
    assert (job["status"], job["error"]) == ("done", "")
    assert job["requests"] == 6 and job["steps"] >= 40
    found = [(each["run"], each["policy"], each["load"]) for each in job["results"]]
    assert found == [(0, "fcfs", 1), (1, "fcfs", 4), (2, "deadline", 1), (3, "deadline", 4)]
    for result in job["results"]:
        # what came here is what was simulated: classes, targets, tenants, lengths
        assert result["by_class"]["interactive"]["requests"] == 6 == result["finished"]
        assert result["by_tenant"]["ada"]["output_tokens"] == 240 == result["output_tokens"]
        assert result["attainment"] == 1.0
        # a step took 2 ms and a little, and so it does here
        assert 0.0015 < result["tpot"]["p50"] < 0.02
        frames = await asker.http.get(f"{PATH}/timeline?run={result['run']}")
        assert frames.headers["content-type"] == "application/octet-stream"
        steps: list[Any] = []
        model = Model(steps.append)
        for frame in Decoder().feed(frames.content):
            model.take(frame)
        assert len(steps) == result["steps"] and model.num_doubts == 0
        assert b"hello" not in frames.content
    gone = await asker.http.get(f"{PATH}/timeline?run=4")
    assert gone.status_code == 404 and "[0, 1, 2, 3]" in gone.json()["error"]["message"]


async def test_a_trace_on_other_hardware(ask: Ask) -> None:
    asker = ask(timeline_history=0)
    sent = await asker.send()
    assert sent.json() == {"trace_bytes": len(TRACE)}
    told = await asker.tell()
    assert told["minutes"] is None and told["trace_bytes"] == len(TRACE)
    await asker.start(workload="trace", loads=[1, 2], budgets=[512, 4096], ttft_ms=12.0, **CARD)
    job = await asker.ended()
    assert job["status"] == "done", job
    by = {(each["budget"], each["load"]): each for each in job["results"]}
    assert len(by) == 4 and all(each["requests"] == 120 for each in by.values())
    # the same requests in half the time
    slow, fast = by[4096, 1], by[4096, 2]
    assert fast["offered_rate"] == pytest.approx(2 * slow["offered_rate"])
    assert fast["end"] < 0.6 * slow["end"]
    # prompts of up to 770 tokens take two steps where one may have 512, and targets are heeded
    assert by[512, 1]["ttft"]["p99"] > slow["ttft"]["p99"]
    assert 0.0 <= by[512, 1]["attainment"] < slow["attainment"] <= 1.0


async def test_what_is_no_trace_is_told_without_its_path(ask: Ask) -> None:
    asker = ask()
    for text, said in (
        ("a,b\n1,2\n", "the trace:1: not a known trace"),
        ("prompt_tokens,output_tokens\n3,4\n", "has lengths but no times"),
        (TRACE + "2023-11-16 18:00:00.0,1,1\n", "sort the file by time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request with tokens"),
    ):
        await asker.send(text)
        await asker.start(workload="trace", **CARD)
        job = await asker.ended()
        assert job["status"] == "failed" and said in job["error"], job
        assert "paceline-what-if" not in job["error"]


async def test_too_little_is_known_to_simulate(ask: Ask) -> None:
    asker = ask()
    await asker.start()
    assert "no request arrived in these minutes" in (await asker.ended())["error"]
    body = {"model": "null", "prompt": "x", "max_tokens": 2}
    await asker.http.post("/v1/completions", json=body)
    await asker.told_of(1)
    await asker.start()
    assert "at least 32 are needed" in (await asker.ended())["error"]
