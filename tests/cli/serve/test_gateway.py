"""``paceline gateway`` as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from paceline.cli.main import main
from tests.gateway.cascade.helpers import calibration
from tests.server.live_process import live_server

ENGINE = '[[engines]]\nname = "a"\nurl = "{url}"\n'


def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(ENGINE.format(url="http://127.0.0.1:1"))
    assert main(["gateway", str(path), "--check"]) == 0
    assert "1 engines, 0 models" in capsys.readouterr().out
    path.write_text("oops = 1\n")
    assert main(["gateway", str(path), "--check"]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["gateway", "--check"]) == 2
    assert "give either a file or --engine URL" in capsys.readouterr().err
    assert main(["gateway", str(tmp_path / "none.toml")]) == 2
    path.write_text(ENGINE.format(url="http://127.0.0.1:1"))
    keys = tmp_path / "keys"
    path.write_text(f'api_key_file = "{keys}"\n' + path.read_text())
    assert main(["gateway", str(path), "--check"]) == 2
    keys.write_text("# no keys\n")
    assert main(["gateway", str(path), "--check"]) == 2
    assert "holds no key" in capsys.readouterr().err


def test_a_policy_that_keeps_nothing_back_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.toml"
    engine = ENGINE.format(url="http://127.0.0.1:1")
    for rule in ('local_only_tags = ["x"]\n', '[[keys]]\nname = "*"\nlocal_only = true\n'):
        for cloud in ("", "cloud = true\n"):
            top, key = (rule, "") if rule.startswith("local") else ("", rule)
            path.write_text(top + engine + cloud + key)
            assert main(["gateway", str(path), "--check"]) == 0
            told = "local_only keeps nothing back" in capsys.readouterr().out
            assert told == (not cloud)


def test_what_a_cascade_lacks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.toml"
    engine = ENGINE.format(url="http://127.0.0.1:1")
    models = (
        '[[models]]\nname = "s"\ntiers = [["a"]]\n[[models]]\nname = "m"\ntiers = [["a"]]\n'
        '[models.cascade]\nsmall = "s"\nprefix_tokens = 2\n'
    )
    for kind, more, words in (
        ("auto", "", "without a calibration exact faults alone decide"),
        ("anthropic", ["route", "cascade", "prefix"], "engine a of s returns no logprobs"),
        ("auto", ["route"], "was made without logprobs: the prompt alone is scored"),
    ):
        made = f'calibration = "{calibration(tmp_path, modes=more)}"\n' if more else ""
        path.write_text(f'{engine}kind = "{kind}"\n{models}{made}')
        assert main(["gateway", str(path), "--check"]) == 0
        assert words in capsys.readouterr().out
    for text, words in (
        ("{}", "is no calibration"),
        (Path(calibration(tmp_path, losses=[0.0] * 18)).read_text(), "1 are missing"),
        (Path(calibration(tmp_path, first=8)).read_text(), "for prefix_tokens 8, not 2"),
    ):
        Path(tmp_path / "other").write_text(text)
        path.write_text(f'{engine}{models}calibration = "{tmp_path / "other"}"\n')
        assert main(["gateway", str(path), "--check"]) == 2
        assert words in capsys.readouterr().err


def test_it_serves_reads_its_file_again_and_ends(tmp_path: Path) -> None:
    path, log = tmp_path / "gateway.toml", tmp_path / "log"
    with live_server(tmp_path / "server.log") as server, log.open("wb") as errors:
        path.write_text(ENGINE.format(url=server.url))
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", "gateway", str(path), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            assert line.startswith("paceline gateway ready: http://127.0.0.1:")
            url = line.split()[3].removesuffix("/v1")
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            assert "gateway.js" in httpx.get(f"{url}/ui/").text
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
            path.write_text(path.read_text() + '[[models]]\nname = "chat"\ntiers = [["a"]]\n')
            process.send_signal(signal.SIGHUP)
            _until(lambda: _models(url) == ["chat"])
            path.write_text("oops")
            process.send_signal(signal.SIGHUP)
            _until(lambda: "reload_refused" in log.read_text())
            assert _models(url) == ["chat"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize("source", ["file", "engine"])
def test_the_page_is_left_out_where_a_flag_says_so(tmp_path: Path, source: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(ENGINE.format(url="http://127.0.0.1:1"))
    given = (str(path),) if source == "file" else ("--engine", "http://127.0.0.1:1")
    argv = (sys.executable, "-m", "paceline.cli.main", "gateway", *given, "--port", "0", "--no-ui")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().decode().split()[3].removesuffix("/v1")
            assert httpx.get(f"{url}/ui/").status_code == 404
            assert httpx.get(f"{url}/status").status_code == 200
        finally:
            process.kill()


def _models(url: str) -> list[str]:
    return [entry["id"] for entry in httpx.get(f"{url}/v1/models").json()["data"]]


def _until(holds: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    assert callable(holds)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
