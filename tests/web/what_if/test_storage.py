"""Folders of the page's what-if: what is taken away when the server that had it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.http.errors import HttpError
from paceline.web.what_if.storage import MOST_PLACES, Owner, Places, sweep

# makes a place, says so, and waits
HOLDS = (
    "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    "from paceline.web.what_if.storage import Owner, Places\n"
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


def test_a_folder_that_is_just_being_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server starts, and sweeps, at the moment before its lock is held."""
    lock, swept = fcntl.flock, []

    def after_a_sweep(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        swept.append(sweep(tmp_path))
        lock(file, how)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", after_a_sweep)
    place = Places().make(Owner("", ""))
    assert swept == [[]] and place.folder.is_dir()
    assert sweep(tmp_path) == [], "it is held"


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


async def test_a_key_gives_up_its_own_place_before_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    times = iter(range(100))
    places = Places(clock=lambda: next(times))

    def kept(key: str) -> list[str]:
        names = map(str, range(MOST_PLACES + 1))
        return [name for name in names if places.find(Owner(key, name)) is not None]

    places.make(Owner("bob", "0"))
    ada = [places.make(Owner("ada", str(number))) for number in range(MOST_PLACES)]
    assert kept("bob") == ["0"] and kept("ada") == ["1", "2", "3", "4", "5", "6", "7"]
    # whoever has few gets one of those of whoever has most, the oldest of them that is idle
    with ada[1].in_use():
        places.make(Owner("bob", "1"))
    assert kept("bob") == ["0", "1"] and kept("ada") == ["1", "3", "4", "5", "6", "7"]
    # one more than another has is never taken from it, not even while all of one's own are used
    with contextlib.ExitStack() as used:
        for place in ada:
            used.enter_context(place.in_use())
        with pytest.raises(HttpError) as refused:
            places.make(Owner("ada", "8"))
        assert refused.value.status == 503 and f"of {MOST_PLACES} callers" in str(refused.value)
    # as many keys as there are places have one each, and another one takes the oldest
    for number in range(MOST_PLACES - 2):
        places.make(Owner(f"key{number}", "0"))
    assert (len(kept("bob")), len(kept("ada"))) == (1, 1)
    places.make(Owner("late", "0"))
    assert kept("bob") == ["1"] and kept("ada") == []
    await places.close()
