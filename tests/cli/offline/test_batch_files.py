"""The output file, and what of it survives a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.offline.batch_files import OutputFile
from paceline.errors import ConfigError
from paceline.server.batches.answering import URLS
from paceline.server.batches.lines import BatchLine, read_lines
from paceline.server.protocol.responses import encode


def parse(*lines: Any) -> list[BatchLine]:
    return list(
        read_lines(
            (x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines), URLS
        )
    )


def record(line: BatchLine, **more: Any) -> dict[str, Any]:
    return {"index": line.index, "custom_id": line.custom_id, "input": line.digest, **more}


def test_answers_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    lines = parse({"prompt": "a"}, {"prompt": "b", "custom_id": "x"}, {"prompt": "c"})
    output = OutputFile.open(path)
    for line in lines[:2]:
        output.write(record(line))
    output.close()

    output = OutputFile.open(path)
    assert [line.key in output.answered for line in lines] == [True, True, False]
    output.write(record(lines[2]))
    output.close()
    assert [json.loads(x)["index"] for x in path.read_text().splitlines()] == [0, 1, 2]

    changed = parse({"prompt": "A"}, {"prompt": "B", "custom_id": "x"})
    output = OutputFile.open(path)
    assert [line.key in output.answered for line in changed] == [False, True]
    output.close()


def test_a_torn_last_line_is_cut_off_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = parse({"prompt": "a"}, {"prompt": "b"})
    whole = encode(record(first)) + b"\n"
    torn = encode(record(second))
    for length in range(len(torn) + 1):
        path.write_bytes(whole + torn[:length])
        output = OutputFile.open(path)
        assert output.answered == {first.key}
        output.write(record(second))
        output.close()
        assert path.read_bytes() == whole + torn + b"\n"


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"a": 1}\n', '{"index": 0}\n'])
def test_somebody_elses_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"line 1 is not an answer.*--overwrite"):
        OutputFile.open(path)
    assert path.read_text() == text
    OutputFile.open(path, overwrite=True).close()
    assert path.read_text() == ""


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = OutputFile.open(path)
    with pytest.raises(ConfigError, match="being written by another process"):
        OutputFile.open(path, overwrite=True)
    output.close()
    OutputFile.open(path).close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        OutputFile.open(tmp_path)
