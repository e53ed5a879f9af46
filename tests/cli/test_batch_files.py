"""Lines in, records out, and what survives a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.batch_files import BatchLine, OutputFile, read_lines
from paceline.core.errors import ConfigError


def parse(*lines: Any) -> list[BatchLine]:
    return list(
        read_lines(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines)
    )


def record(line: BatchLine, **more: Any) -> dict[str, Any]:
    return {"index": line.index, "custom_id": line.custom_id, "input": line.digest, **more}


def test_the_three_forms() -> None:
    body = {"model": "m", "messages": []}
    prompt, messages, openai = parse(
        {"prompt": "a", "max_tokens": 3},
        {"messages": [{"role": "user", "content": "b"}], "custom_id": "x"},
        {"custom_id": "y", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )
    assert (prompt.url, prompt.body) == ("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert messages.url == "/v1/chat/completions"
    assert "custom_id" not in messages.body
    assert (messages.custom_id, openai.custom_id) == ("x", "y")
    assert openai.body == body
    assert (prompt.is_openai, messages.is_openai, openai.is_openai) == (False, False, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([1], "must be a JSON object, got list"),
        ({}, "exactly one of"),
        ({"prompt": "a", "messages": []}, "exactly one of"),
        ({"prompt": "a", "custom_id": 3}, "custom_id must be a string, got 3"),
        ({"prompt": "a", "stream": True}, "stream"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "/v1/embeddings"),
        ({"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}, "GET"),
        ({"custom_id": "a", "url": "/v1/completions", "body": []}, "body must be an object"),
    ],
)
def test_a_bad_line_is_an_error_of_its_own(line: Any, words: str) -> None:
    good, bad, after = parse({"prompt": "a"}, line, {"prompt": "b"})
    assert good.error is None and after.error is None
    assert bad.index == 1
    assert bad.error is not None and words in bad.error


def test_blank_lines_count_but_say_nothing() -> None:
    lines = parse(b"\n", {"prompt": "a"}, b"  \n", {"prompt": "b"})
    assert [line.index for line in lines] == [1, 3]


def test_a_custom_id_belongs_to_the_first_line_that_has_it() -> None:
    first, second = parse({"prompt": "a", "custom_id": "x"}, {"prompt": "b", "custom_id": "x"})
    assert first.error is None
    assert second.error == "custom_id 'x' is already that of line 1"
    assert second.key != first.key


def test_equal_lines_are_different_requests() -> None:
    first, second = parse({"prompt": "a"}, {"prompt": "a"})
    assert first.key != second.key


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
    whole = json.dumps(record(first)).encode() + b"\n"
    torn = json.dumps(record(second)).encode()
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
