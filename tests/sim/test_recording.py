"""A recording comes back as it was written, and as a workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.sim.recording import Recording
from tests.cli.servers import start_server
from tests.engine.test_recorder import CACHE, SCHEDULER, run


def test_round_trip(tmp_path: Path) -> None:
    run(tmp_path / "r.jsonl")
    recording = Recording.read(tmp_path / "r.jsonl")
    assert (recording.config.scheduler, recording.config.cache) == (SCHEDULER, CACHE)
    assert recording.num_dropped == 0
    assert recording.steps[0].wide == ((0, 16),)
    assert (recording.steps[0].wide_tokens, recording.steps[0].wide_keys) == (16, 128.0)
    arrivals = {a.prompt_tokens: a for a in recording.workload()}
    assert arrivals[20].output_tokens == 3
    assert all(a.at == 0.0 for a in arrivals.values())


def test_a_truncated_recording_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2]))
    recording = Recording.read(path)
    assert (len(recording.steps), recording.requests) == (1, ())


@pytest.mark.parametrize(
    "text", ["", "{}", '{"paceline_recording": 99}', "not json", "[1]"], ids=range(5)
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.jsonl"):
        Recording.read(path)


def test_a_setting_that_was_renamed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    head = {"paceline_recording": 1, "scheduler": {"plan_lead_s": 0.1}, "cache": {}}
    path.write_text(json.dumps(head) + "\n")
    with pytest.raises(ConfigError, match="plan_lead_s is now schedule_ahead_s: record it again"):
        Recording.read(path)


def test_serve_record_writes_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with start_server("--backend", "null", "--record", str(path)) as server:
        body = {"model": "null", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        status, _ = server.request("/v1/completions", body)
        assert status == 200
        server.stop()
    recording = Recording.read(path)
    (request,) = recording.requests
    assert (request.output_tokens, request.end) == (4, "length")
    assert request.arrival <= request.taken
    assert len(recording.steps) == 4
