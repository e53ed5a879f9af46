"""What a job may ask for, and who may ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.cli.simulation.what_if import choices
from paceline.engine.local import LocalEngineClient
from paceline.errors import InvalidRequestError
from paceline.web.what_if.job import parse_job
from tests.web.what_if.helpers import PATH, Ask, Asker


async def test_what_cannot_be_is_told_beside_its_field(ask: Ask) -> None:
    asker = ask()
    assert (await asker.refusal(workload="trace"))["param"] == "workload"
    without = ask(timeline_history=0)
    error = await without.refusal()
    assert error["param"] == "workload" and "--no-timeline" in error["message"]
    await without.send()
    assert (await without.refusal(workload="trace"))["param"] == "hardware"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"workload": "file:/etc/passwd"}, "workload"),
        ({"workload": ["trace"]}, "workload"),
        ({"minutes": 0}, "minutes"),
        ({"minutes": 61}, "minutes"),
        ({"minutes": True}, "minutes"),
        ({"policies": []}, "policies"),
        ({"policies": "fcfs"}, "policies"),
        ({"policies": ["recorded:/etc/passwd"]}, "policies"),
        ({"policies": [["fcfs"]]}, "policies"),
        ({"budgets": [0]}, "budgets"),
        ({"budgets": [1.5]}, "budgets"),
        ({"budgets": ["2048"]}, "budgets"),
        ({"loads": [0]}, "loads"),
        ({"loads": [1e9]}, "loads"),
        ({"loads": [1] * 17}, "loads"),
        ({"loads": [1, 2, 3, 4, 5], "budgets": [300, 400, 500, 600]}, "policies"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.0}, "max_num_seqs"),
        ({"hardware": "H100-SXM"}, "model"),
        ({"model": "meta-llama/Llama-3.1-8B"}, "hardware"),
        ({"hardware": "../x", "model": "y"}, "hardware"),
        ({"hardware": "H100-SXM", "model": "profile:/etc"}, "model"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"tpot_ms": "x"}, "tpot_ms"),
        ({"path": "/etc/passwd"}, "path"),
    ],
)
def test_a_field_that_is_none(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_job({"policies": ["fcfs"]} | body, choices(), 2048)
    assert refused.value.param == param


def test_what_is_left_out_is_as_the_server_is() -> None:
    job = parse_job({"policies": ["fcfs", "fcfs"]}, choices(), 2048)
    assert (job.workload, job.minutes, job.budgets, job.loads) == ("minutes", 10.0, (2048,), (1.0,))
    assert job.policies == ("fcfs",) and job.num_runs == 1 and job.max_num_seqs is None


async def test_a_server_that_has_nothing_to_simulate_with(engine: LocalEngineClient) -> None:
    asker = Asker(engine, None)
    async with asker.http as http:
        assert (await http.get(PATH)).status_code == 404
        assert (await http.post(PATH, json={})).status_code == 404


async def test_names_and_pages_of_others_are_refused(ask: Ask) -> None:
    http = ask().http
    for method, path in (
        ("GET", PATH), ("POST", PATH), ("DELETE", PATH), ("PUT", f"{PATH}/trace"),
        ("GET", f"{PATH}/timeline?run=0"),
    ):  # fmt: skip
        answer = await http.request(method, path, headers={"Host": "evil.example"})
        assert answer.status_code == 421, (method, path)
        if method != "GET":
            headers = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
            assert (await http.request(method, path, headers=headers)).status_code == 403


def test_choices_are_those_that_the_simulator_knows() -> None:
    from paceline.sim.step_times.models import known_models
    from paceline.sim.step_times.roofline import known_hardware

    told = json.loads(json.dumps(choices()))
    assert told["hardware"] == [card.name for card in known_hardware()]
    assert told["models"] == [model.name for model in known_models()]
    assert {"fcfs", "deadline", "fair"} <= set(told["policies"])
