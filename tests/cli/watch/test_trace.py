"""``paceline trace``: a minute of a server as a file that Perfetto opens."""

from __future__ import annotations

import gzip
import json
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from paceline.cli.main import main
from paceline.timeline.codec import Decoder
from paceline.timeline.model import Model, Seen
from tests.security.keys import ADMIN, USER
from tests.server.live_process import LiveServer, eventually, live_server

KEYS = [
    {"name": "root", "scope": "admin", "key": ADMIN},
    {"name": "a", "scope": "user", "key": USER},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("trace") / "log"
    backend = {"step_time": 0.002}
    with live_server(log, backend=backend, core={"timeline": True}, keys=KEYS) as server:
        body = {"model": "null", "prompt": "hello", "max_tokens": 12, "n": 2}
        headers = {"Authorization": f"Bearer {ADMIN}"}
        for _ in range(2):
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        # news is gathered for a moment
        eventually(lambda: len(_ended(server.url, headers)) == 4)
        yield server


def _ended(url: str, headers: dict[str, str]) -> list[Seen]:
    ended: list[Seen] = []
    model = Model(on_ended=ended.append)
    for frame in Decoder().feed(httpx.get(f"{url}/ui/api/timeline", headers=headers).content):
        model.take(frame)
    return ended


def test_a_trace_has_the_steps_and_who_was_in_them(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", ADMIN)
    path = tmp_path / "t.json.gz"
    assert main(["trace", server.url, "--seconds", "60", "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert "4 requests ended, 0 still running" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trace = json.loads(gzip.decompress(path.read_bytes()))
    events = trace["traceEvents"]
    assert trace["otherData"]["left_out"] == 0
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    runs = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert len(steps) >= 24 and all(e["dur"] > 0 for e in steps)
    # two choices share the lanes 0 and 1, and no two slices of a lane overlap
    assert {e["tid"] for e in runs} == {0, 1}
    for lane in (0, 1):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in runs if e["tid"] == lane)
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(own))
    # of each choice every token but the last is fed back
    written = [e["args"]["tokens"] for e in runs if e["args"]["state"] == "decode"]
    assert sum(written) >= 4 * 11
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"tokens", "milliseconds", "waiting", "free blocks", "pressure"}
    plain = tmp_path / "t.json"
    assert main(["trace", server.url, "-o", str(plain)]) == 0
    assert json.loads(plain.read_text())["traceEvents"]


def test_how_far_back_is_a_flag_with_effect(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", ADMIN)
    sizes = []
    for seconds in ("0", "60"):
        path = tmp_path / "t.json"
        assert main(["trace", server.url, "--seconds", seconds, "-o", str(path)]) == 0
        sizes.append(len(json.loads(path.read_text())["traceEvents"]))
    assert sizes[0] <= sizes[1]


def test_refusals_and_answers_that_are_no_timeline(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "t.json.gz"
    monkeypatch.setenv("PACELINE_API_KEY", USER)
    assert main(["trace", server.url, "-o", str(path)]) == 2
    assert "scope admin in PACELINE_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("PACELINE_API_KEY", ADMIN)
    assert main(["trace", server.url, "-o", str(tmp_path / "none" / "t")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace", f"{server.url}/health?", "-o", str(path)]) == 2
    assert main(["trace", "ftp://x", "-o", str(path)]) == 2
    assert "not an address" in capsys.readouterr().err
    assert not path.exists()
