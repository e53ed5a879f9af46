"""``paceline bench`` against this project's server and against one of another making."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fake_server import start_fake
from tests.cli.conftest import Command
from tests.cli.servers import ServerProcess, start_server
from tests.sim.report.test_page import parse

STEP = 0.004


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("--backend", "null", "--null-step-time", str(STEP)) as made:
        yield made


def figures(command: Command, *flags: object) -> dict[str, Any]:
    done = command("bench", *flags, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_our_own_server(server: ServerProcess, command: Command, tmp_path: Path) -> None:
    output, page = tmp_path / "run.json", tmp_path / "run.html"
    flags = (
        "--rate", 40, "--num-requests", 30, "--input-len", "uniform(50,90)", "--output-len", 20,
        "--ignore-eos", "--slo-ttft-ms", 5000, "--slo-tpot-ms", 1, "--output", output,
        "--html", page,
    )  # fmt: skip
    done = command("bench", "--url", server.address, *flags)
    assert done.returncode == 0, done.stderr
    values = json.loads(output.read_text())
    run = values["summary"]
    assert run["requests"] == values["ok"] == 30
    assert values["counted"] == "usage"
    assert run["output_tokens"] == 600
    # words of five bytes: within one of what was asked for
    for request in values["requests"]:
        assert abs(request["prompt_tokens"] - request["asked_prompt_tokens"]) <= 5
    # no token comes faster than a step, and not all of a request's at once; on a busy machine a
    # caller may read several at once
    assert run["tpot"]["p99"] >= STEP * 0.9
    assert run["e2e"]["p50"] >= 19 * STEP
    assert run["ttft"]["p50"] < run["e2e"]["p50"]
    # a millisecond a token is not to be had
    assert run["attainment"] == 0
    assert values["offered_rate"] == pytest.approx(40, rel=0.5)
    assert values["settings"]["rate"] == 40 and values["settings"]["model"] == "null"
    assert values["machine"]["cores"] >= 1
    assert re.search(r"\| TPOT +\|", done.stdout)
    assert (os.stat(output).st_mode | os.stat(page).st_mode) & 0o077 == 0
    tree = parse(page.read_text())
    assert "30 requests to null" in "".join(tree.itertext())
    assert len(list(tree.iter("svg"))) == 6


def test_a_closed_loop_on_completions(server: ServerProcess, command: Command) -> None:
    found = figures(
        command, "--url", f"{server.address}/v1", "--endpoint", "completions", "--concurrency", 3,
        "--num-requests", 12, "--output-len", 10, "--input-len", 20, "--ignore-eos",
        "--warmup", 2,
    )  # fmt: skip
    assert found["ok"] == 12
    assert found["peak_concurrency"] == 3
    assert found["offered_rate"] is None
    # no other request shares these prompts, the warm-up included
    assert found["summary"]["cached_tokens"] == 0


def test_a_closed_loop_ends_in_time(server: ServerProcess, command: Command) -> None:
    found = figures(
        command, "--url", server.address, "--concurrency", 2, "--duration", 0.4,
        "--output-len", 5, "--ignore-eos", "--input-len", 20,
    )  # fmt: skip
    # of 25 ms each at least, two at once
    assert 1 < found["ok"] <= 2 * (0.4 / 0.02 + 1)
    assert found["summary"]["duration"] < 5


def test_targets_are_sent_when_asked_for(command: Command) -> None:
    with start_fake() as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--num-requests", 2)
        targets = ("--slo-ttft-ms", 250, "--slo-e2e-ms", 900)
        figures(command, *flags, "--concurrency", 1, *targets)
        assert all("slo" not in body for body in fake.bodies)
        fake.bodies.clear()
        figures(command, *flags, "--concurrency", 1, *targets, "--send-slo")
        assert fake.bodies[-1]["slo"] == {"ttft_ms": 250.0, "deadline_ms": 900.0}


def test_another_dialect(command: Command) -> None:
    """Without usage, of a server that refuses ``stream_options``: chunks are counted."""
    with start_fake(tokens=6, seconds=0.01) as fake:
        flags = ("--url", f"http://127.0.0.1:{fake.port}", "--model", "m")
        done = command("bench", *flags, "--rate", 100, "--num-requests", 10, "--input-len", 30)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\| output tokens \(by chunks\) \| +60 \|", done.stdout)
    assert "counted by chunks" in done.stdout
    # a token a word by default
    assert len(fake.bodies[-1]["messages"][0]["content"].split()) == 30
    assert fake.bodies[-1]["max_tokens"] == 128


def test_tokens_come_when_the_server_sends_them(command: Command, tmp_path: Path) -> None:
    """Each of four chunks 50 ms after the one before, the first after the request."""
    output = tmp_path / "run.json"
    with start_fake(tokens=4, seconds=0.05) as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--output", output)
        figures(command, *flags, "--concurrency", 2, "--num-requests", 6)
    for request in json.loads(output.read_text())["requests"]:
        for index, at in enumerate(request["chunks"], 1):
            assert request["sent"] + 0.05 * index <= at <= request["ended"]


def test_bad_manners_are_counted(command: Command) -> None:
    manners = ("good", "429", "cut", "garbage", "html", "hang")
    with start_fake(*manners) as fake:
        found = figures(
            command, "--url", f"127.0.0.1:{fake.port}", "--model", "m", "--rate", 200,
            "--num-requests", 60, "--timeout", 1.5, "--slo-ttft-ms", 10_000,
        )  # fmt: skip
    assert found["ok"] == 10
    assert found["refused"] == {"429": 10}
    assert found["failed"] == {
        "cut off": 10, "not JSON": 10, "no stream": 10, "timeout": 10,
    }  # fmt: skip
    assert found["details"]["429"] == "slow down"
    assert found["summary"]["attainment"] == pytest.approx(1 / 6)


def test_connections_are_kept(command: Command) -> None:
    with start_fake() as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--concurrency", 2)
        assert figures(command, *flags, "--num-requests", 30)["ok"] == 30
    # one before the run, and one for each of the two
    assert fake.connections == 3


def test_a_server_that_drops_kept_connections(command: Command) -> None:
    """What went over a connection that the server had closed is sent again, over a new one."""
    with start_fake("good", "close") as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--concurrency", 1)
        found = figures(command, *flags, "--num-requests", 10)
    assert found["ok"] == 10
    assert len(fake.bodies) == 2 + 20 - 1


def test_nothing_succeeded(command: Command) -> None:
    with start_fake("429") as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--concurrency", 1)
        done = command("bench", *flags, "--num-requests", 3)
    assert done.returncode == 1
    assert "| refused: 429 " in done.stdout


def test_an_interrupted_run_is_reported() -> None:
    with start_fake() as fake:
        flags = ("--url", f"127.0.0.1:{fake.port}", "--model", "m", "--rate", "50")
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.cli.main",
                "bench",
                *flags,
                "--num-requests",
                "100000",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 30
        while len(fake.bodies) < 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "The run was interrupted" in output and "TTFT" in output
    assert errors == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "give --rate, --concurrency or --trace"),
        (("--rate", 1, "--concurrency", 1), "give one"),
        (("--concurrency", 1, "--arrivals", "bursty"), "need an open loop"),
        (("--rate", 1, "--arrivals", "constant", "--cv", 2), "for --arrivals bursty"),
        (("--rate", 1, "--trace", "x", "--input-len", 3), "leave out"),
        (("--rate", 1, "--extra-body", "[]"), "expected an object"),
        (("--rate", 1, "--url", "ftp://x"), "is not an address"),
        (("--rate", 1, "--url", "a..b"), "has no valid host or port"),
        (("--rate", 1, "--url", "127.0.0.1:1"), "is the server up"),
        (("--rate", 1, "--url", "127.0.0.1:1", "--model", "m"), "cannot connect"),
    ],
)
def test_what_cannot_be_done_is_said(
    flags: tuple[object, ...], words: str, command: Command
) -> None:
    done = command("bench", *flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_key_is_sent_and_never_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "long-enough-key"
    with start_server("--backend", "null", env={"PACELINE_API_KEY": key}) as server:
        flags = ("--url", server.address, "--concurrency", 1, "--num-requests", 1)
        monkeypatch.delenv("PACELINE_API_KEY", raising=False)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        refused = command("bench", *flags)
        assert refused.returncode == 2 and "is the key right?" in refused.stderr
        assert command("bench", *flags, "--api-key", key).returncode == 0
        monkeypatch.setenv("OPENAI_API_KEY", key)
        output = tmp_path / "run.json"
        assert command("bench", *flags, "--output", output).returncode == 0
    assert key not in output.read_text()
