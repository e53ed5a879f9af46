"""What the start-up benchmark reads from a server's log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from benchmarks.startup import PARTS, parse, starting
from paceline.cli.serve.startup import Stages
from paceline.cli.terminal.logs import JsonFormatter


def test_parts_are_read_from_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stages = Stages(1.0, 10.0)
    stages.done("start", 10.5)
    stages.done("web", 11.0)
    with caplog.at_level(logging.INFO):
        stages.log(logging.getLogger("x"), "started")
    logging.getLogger("x").error("started badly")
    lines = [JsonFormatter().format(record) for record in caplog.records]
    other = ["paceline ready: http://127.0.0.1", "{}", "[1]", json.dumps({"message": ""}), "null"]
    assert parse([*other, *lines]) == {"api.start": 1.5, "api.web": 0.5}


def test_every_part_of_a_server_without_a_model_is_found(tmp_path: Path) -> None:
    with starting(tmp_path / "log", "--backend", "null") as server:
        start = server.start
    assert 0 < start.ready < start.first_token
    assert start.cpu > 0.1
    # what tells of a model's file is missing
    assert set(start.parts) == {name for name in PARTS if not name.startswith("model.")}
