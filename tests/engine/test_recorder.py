"""What ``--record`` writes: every step and request, off the step loop, and what was dropped."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.reference.null import NullBackend
from paceline.core.config import CacheConfig, SchedulerConfig
from paceline.core.outputs import ScheduledRow, SchedulerOutput
from paceline.core.slo import Slo
from paceline.core.tier import Move
from paceline.engine.core import EngineCore, EngineParts
from paceline.engine.recorder import FileRecorder
from paceline.errors import ConfigError
from tests.driving import make_request

SCHEDULER = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64)
CACHE = CacheConfig(block_size=4, num_blocks=32)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, *, repeat: int = 0) -> list[dict[str, Any]]:
    """Three requests, one of them aborted, and ``repeat`` more; the lines of their recording."""
    ticks = iter(range(10_000))
    core = EngineCore(
        NullBackend(num_blocks=32, block_size=4),
        SCHEDULER,
        CACHE,
        clock=lambda: float(next(ticks)),
        parts=EngineParts(recorders=(FileRecorder(path, SCHEDULER, CACHE, 2),)),
    )
    core.add_request(make_request("a", 20, 3))
    core.add_request(make_request("b", 5, 4))
    core.add_request(make_request("gone", 5, 4))
    core.step()
    core.abort(["gone"])
    for number in range(repeat):
        core.add_request(make_request(f"more-{number}", 10 + number, 12))
    while core.has_work:
        core.step()
    core.close()
    return lines(path)


def test_steps_and_requests_are_written(tmp_path: Path) -> None:
    header, *records, last = run(tmp_path / "r.jsonl")
    assert header["paceline_recording"] == 1
    assert header["scheduler"]["max_num_seqs"] == 4
    assert (header["cache"]["block_size"], header["pipeline_depth"]) == (4, 2)
    steps = [r for r in records if "step" in r]
    requests = {r["request"]: r for r in records if "request" in r}
    assert last == {"end": True, "steps": len(steps), "requests": 3, "dropped": 0}
    # the first step has room for 16 of a's 20 tokens and no more
    assert (steps[0]["rows"], steps[0]["narrow"], steps[0]["samples"]) == ([[0, 16]], [0, 0, 0], 0)
    computed = sum(n for s in steps for _, n in s["rows"]) + sum(s["narrow"][0] for s in steps)
    # prompts, and every output token but the last is fed back once; b found a block of 4 cached
    assert computed - requests["gone"]["output_tokens"] >= 20 + 2 + 5 + 3 - 4
    assert requests["b"]["cached_tokens"] == 4
    assert all(s["planned"] < s["done"] for s in steps)
    a = requests["a"]
    assert (a["prompt_tokens"], a["output_tokens"], a["end"]) == (20, 3, "length")
    assert a["taken"] < a["scheduled"] < a["first_token"] < a["last_token"]
    assert requests["gone"]["end"] == "abort"


def test_what_was_asked_is_written_and_not_what_became_of_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = FileRecorder(path, SCHEDULER, CACHE, 2)
    request = make_request("late", 5, slo=Slo(ttft=0.5))
    recorder.added(request, 0.0)
    # as when its first token cannot come in time any more
    request.move(Move.DEMOTE)
    recorder.ended(["late"], 9.0)
    recorder.close()
    written = lines(path)[1]["slo"]
    assert (written["ttft"], written["best_effort"]) == (0.5, False)


def test_forks_that_are_dropped_with_their_parent_are_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    ticks = iter(range(10_000))
    core = EngineCore(
        NullBackend(num_blocks=32, block_size=4),
        replace(SCHEDULER, max_num_seqs=1, queue_timeout_s=6.0),
        CACHE,
        clock=lambda: float(next(ticks)),
        parts=EngineParts(recorders=(FileRecorder(path, SCHEDULER, CACHE, 2),)),
    )
    core.add_request(make_request("a", 5, 12))
    core.add_request(make_request("b", 5, 4))
    core.add_request(make_request("b-fork", 5, 4, fork_of="b"))
    while core.has_work:
        core.step()
        core.take_expired()
    core.close()
    ends = {line["request"]: line["end"] for line in lines(path) if "request" in line}
    assert ends == {"a": "length", "b": "abort", "b-fork": "abort"}


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = FileRecorder(path, SCHEDULER, CACHE, 2, capacity=2)
    hold = threading.Event()
    write = recorder._write

    def slow(record: dict[str, Any]) -> None:
        hold.wait(10)
        write(record)

    recorder._write = slow  # type: ignore[method-assign]
    plan = SchedulerOutput(0, (ScheduledRow("a", 3, 1, (), True),), (), (), (), 1)
    for number in range(50):
        recorder.stepped(plan, float(number), number + 0.5, 0.5, ())
    assert recorder.num_dropped >= 47
    hold.set()
    recorder.close()
    last = lines(path)[-1]
    assert last["dropped"] == recorder.num_dropped
    assert last["steps"] + last["dropped"] == 50


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        FileRecorder(tmp_path / "no" / "r.jsonl", SCHEDULER, CACHE, 2)
