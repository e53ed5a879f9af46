"""``paceline run``, ``list``, ``rm``, ``ps``, and names that people bring from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoints.hub import resolve
from paceline.checkpoints.hub.pip_models import cached_path
from paceline.cli.flags.options import chosen_model
from paceline.cli.main import build_parser, main
from paceline.cli.watch.ps import servers
from paceline.errors import ConfigError
from tests.cli.conftest import Command
from tests.cli.servers import start_server

NULL = ("--backend", "null", "--max-tokens", "5", "--temperature", "0")


def test_run_asks_one_thing_or_talks(command: Command) -> None:
    once = command("chat", *NULL, stdin="hello you\n")
    asked = command("run", *NULL, "smollm2-135m", "hello", "you")
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, once.stdout, "")
    assert command("run", *NULL, stdin="hello you\n").stdout == once.stdout
    told = command("run", *NULL, "--stats", "smollm2-135m", "hello you")
    assert told.stdout == once.stdout and "(5 tokens, " in told.stderr
    failed = command("run", *NULL, "--max-model-len", "40", "smollm2-135m", "x" * 100)
    assert failed.returncode == 1 and "the context has room for 40" in failed.stderr


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An alias and a hub model, as the caches keep them."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    alias = resolve.ALIASES["smollm2-135m"]
    path = cached_path(alias, tmp_path / "ours")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        # sparse: it takes no room
        file.truncate(alias.gguf_bytes)
    hub = tmp_path / "hub" / "models--org--name"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "b").write_bytes(b"x" * 1000)
    (hub / "snapshots" / "r1").mkdir(parents=True)
    (hub / "snapshots" / "r1" / "config.json").symlink_to("../../blobs/b")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("r1")
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    assert main(["list", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {each["name"]: each["bytes"] for each in found}


def test_list_and_rm(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == {"smollm2-135m": 98_362_432, "org/name": 1000}
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "MODIFIED", "FOLDER"]
    assert lines[1].startswith("smollm2-135m  98 MB") and lines[2].startswith("org/name")
    # all or none
    assert main(["rm", "org/name", "org/other"]) == 2
    said = capsys.readouterr().err
    assert "no downloaded model is named 'org/other'; downloaded are smollm2-135m, org/name" in said
    assert main(["rm", "org/name"]) == 0
    assert capsys.readouterr().out == "removed org/name (0 MB)\n"
    assert listed(capsys) == {"smollm2-135m": 98_362_432}
    assert main(["rm", "smollm2-135m"]) == 0
    capsys.readouterr()
    assert listed(capsys) == {} and not list((caches / "ours").rglob("*.gguf"))


def test_rm_touches_nothing_of_ones_own(tmp_path: Path, caches: Path) -> None:
    own = tmp_path / "own.gguf"
    own.touch()
    for name in (str(own), "../ours", str(caches / "hub")):
        assert main(["rm", name]) == 2
    assert own.exists() and (caches / "hub" / "models--org--name").exists()


def test_ps_shows_servers_and_their_ports(capsys: pytest.CaptureFixture[str]) -> None:
    with start_server("--backend", "null", "--metrics-port", "0") as server:
        pid = server.process.pid
        (found,) = [each for each in servers() if each.pid == pid]
        assert found.model == "null" and len(found.ports) == 2
        assert int(server.address.rpartition(":")[2]) in found.ports
        # two processes
        assert found.memory > 60e6 and found.age >= 0
        assert main(["ps"]) == 0
        assert f"{pid}" in capsys.readouterr().out
    assert pid not in {each.pid for each in servers()}


@pytest.mark.parametrize(
    ("command", "model"),
    [
        (["/opt/bin/paceline", "serve"], "smollm2-135m"),
        (["python", "-m", "paceline.cli.main", "serve", "./m.gguf", "--port", "1"], "./m.gguf"),
        (["paceline", "serve", "--port", "1", "--model", "org/m"], "org/m"),
        (["paceline", "serve", "--model=org/m"], "org/m"),
        (["paceline", "chat", "org/m"], None),
        (["vim", "paceline", "notes"], None),
    ],
)
def test_ps_knows_a_server_by_its_command(
    tmp_path: Path, command: list[str], model: str | None
) -> None:
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "cmdline").write_bytes(b"".join(w.encode() + b"\0" for w in command))
    (tmp_path / "7" / "stat").write_text("7 (x) S 1 ")
    assert os.stat(tmp_path / "7").st_uid == os.getuid()
    assert [each.model for each in servers(tmp_path)] == ([] if model is None else [model])


@pytest.mark.parametrize("command", ["serve", "chat", "run"])
def test_the_model_may_be_named_by_a_flag(command: str) -> None:
    def parsed(*words: str) -> str:
        return chosen_model(build_parser().parse_args([command, *words]))

    assert parsed() == "smollm2-135m"
    assert parsed("--model", "org/a") == parsed("org/a") == parsed("org/a", "--model", "org/a")
    with pytest.raises(ConfigError, match="two models are given, 'org/b' and --model 'org/a'"):
        parsed("org/b", "--model", "org/a")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--scheduling-policy", "wfq"], "(did you mean fair?)"),
        (["--tensor-parallel-size", "2"], "start a server for each device"),
        (["-tp", "x"], "start a server for each device"),
        (["--best-effort-delay", "60"], "(--best-effort-delay is now --best-effort-share)"),
        (["--screen-head"], "(--screen-head is gone: the whole output head is read"),
        (["--background-share=0.1"], "(--background-share is now --best-effort-share)"),
        (["--mem-fraction-static", "1"], "(in Paceline: --kv-cache-memory SIZE)"),
        (["--scheduling-polcy", "fcfs"], "(did you mean --scheduling-policy?)"),
    ],
)
def test_what_is_called_otherwise_here_is_told(flags: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", "serve", *flags], capture_output=True, text=True
    )
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_single_device_is_what_there_is() -> None:
    for flag in ("--tensor-parallel-size", "-tp"):
        assert build_parser().parse_args(["serve", flag, "1"]).tensor_parallel_size == 1


def test_what_is_advised_exists() -> None:
    from paceline.cli.flags.arguments import _ELSEWHERE

    known = build_parser().parse_args(["serve"])
    for advice in _ELSEWHERE.values():
        for word in advice.split():
            if word.startswith("--"):
                name = word.strip(",;:").removeprefix("--no-").removeprefix("--")
                assert hasattr(known, name.replace("-", "_")) or name == "model", advice
