"""The process that simulates for the page: it ends with its parent, and a real server has
one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli.flags.settings import TRACE_PROCESS, WHAT_IF_PROCESS, EngineSettings
from paceline.timeline.codec import headers
from paceline.timeline.events import FrameType
from tests.cli.servers import ServerProcess, start_server
from tests.server.live_process import eventually

PATH = "/ui/api/what-if"
CARD = {"hardware": "H100-SXM", "model": "meta-llama/Llama-3.1-8B"}
# many seconds of simulation
MANY = "arrived_at_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 10:.1f},900,2000\n" for i in range(5000)
)


def job(tmp_path: Path, **changed: Any) -> dict[str, Any]:
    (tmp_path / "trace").write_text(MANY)
    return {
        "settings": EngineSettings.of().to_json().decode(),
        "engine": {
            "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048,
            "policy": "deadline", "block_size": 16, "num_blocks": 4096,
            "enable_prefix_caching": True,
        },
        "workload": {"kind": "trace", "path": str(tmp_path / "trace")},
        "frames": None,
        "step_times": {"kind": "roofline", "hardware": "H100-SXM",
                       "model": "meta-llama/Llama-3.1-8B"},
        "policies": ["fcfs"], "budgets": [2048], "loads": [1.0], "max_num_seqs": None,
        "targets": {"ttft": None, "tpot": None}, "most_requests": 20_000,
        "folder": str(tmp_path), "root": str(tmp_path), "memory": 2**30, "seconds": 60,
    } | changed  # fmt: skip


def start(
    job: dict[str, Any], command: tuple[str, ...] = WHAT_IF_PROCESS
) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(json.dumps(job).encode() + b"\n")
    child.stdin.flush()
    return child


def asked_of(tmp_path: Path) -> dict[str, Any]:
    """What a check is told."""
    trace = str(tmp_path / "trace")
    return {"path": trace, "root": str(tmp_path), "memory": 2**30, "seconds": 20}


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    with start(job(tmp_path)) as child:
        assert child.stdin is not None and child.stdout is not None
        told = [json.loads(child.stdout.readline()) for _ in range(4)]
        assert [each.get("doing") for each in told[:3]] == ["reading", "fitting", "simulating"]
        assert told[3] == {"run": 0, "done": 0.0}
        # it would go on for many seconds
        child.stdin.close()
        assert child.wait(20) == 1
        assert not any(b"result" in line for line in child.stdout)
    # no other process is left to do that
    assert not tmp_path.exists()


@pytest.mark.thorough
def test_it_cleans_up_without_a_listener(tmp_path: Path) -> None:
    """Both pipes end with a server that is killed, and the folder takes its time."""
    root = tmp_path / "root"
    for folder in range(20):
        (root / str(folder)).mkdir(parents=True)
        for number in range(500):
            (root / str(folder) / str(number)).touch()
    with start(job(tmp_path, root=str(root))) as child:
        assert child.stdin is not None and child.stdout is not None
        while b'"run"' not in child.stdout.readline():
            pass
        child.stdout.close()
        child.stdin.close()
        assert child.wait(20) == 1
    assert not root.exists()


def test_a_check_ends_with_its_parent(tmp_path: Path) -> None:
    # a reader that opens it waits for ever
    os.mkfifo(tmp_path / "trace")
    with start(asked_of(tmp_path), TRACE_PROCESS) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.close()
            assert child.wait(20) == 1 and child.stdout.read() == b""
        finally:
            child.kill()
    assert not tmp_path.exists()


def test_settings_decide(tmp_path: Path) -> None:
    """What is asked of the engine is what is simulated."""
    few = job(tmp_path, most_requests=20, budgets=[300, 2048], max_num_seqs=2)
    with start(few) as child:
        assert child.stdout is not None
        lines = [json.loads(line) for line in child.stdout]
    results = [each["result"] for each in lines if "result" in each]
    assert [each["budget"] for each in results] == [300, 2048]
    assert all(each["requests"] == 20 == each["finished"] for each in results)
    # a prompt of 900 tokens takes three steps where one may have 300
    assert results[0]["steps"] > results[1]["steps"]
    # two run at once: the others wait
    assert results[1]["queued"]["max"] > 1.0
    one_at_a_time = next(each for each in lines if each.get("doing") == "simulating")
    assert one_at_a_time["left_out"] == 4980


def test_a_result_is_of_bounded_size(tmp_path: Path) -> None:
    """However many there are whom it could tell apart."""
    small = job(tmp_path, targets={"ttft": 0.5, "tpot": None})
    clients = ["often", *(f"once{i}" for i in range(60))]
    (tmp_path / "trace").write_text(
        "arrived_at_s,client,prompt_tokens,output_tokens\n"
        + "".join(f"{i},{client},20,2\n" for i, client in enumerate([*clients, "often"]))
    )
    with start(small) as child:
        assert child.stdout is not None
        result = json.loads(child.stdout.readlines()[-1])["result"]
    assert len(result["by_tenant"]) == 20 and result["by_tenant"]["often"]["requests"] == 2
    # targets are given to requests that have none
    assert result["attainment"] == 1.0 and result["requests"] == 62


@pytest.mark.parametrize("name", ["budget", "policy"])
def test_numbers_that_do_not_go_together(tmp_path: Path, name: str) -> None:
    wrong = {"budget": {"budgets": [16]}, "policy": {"policies": ["nobody's"]}}[name]
    with start(job(tmp_path, most_requests=5, **wrong)) as child:
        assert child.stdout is not None
        last = json.loads(child.stdout.readlines()[-1])
    assert {"budget": "max_num_seqs", "policy": "nobody's"}[name] in last["error"]


def simulating(server: ServerProcess) -> list[int]:
    """Processes of the server that simulate."""
    found = []
    for tasks in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in map(int, tasks.read_text().split()):
            if b"paceline.cli.simulation.what_if" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_server_simulates_itself() -> None:
    """With the settings that it was started with."""
    flags = ("--max-num-batched-tokens", "48", "--max-num-seqs", "3", "--no-adaptive-token-budget")
    # as many steps as tokens
    flags = (*flags, "--speculative-config", '{"method": "off"}')
    with start_server("--backend", "null", "--null-step-time", "0.001", *flags) as server:
        body = {"model": "null", "prompt": "x" * 200, "max_tokens": 40, "ignore_eos": True}
        assert server.request("/v1/completions", body)[0] == 200
        told = server.request(PATH)[1]
        assert (
            told["server"]["max_num_batched_tokens"] == 48 and told["server"]["max_num_seqs"] == 3
        )
        timeline = f"{server.address}/ui/api/timeline"
        # told some milliseconds after it was answered
        eventually(lambda: FrameType.END in [k for k, _, _ in headers(httpx.get(timeline).content)])
        assert server.request(PATH, {"policies": ["deadline"]})[0] == 200
        eventually(lambda: server.request(PATH)[1]["job"]["status"] != "running", 60)
        job = server.request(PATH)[1]["job"]
        assert job["status"] == "done", job
        (result,) = job["results"]
        # 200 tokens of prompt, 48 in a step, and one token in each of the others
        assert (result["budget"], result["steps"], result["output_tokens"]) == (48, 5 + 39, 40)
        assert server.stop()[0] == 0


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)]
)
def test_it_is_gone_with_the_server(number: signal.Signals, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    with start_server("--backend", "null", env=env) as server:
        httpx.put(f"{server.address}{PATH}/trace", content=MANY).raise_for_status()
        asked = {"workload": "trace", "policies": ["fcfs"], **CARD}
        assert server.request(PATH, asked)[0] == 200
        eventually(lambda: bool(simulating(server)))
        (pid,) = simulating(server)
        # it has read its job, so it knows what to take away
        eventually(lambda: server.request(PATH)[1]["job"]["doing"] == "simulating", 30)
        assert len(list(tmp_path.glob("paceline-what-if-*"))) == 1
        code, _ = server.stop(number)
        assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        eventually(lambda: is_gone(pid), 30)
        eventually(lambda: not list(tmp_path.glob("paceline-what-if-*")), 30)


@pytest.mark.thorough
def test_what_a_killed_server_leaves_the_next_one_takes_away(tmp_path: Path) -> None:
    """A trace that no simulation could delete."""
    env = {"TMPDIR": str(tmp_path)}

    def left() -> list[Path]:
        return list(tmp_path.glob("*paceline-what-if-*"))

    with start_server("--backend", "null", env=env) as server:
        httpx.put(f"{server.address}{PATH}/trace", content=MANY).raise_for_status()
        (held,) = left()
        with start_server("--backend", "null", env=env) as other:
            # it is a living server's
            assert left() == [held]
            assert other.stop()[0] == 0
        server.stop(signal.SIGKILL)
    assert left() == [held] and list(held.glob("*/trace"))
    with start_server("--backend", "null", env=env) as server:
        assert left() == []
        assert server.stop()[0] == 0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("9,20000000,1", "request 2 of the trace, at 9 s, has 20000000 tokens; prompts and"),
        ("9,1,1e300", "up to 10000000 tokens"),
        ("9,-1,1", "the trace:3: prompt_tokens is '-1'"),
        ("9,1", "has 2 columns"),
    ],
)
def test_a_trace_is_read_through(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "trace").write_text(f"arrived_at_s,prompt_tokens,output_tokens\n0,5,5\n{row}\n")

    def check() -> dict[str, Any]:
        with start(asked_of(tmp_path), TRACE_PROCESS) as child:
            assert child.stdout is not None
            found: dict[str, Any] = json.loads(child.stdout.readline())
            assert child.wait(60) == 0
        return found

    assert said in check()["error"]
    (tmp_path / "trace").write_text(MANY)
    assert check() == {"requests": 5000}
    (tmp_path / "trace").write_text("arrived_at_s,prompt_tokens,output_tokens\n0,0,0\n")
    assert check() == {"error": "the trace has no request with tokens"}


def test_start_does_not_wait_for_it() -> None:
    """What simulates and what counts promises is loaded when somebody looks."""
    code = (
        "import sys; from paceline.server import create_app, ServerConfig\n"
        "from paceline.web.routes import ui_router\n"
        "from paceline.backends.reference.null import NullBackend\n"
        "from paceline.engine.testing import null_client\n"
        "client = null_client(NullBackend(vocab_size=300))\n"
        "create_app(client, ServerConfig(), page=ui_router)\n"
        "late = ('server.observability.snapshot', 'web.promises', "
        "'web.what_if.service', 'web.what_if.job')\n"
        "found = [each for each in late if f'paceline.{each}' in sys.modules]\n"
        "found += [each for each in sys.modules if each.startswith('paceline.sim')]\n"
        "print(found, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
