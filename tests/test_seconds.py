"""Seconds of a run of the tests, by folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seconds import Timed, main, read_tests, table

RUN = [
    Timed("tests/core/step/test_rows.py", "test_a", 1.0),
    Timed("tests/core/step/test_rows.py", "test_b", 2.0),
    Timed("tests/core/test_tier.py", "test_c", 0.5),
    Timed("tests/backends/native/deep/test_d.py", "test_d[1]", 4.0),
    Timed("tests/test_top.py", "test_e", 0.25),
]


def test_folders_are_added_up_down_to_the_second_below_tests() -> None:
    shown = table(RUN, most=1).splitlines()
    assert [line.split() for line in shown[1:6]] == [
        ["4.0", "1", "tests/backends/native"],
        ["3.0", "2", "tests/core/step"],
        ["0.5", "1", "tests/core"],
        ["0.2", "1", "tests"],
        ["7.8", "5", "in", "all"],
    ]
    assert shown[-4:] == [
        "      4.0  tests/backends/native/deep/test_d.py",
        "",
        "seconds by test, the first 1 of 5",
        "      4.0  tests/backends/native/deep/test_d.py::test_d[1]",
    ]


def test_beside_an_earlier_run_it_shows_the_share_of_a_change() -> None:
    before = [*RUN[:1], Timed("tests/core/test_tier.py", "test_c", 1.5), *RUN[3:]]
    shown = [line.split() for line in table(RUN, before).splitlines()[1:6]]
    assert shown[0] == ["2.0", "1", "tests/core/step"]
    assert shown[3] == ["-1.0", "0", "tests/core"]
    assert shown[4] == ["1.0", "1", "in", "all"]


def test_what_pytest_writes_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "part"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text(
        "import time, pytest\n\n"
        "class TestKlass:\n    def test_in(self):\n        pass\n\n"
        "@pytest.fixture\ndef slow():\n    time.sleep(0.05)\n\n"
        "def test_out(slow):\n    pass\n"
    )
    options = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-c", os.devnull]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir=.", "--junitxml=out.xml", "tests"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    inside, outside = read_tests(tmp_path / "out.xml")
    assert inside.file == outside.file == "tests/part/test_it.py"
    assert (inside.name, outside.name) == ("test_in", "test_out")
    assert outside.seconds >= 0.05 > inside.seconds, "fixtures count"


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere.xml"])
    assert "nowhere.xml holds no durations of tests" in capsys.readouterr().err
