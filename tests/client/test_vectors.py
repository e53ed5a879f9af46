"""The transcripts in ``vectors/``, played to the machine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Policy, RetryBudget, Target
from paceline.client import steps as kinds
from paceline.client.machine import Machine
from paceline.client.steps import Data, Input, Request
from tests.client.vectors import FOLDER, SCENARIOS, STATUSES, action_of, told_of_statuses

FILES = sorted(FOLDER.glob("*.json"))


def input_of(given: dict[str, Any]) -> Input:
    fields = dict(given)
    kind = fields.pop("type")
    if kind == "Data":
        coded = fields.get("base64")
        return Data(base64.b64decode(coded) if coded is not None else fields["text"].encode())
    return getattr(kinds, kind)(**fields)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    vector = json.loads(path.read_text())
    targets = [Target(**target) for target in vector["targets"]]
    machine = Machine(
        Request(**vector["request"]),
        targets,
        Policy(**vector["policy"]),
        RetryBudget(**vector["budget"]),
        lambda: vector["draw"],
        [set() for _ in targets],
    )
    for number, step in enumerate(vector["steps"]):
        actions = machine.handle(input_of(step["in"]), step["at"])
        # through JSON, which has no tuples
        said = json.loads(json.dumps([action_of(action) for action in actions]))
        assert said == step["out"], number
        assert (None if machine.over else machine.deadline) == step["deadline"], number
    assert machine.over


def test_every_scenario_has_a_file() -> None:
    assert {path.stem for path in FILES} == set(SCENARIOS)


def test_the_file_of_statuses_is_the_table() -> None:
    """The client in TypeScript is held to it."""
    assert STATUSES.read_text() == told_of_statuses()
