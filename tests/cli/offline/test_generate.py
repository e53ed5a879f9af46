"""Offline batches over the null backend: every line answered once, whatever happens."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from paceline.backends.reference.null import expected_tokens
from paceline.engine.testing import ByteTokenizer
from tests.cli.conftest import Command, Done

COMMAND = (sys.executable, "-m", "paceline.cli.main", "generate", "--backend", "null")


@pytest.fixture
def generate(command: Command) -> Command:
    """In this process; the exit code must be ``check``."""

    def run(*arguments: str | Path, stdin: str = "", check: int = 0) -> Done:
        done = command("generate", "--backend", "null", *arguments, stdin=stdin)
        assert done.returncode == check, done.stderr
        return done

    return run


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def records(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({record["index"] for record in found}) == len(found), "a line answered twice"
    return {record["index"]: record for record in found}


def expected_text(prompt: str, count: int) -> str:
    tokenizer = ByteTokenizer()
    tokens = expected_tokens(tokenizer.encode(prompt), count, tokenizer.vocab_size)
    return tokenizer.decode(tokens)


def test_the_three_forms_are_answered(tmp_path: Path, generate: Command) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "null", "messages": messages, "max_tokens": 3}
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "abc", "max_tokens": 4},
        {"messages": messages, "max_tokens": 3, "n": 2, "custom_id": "two"},
        {"custom_id": "o", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )
    output = tmp_path / "out.jsonl"
    done = generate(source, "-o", output)
    assert "3 answered" in done.stderr
    prompt, chat, openai = (records(output)[i] for i in range(3))

    assert prompt["choices"][0]["text"] == expected_text("abc", 4)
    assert prompt["usage"]["completion_tokens"] == 4
    assert (prompt["custom_id"], prompt["error"]) == (None, None)

    assert chat["custom_id"] == "two"
    assert [choice["message"]["role"] for choice in chat["choices"]] == ["assistant"] * 2

    assert openai["custom_id"] == "o" and openai["error"] is None
    assert openai["response"]["status_code"] == 200
    assert openai["response"]["body"]["object"] == "chat.completion"
    first = openai["response"]["body"]["choices"][0]
    assert first["message"] == chat["choices"][0]["message"]


def test_bad_lines_are_errors_of_their_own(tmp_path: Path, generate: Command) -> None:
    chat = {"messages": [], "model": "null"}
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "a", "max_tokens": 2},
        "{broken",
        {"prompt": "a", "max_tokens": -1},
        {"prompt": "a", "model": "another"},
        {"custom_id": "o", "url": "/v1/chat/completions", "body": chat},
        {"prompt": "a", "max_tokens": 2, "custom_id": "last"},
    )
    output = tmp_path / "out.jsonl"
    done = generate(source, "-o", output, check=1)
    assert "2 answered, 4 failed" in done.stderr
    found = records(output)
    assert found[0]["choices"] and found[5]["choices"]
    assert "line 2: it is not valid JSON" in found[1]["error"]["message"]
    assert "max_tokens" in found[2]["error"]["message"]
    assert "another" in found[3]["error"]["message"]
    assert found[4]["response"]["status_code"] == 400
    for index in (1, 2, 3):
        assert found[index]["choices"] == [] and found[index]["usage"] is None


def test_a_second_run_does_only_what_is_missing(tmp_path: Path, generate: Command) -> None:
    lines = [{"prompt": f"p{i}", "max_tokens": 2} for i in range(6)]
    output = tmp_path / "out.jsonl"
    generate(write(tmp_path / "in.jsonl", *lines[:4]), "-o", output)
    before = output.read_bytes()
    # a crash in the middle of a record
    output.write_bytes(before[:-10])

    done = generate(write(tmp_path / "in.jsonl", *lines), "-o", output)
    assert "3 answered, 3 were answered before" in done.stderr
    assert sorted(records(output)) == list(range(6))
    assert output.read_bytes().startswith(before[: before[:-10].rindex(b"\n") + 1])

    done = generate(tmp_path / "in.jsonl", "-o", output)
    assert "0 answered, 6 were answered before" in done.stderr

    generate(tmp_path / "in.jsonl", "-o", output, "--overwrite")
    assert sorted(records(output)) == list(range(6))


def test_failures_stay_failures_until_they_are_retried(tmp_path: Path, generate: Command) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "b", "max_tokens": 2000},
        {"custom_id": "o", "url": "/v1/completions", "body": {"prompt": "c", "max_tokens": 3000}},
    ]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    small = ("-o", output, "--max-model-len", "64")
    assert "1 answered, 2 failed" in generate(source, *small, check=1).stderr
    output.chmod(0o640)
    before = output.read_bytes()
    done = generate(source, *small, check=1)
    said = "0 answered, 2 failed before (--retry-failed runs them again), 1 were answered before"
    assert said in done.stderr and output.read_bytes() == before
    # still too long: they fail once more, and there is one answer a line
    done = generate(source, *small, "--retry-failed", check=1)
    assert "0 answered, 2 failed (see their 'error'), 1 were answered before" in done.stderr
    assert sorted(records(output)) == [0, 1, 2] and len(output.read_bytes().splitlines()) == 3
    done = generate(source, "-o", output, "--max-model-len", "8192", "--retry-failed")
    assert "2 answered, 1 were answered before" in done.stderr
    assert all(record["error"] is None for record in records(output).values())
    assert len(output.read_bytes().splitlines()) == 3 and output.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    generate(source, "-o", output)


def test_a_changed_line_is_answered_anew(tmp_path: Path, generate: Command) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    generate(write(source, {"prompt": "old", "max_tokens": 2}), "-o", output)
    done = generate(write(source, {"prompt": "new", "max_tokens": 2}), "-o", output)
    assert "1 answered" in done.stderr
    texts = [json.loads(x)["choices"][0]["text"] for x in output.read_text().splitlines()]
    assert texts == [expected_text("old", 2), expected_text("new", 2)]


def test_an_interrupted_run_is_resumed(tmp_path: Path, generate: Command) -> None:
    lines = [{"prompt": f"prompt {i}", "max_tokens": 3} for i in range(60)]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command = [*COMMAND, str(source), "-o", str(output), "--max-num-seqs", "2"]
    process = subprocess.Popen(
        [*command, "--null-step-time", "0.02"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (output.exists() and output.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors and " answered" in errors
    done_before = len(records(output))
    assert 3 <= done_before < 60

    done = generate(source, "-o", output)
    assert f"{60 - done_before} answered, {done_before} were answered before" in done.stderr
    found = records(output)
    assert sorted(found) == list(range(60))
    for i, record in found.items():
        assert record["choices"][0]["text"] == expected_text(f"prompt {i}", 3)


def test_standard_input_to_standard_output(generate: Command) -> None:
    done = subprocess.run(
        [*COMMAND, "-", "--max-tokens", "5"],
        input='{"prompt": "x"}\n\n{"prompt": "y"}\n',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = {json.loads(line)["index"]: json.loads(line) for line in done.stdout.splitlines()}
    assert sorted(found) == [0, 2]
    # --max-tokens is for lines that do not say
    assert found[0]["usage"]["completion_tokens"] == 5
    explicit = generate("-", "--max-tokens", "5", stdin='{"prompt": "x", "max_tokens": 2}\n')
    assert json.loads(explicit.stdout)["usage"]["completion_tokens"] == 2


def on_pipes() -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """The command with the ends of its standard input and output."""
    process = subprocess.Popen(
        [*COMMAND, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    return process, process.stdin, process.stdout


def test_who_writes_lines_may_wait_for_answers() -> None:
    """A program at the other end of both pipes, one question at a time."""
    process, stdin, stdout = on_pipes()
    try:
        for number in range(2):
            line = json.dumps({"prompt": f"question {number}", "max_tokens": 3})
            # not all at once either
            stdin.write(b"\n" + line[:9].encode())
            stdin.flush()
            stdin.write(line[9:].encode() + b"\n")
            stdin.flush()
            assert select.select([stdout], [], [], 30)[0], "no answer"
            record = json.loads(stdout.readline())
            assert record["index"] == 2 * number + 1
            assert record["choices"][0]["text"] == expected_text(f"question {number}", 3)
        # the last line may lack its end
        stdin.write(b'{"prompt": "last", "max_tokens": 3}')
        rest, errors = process.communicate(timeout=30)
        assert json.loads(rest)["choices"][0]["text"] == expected_text("last", 3)
        assert process.returncode == 0 and b"3 answered" in errors
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_ends_a_command_that_waits_for_lines() -> None:
    process, stdin, stdout = on_pipes()
    try:
        stdin.write(b'{"prompt": "a", "max_tokens": 2}\n')
        stdin.flush()
        assert select.select([stdout], [], [], 30)[0], "no answer"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()


def test_standard_input_may_be_a_file(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"prompt": f"p{i}", "max_tokens": 2} for i in range(9)))
    with source.open("rb") as file:
        done = subprocess.run([*COMMAND, "-"], stdin=file, capture_output=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/absent.jsonl"], "cannot read"),
        (["{tmp}"], "cannot read"),
        (["{tmp}/in.jsonl", "-o", "{tmp}/in.jsonl"], "both input and output"),
        (["{tmp}/in.jsonl", "-o", "{tmp}/../{name}/in.jsonl", "--overwrite"], "both input"),
        (["{tmp}/in.jsonl", "-o", "{tmp}/notes.txt"], "not an answer of 'paceline generate'"),
        (["{tmp}/in.jsonl", "--overwrite"], "--overwrite needs --output"),
        (["{tmp}/in.jsonl", "--max-model-len", "100000"], "100000 exceeds"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, generate: Command, arguments: list[str], words: str
) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    before = source.read_bytes()
    done = generate(*(x.format(tmp=tmp_path, name=tmp_path.name) for x in arguments), check=2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("paceline generate: ")
    assert source.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "milk, bread\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    lines = "".join(json.dumps({"prompt": f"{i}" * 50}) + "\n" for i in range(300))
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, "-"],
            input=lines,
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
