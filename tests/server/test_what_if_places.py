"""Folders of the page's what-if: what is taken away when the server that had it was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.server.ui.what_if_places import Owner, Places, sweep

pytestmark = pytest.mark.anyio

# makes a place, says so, and waits
HOLDS = (
    "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    "from paceline.server.ui.what_if_places import Owner, Places\n"
    "places = Places(); place = places.make(Owner('', '')); place.trace.write_text('x')\n"
    "print(places.root, flush=True); sys.stdin.read()\n"
)


def test_what_is_held_stays_and_what_was_held_goes(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        root = Path(holder.stdout.readline().decode().strip())
        assert root.parent == tmp_path and (root / "1" / "trace").is_file()
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert sweep(tmp_path) == [] and root.is_dir()
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
    assert sweep(tmp_path) == [root] and not root.exists()
    assert sweep(tmp_path) == []


def test_what_is_somebody_elses_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "paceline-what-if-link").symlink_to(elsewhere)
    (tmp_path / "paceline-what-if-file").touch()
    (tmp_path / "not-paceline-what-if-x").mkdir()
    # one without a lock was made by a server that had none, or is being made
    young, old = tmp_path / "paceline-what-if-young", tmp_path / "paceline-what-if-old"
    for folder in (young, old):
        folder.mkdir()
        (folder / "trace").touch()
    os.utime(old, (time.time() - 90_000,) * 2)
    # a lock that leads elsewhere is not followed
    odd = tmp_path / "paceline-what-if-odd"
    odd.mkdir()
    (odd / "lock").symlink_to(elsewhere / "lock")
    assert sweep(tmp_path) == [old]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere",
        "not-paceline-what-if-x",
        "paceline-what-if-file",
        "paceline-what-if-link",
        "paceline-what-if-odd",
        "paceline-what-if-young",
    ]


async def test_it_begins_anew_when_it_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    places = Places()
    assert places.root is None and not list(tmp_path.iterdir()), "nothing before it is asked for"
    owner = Owner("ada", "one")
    place = places.make(owner)
    assert places.make(owner) is place is places.find(owner)
    place.number = 1
    place.make_runs()
    (place.runs / "0.frames").touch()
    place.number = 2
    place.make_runs()
    assert [path.name for path in place.folder.iterdir()] == ["job-2"]
    await places.close()
    assert not list(tmp_path.iterdir()) and places.find(owner) is None
    assert places.make(owner) is not place
    await places.close()
