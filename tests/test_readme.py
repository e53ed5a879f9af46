"""README.md's commands exist and its snippets run, as written, against a live server.

With the default model where it has been pulled, else with the null backend under its name: then
the answers are gibberish, and only their shape is checked.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.common.questions import loops
from paceline.checkpoints.hub.resolve import find_local
from paceline.cli.main import build_parser, main
from tests.cli.servers import ServerProcess, start_server

README = (Path(__file__).parent.parent / "README.md").read_text()
MODEL = "smollm2-135m"
ADDRESS = "http://127.0.0.1:8000"


def snippet(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert ADDRESS in text
    return str(text)


class Live(NamedTuple):
    server: ServerProcess
    # the real model answers
    real: bool


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    real = find_local(MODEL) is not None
    flags = [] if real else ["--backend", "null", "--served-model-name", MODEL]
    with start_server(*flags) as server:
        yield Live(server, real)


def run(command: list[str], live: Live) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="this machine has no curl")
def test_curl_snippet(live: Live) -> None:
    command = snippet("bash").replace(ADDRESS, live.server.address)
    answer = json.loads(run(["bash", "-euc", command], live))
    assert answer["model"] == MODEL
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["usage"]["timeline"][0]["ttft_ms"] > 0
    if live.real:
        assert "Paris" in answer["choices"][0]["message"]["content"]


def test_sdk_snippet(live: Live) -> None:
    code = snippet("python").replace(ADDRESS, live.server.address)
    printed = run([sys.executable, "-W", "error", "-c", code], live)
    assert printed.strip(), "the streamed answer is empty"
    if live.real:
        # with the defaults of the catalogue: the question is one that the default model answers
        # well
        assert "Paris" in printed and not loops(printed)


def test_commands_are_commands() -> None:
    lines = re.findall(r"^\| `paceline (.*?)` \|", README, flags=re.MULTILINE)
    assert len(lines) >= 8
    parser = build_parser()
    for line in lines:
        assert callable(parser.parse_args(shlex.split(line)).run), line


def test_the_simulation_says_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = re.findall(r"^paceline (simulate .*?)\n```", README, re.MULTILINE | re.DOTALL)
    assert main([*shlex.split(command.replace("\\\n", " ")), "--json"]) == 0
    found = {run["name"]: run["attainment"] for run in json.loads(capsys.readouterr().out)["runs"]}
    first, second = (f"`{policy}`" for policy in found)
    assert set(found) == {"deadline", "fcfs"}
    one, other = (f"{100 * share:.0f} %" for share in found.values())
    assert f"{first} meets the targets of {one} and {second} of {other}" in README
