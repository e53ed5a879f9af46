"""``/ui/api/what-if``: what may be asked, what is simulated, and that it stays in its bounds."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.backends.null import NullBackend
from paceline.cli.settings import TRACE_PROCESS, WHAT_IF_PROCESS, EngineSettings
from paceline.cli.what_if import choices
from paceline.core.errors import InvalidRequestError
from paceline.engine.local import LocalEngineClient
from paceline.engine.testing import null_client
from paceline.engine.timeline.codec import Decoder, headers
from paceline.engine.timeline.events import FrameType
from paceline.engine.timeline.model import Model
from paceline.http.keys import ApiKey
from paceline.server import ServerConfig, create_app
from paceline.server.app import service_of
from paceline.server.config import WhatIfConfig
from paceline.server.ui import what_if as module
from paceline.server.ui.what_if_job import parse_job
from paceline.server.ui.what_if_places import MOST_PLACES
from tests.server.helpers import VOCAB

pytestmark = pytest.mark.anyio

PATH = "/ui/api/what-if"
SETTINGS = EngineSettings.of(pipeline_depth=1).to_json().decode()
CARD = {"hardware": "H100-SXM", "model": "meta-llama/Llama-3.1-8B"}
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:00:{i // 4:02d}.{25 * (i % 4):02d},{400 + 37 * (i % 11)},{40 + i % 9}\n"
    for i in range(120)
)
# it takes the simulator many seconds
MANY = "arrived_at_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 50:.2f},900,400\n" for i in range(20_500)
)


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngineClient]:
    client = null_client(NullBackend(vocab_size=VOCAB, step_time=0.002), timeline=True)
    yield client
    await client.close()


def configured(command: tuple[str, ...] = WHAT_IF_PROCESS, **values: Any) -> WhatIfConfig:
    return WhatIfConfig(command=command, settings=SETTINGS, choices=choices, **values)


def script(text: str) -> tuple[str, ...]:
    """A child that does something else with its job."""
    return (sys.executable, "-c", "import json, os, sys, time\n" + text)


SLEEPS = script(
    "sys.stdin.readline(); print(json.dumps({'doing': 'simulating', 'runs': 1}), flush=True)\n"
    "time.sleep(60)"
)


class Asker:
    """A page's caller, and the app behind it."""

    def __init__(self, engine: LocalEngineClient, config: WhatIfConfig | None, **more: Any) -> None:
        app = create_app(engine, ServerConfig(what_if=config, **more))
        self.service = service_of(app)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=60
        )

    async def start(self, **body: Any) -> httpx.Response:
        return await self.http.post(PATH, json={"policies": ["fcfs"]} | body)

    async def tell(self) -> Any:
        return (await self.http.get(PATH)).json()

    async def ended(self) -> Any:
        for _ in range(1200):
            job = (await self.tell())["job"]
            if job["status"] != "running":
                return job
            await asyncio.sleep(0.05)
        raise AssertionError("it goes on")

    async def told_of(self, requests: int) -> None:
        """Until the engine has told of the end of so many."""
        for _ in range(400):
            frames = (await self.http.get("/ui/api/timeline")).content
            if sum(kind == FrameType.END for kind, _, _ in headers(frames)) == requests:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("they go on")

    async def refusal(self, **body: Any) -> dict[str, Any]:
        answer = await self.start(**body)
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


Ask = Callable[..., Asker]


@pytest.fixture
async def ask(engine: LocalEngineClient) -> AsyncIterator[Ask]:
    made: list[Asker] = []

    def make(config: WhatIfConfig | None = None, **more: Any) -> Asker:
        made.append(Asker(engine, config or configured(), **more))
        return made[-1]

    yield make
    for each in made:
        await each.service.end_side_work()
        await each.http.aclose()


# ---------------------------------------------------------------------- what is simulated


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
    sent = await asker.http.put(f"{PATH}/trace", content=TRACE)
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
        ("prompt_tokens,output_tokens\n3,4\n", "has lengths only"),
        (TRACE + "2023-11-16 18:00:00.0,1,1\n", "sort the file by time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request with tokens"),
    ):
        await asker.http.put(f"{PATH}/trace", content=text)
        await asker.start(workload="trace", **CARD)
        job = await asker.ended()
        assert job["status"] == "failed" and said in job["error"], job
        assert "paceline-what-if" not in job["error"]


async def test_too_little_is_known_to_simulate(ask: Ask) -> None:
    asker = ask()
    await asker.start()
    assert "no request came in these minutes" in (await asker.ended())["error"]
    body = {"model": "null", "prompt": "x", "max_tokens": 2}
    await asker.http.post("/v1/completions", json=body)
    await asker.told_of(1)
    await asker.start()
    assert "at least 32 are needed" in (await asker.ended())["error"]


async def test_what_cannot_be_simulated_is_refused_when_it_is_sent(ask: Ask) -> None:
    asker = ask(configured(check=TRACE_PROCESS))
    sent = await asker.http.put(f"{PATH}/trace", content=TRACE)
    assert sent.json() == {"trace_bytes": len(TRACE), "requests": 120}
    for text, said in (
        ("a,b\n1,2\n", "the trace:1: not a known trace"),
        (TRACE + "2023-11-16 19:00:00.0,10000001,1\n", "has 10000001 tokens; at most 10000000"),
    ):
        refused = await asker.http.put(f"{PATH}/trace", content=text)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"] == "trace"
        assert said in error["message"] and "paceline-what-if" not in error["message"]
    # the one before it is still there
    assert (await asker.tell())["trace_bytes"] == len(TRACE)
    places = asker.service.side_work[0].__self__._places  # type: ignore[attr-defined]
    assert [path.name for path in (places.root / "1").iterdir()] == ["trace"]
    # whoever reads it through and says nothing was ended
    starved = ask(configured(check=script("bytearray(2**60)")))
    refused = await starved.http.put(f"{PATH}/trace", content=TRACE)
    assert refused.status_code == 400 and "20 s of processor time or 1024 MiB" in refused.text


# ---------------------------------------------------------------------- whose it is


async def test_callers_know_nothing_of_each_other(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    one, other = ({"X-Paceline-Session": name} for name in ("one", "other"))
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    http = asker.http
    sent = await http.put(f"{PATH}/trace", content=TRACE, headers=one)
    assert sent.status_code == 200
    refused = await http.post(PATH, json=body, headers=other)
    assert refused.status_code == 400 and "no trace was uploaded" in refused.text
    assert (await http.post(PATH, json=body, headers=one)).status_code == 200
    told = (await http.get(PATH, headers=other)).json()
    assert told["job"] == {"status": "idle"} and told["trace_bytes"] is None and told["busy"]
    mine = (await http.get(PATH, headers=one)).json()
    assert mine["job"]["status"] == "running" and not mine["busy"]
    # it can neither be begun beside nor ended, and others may send theirs meanwhile
    assert (await http.put(f"{PATH}/trace", content="x" + TRACE, headers=other)).status_code == 200
    beside = await http.post(PATH, json=body, headers=other)
    assert beside.status_code == 409 and "another caller's" in beside.text
    assert (await http.delete(PATH, headers=other)).json() == {"status": "idle"}
    assert (await http.get(PATH, headers=one)).json()["job"]["status"] == "running"
    # each has its own trace
    root = asker.service.side_work[0].__self__._places.root  # type: ignore[attr-defined]
    assert [(root / place / "trace").read_text()[:2] for place in "12"] == ["TI", "xT"]
    assert (await http.delete(PATH, headers=one)).json()["status"] == "cancelled"
    bad = await http.get(PATH, headers={"X-Paceline-Session": "../x"})
    assert bad.status_code == 400 and "x-paceline-session" in bad.text


async def test_another_key_is_another_caller(ask: Ask) -> None:
    keys = tuple(ApiKey.of(name, "admin", f"{name}-key-12345") for name in ("ada", "bob"))
    asker = ask(api_keys=keys)
    ada, bob = (
        {"Authorization": f"Bearer {key.name}-key-12345", "X-Paceline-Session": "same"}
        for key in keys
    )
    await asker.http.put(f"{PATH}/trace", content=TRACE, headers=ada)
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    assert (await asker.http.post(PATH, json=body, headers=ada)).status_code == 200
    for _ in range(400):
        job = (await asker.http.get(PATH, headers=ada)).json()["job"]
        if job["status"] != "running":
            break
        await asyncio.sleep(0.05)
    assert job["status"] == "done"
    for who, query, status in (
        (ada, "run=0", 200), (ada, "run=0&job=1", 200), (ada, "run=0&job=2", 404),
        (ada, "run=1", 404), (ada, "run=x", 400), (ada, "run=0&job=-1", 400), (bob, "run=0", 404),
    ):  # fmt: skip
        got = await asker.http.get(f"{PATH}/timeline?{query}", headers=who)
        assert got.status_code == status, (query, got.text[:200])
    assert (await asker.http.get(PATH, headers=bob)).json()["job"] == {"status": "idle"}


async def test_the_place_of_who_asked_longest_ago_is_given_up(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))

    async def send(name: str) -> int:
        headers = {"X-Paceline-Session": name}
        return (await asker.http.put(f"{PATH}/trace", content=TRACE, headers=headers)).status_code

    for number in range(MOST_PLACES):
        assert await send(f"s{number}") == 200
    # the oldest of them has a job, and the next one has asked just now
    body = {"workload": "trace", "policies": ["fcfs"], **CARD}
    first = {"X-Paceline-Session": "s0"}
    assert (await asker.http.post(PATH, json=body, headers=first)).status_code == 200
    await asker.http.get(PATH, headers={"X-Paceline-Session": "s1"})
    assert await send("late") == 200
    kept = {}
    for name in ("s0", "s1", "s2", "s3", "late"):
        told = (await asker.http.get(PATH, headers={"X-Paceline-Session": name})).json()
        kept[name] = told["trace_bytes"] is not None
    assert kept == {"s0": True, "s1": True, "s2": False, "s3": True, "late": True}
    root = asker.service.side_work[0].__self__._places.root  # type: ignore[attr-defined]
    await until(lambda: len(list(root.glob("*/trace"))) == MOST_PLACES)


# ---------------------------------------------------------------------- what may be asked


async def test_what_cannot_be_is_told_beside_its_field(ask: Ask) -> None:
    asker = ask()
    assert (await asker.refusal(workload="trace"))["param"] == "workload"
    without = ask(timeline_history=0)
    error = await without.refusal()
    assert error["param"] == "workload" and "--no-timeline" in error["message"]
    await without.http.put(f"{PATH}/trace", content=TRACE)
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


# ---------------------------------------------------------------------- its bounds


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not so")


def pid_of(asker: Asker) -> int:
    process = asker.service.side_work[0].__self__._process  # type: ignore[attr-defined]
    assert process is not None
    return int(process.pid)


async def begun(asker: Asker) -> int:
    await asker.http.put(f"{PATH}/trace", content=TRACE)
    assert (await asker.start(workload="trace", **CARD)).status_code == 200
    what_if = asker.service.side_work[0].__self__  # type: ignore[attr-defined]
    await until(lambda: what_if._process is not None)
    return pid_of(asker)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_one_at_a_time_and_cancelled(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    assert (await asker.start(workload="trace", **CARD)).status_code == 409
    assert (await asker.http.put(f"{PATH}/trace", content=TRACE)).status_code == 409
    job = (await asker.http.delete(PATH)).json()
    assert job["status"] == "cancelled" and is_gone(pid)
    # and there is room for the next one
    assert (await asker.start(workload="trace", **CARD)).status_code == 200
    assert (await asker.http.delete(PATH)).json()["number"] == job["number"] + 1
    # nothing runs: nothing changes
    assert (await asker.http.delete(PATH)).json()["status"] == "cancelled"


async def test_a_drain_ends_it_and_its_files(ask: Ask) -> None:
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    folder: Path = asker.service.side_work[0].__self__._places.root  # type: ignore[attr-defined]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "1" / "trace").is_file()
    asker.service.draining = True
    await asker.service.end_side_work()
    assert is_gone(pid) and not folder.exists()
    assert (await asker.start(workload="trace", **CARD)).status_code == 503
    assert (await asker.http.put(f"{PATH}/trace", content=TRACE)).status_code == 503


async def test_it_takes_too_long(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.05)
    asker = ask(configured(SLEEPS, seconds=0.5))
    pid = await begun(asker)
    job = await asker.ended()
    assert job["status"] == "failed" and "more than 0.5 s" in job["error"] and is_gone(pid)


async def test_nobody_asks_for_it(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORGOTTEN", 0.3)
    monkeypatch.setattr(module, "_LOOK", 0.05)
    asker = ask(configured(SLEEPS))
    pid = await begun(asker)
    await until(lambda: is_gone(pid))
    job = await asker.ended()
    assert job["status"] == "cancelled" and "nobody asked" in job["error"]


async def test_what_it_may_take(ask: Ask) -> None:
    """Of processor and of memory; what was done before stays."""
    asker = ask(configured(cpu_seconds=3))
    await asker.http.put(f"{PATH}/trace", content=MANY)
    await asker.start(workload="trace", **CARD)
    job = await asker.ended()
    assert job["status"] == "failed" and "more than 3 s of processor" in job["error"], job
    assert job["requests"] == 20_000 and job["left_out"] == 500
    starved = ask(configured(script("bytearray(2**60)"), memory=90 * 2**20))
    await starved.http.put(f"{PATH}/trace", content=TRACE)
    await starved.start(workload="trace", **CARD)
    assert (await starved.ended())["error"] == "it needs more than 90 MiB"


async def test_it_yields_to_everything_else(ask: Ask) -> None:
    asker = ask()
    await asker.http.put(f"{PATH}/trace", content=MANY)
    await asker.start(workload="trace", **CARD)
    what_if = asker.service.side_work[0].__self__  # type: ignore[attr-defined]
    await until(lambda: what_if._process is not None)
    pid = pid_of(asker)
    await until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    limits = Path(f"/proc/{pid}/limits").read_text()
    for name, most in (("address space", 2**30), ("core file size", 0), ("file size", 2**26)):
        assert re.search(rf"Max {name} +{most} ", limits), limits
    # in a session of its own: Ctrl-C on a terminal is not for it
    assert os.getsid(pid) != os.getsid(0)


async def test_no_secret_is_handed_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "a-secret-of-this-server")
    monkeypatch.setenv("HF_TOKEN", "another-secret")
    tells = script("print(json.dumps({'error': ' '.join(os.environ.values())}), flush=True)")
    asker = ask(configured(tells))
    await asker.http.put(f"{PATH}/trace", content=TRACE)
    await asker.start(workload="trace", **CARD)
    assert "secret" not in (await asker.ended())["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sys.exit(3)", "code 3"),
        ("print('nonsense', flush=True); time.sleep(60)", "no answer"),
        ("print('{}' * 2, flush=True); time.sleep(60)", "no answer"),
    ],
)
async def test_a_child_that_misbehaves(
    ask: Ask, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # how long it may linger
    monkeypatch.setattr(module, "_LOOK", 0.2)
    asker = ask(configured(script(text)))
    await asker.http.put(f"{PATH}/trace", content=TRACE)
    await asker.start(workload="trace", **CARD)
    job = await asker.ended()
    assert job["status"] == "failed" and said in job["error"]
    assert (await asker.http.get("/health")).status_code == 200


async def test_a_child_that_is_none(ask: Ask) -> None:
    asker = ask(configured(("/nonexistent/program",)))
    await asker.http.put(f"{PATH}/trace", content=TRACE)
    await asker.start(workload="trace", **CARD)
    assert "could not be started" in (await asker.ended())["error"]


async def test_uploads_are_bounded(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    http = ask().http
    assert (await http.put(f"{PATH}/trace", content=b"")).status_code == 400
    declared = {"Content-Length": str(33 * 2**20)}
    assert (await http.put(f"{PATH}/trace", content=b"x", headers=declared)).status_code == 413
    monkeypatch.setattr(module, "MOST_TRACE", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 100

    assert (await http.put(f"{PATH}/trace", content=pieces())).status_code == 413
    # nothing of it is left
    assert (await http.get(PATH)).json()["trace_bytes"] is None


def test_choices_are_those_that_the_simulator_knows() -> None:
    from paceline.sim.step_times.models import known_models
    from paceline.sim.step_times.roofline import known_hardware

    told = json.loads(json.dumps(choices()))
    assert told["hardware"] == [card.name for card in known_hardware()]
    assert told["models"] == [model.name for model in known_models()]
    assert {"fcfs", "deadline", "fair"} <= set(told["policies"])
