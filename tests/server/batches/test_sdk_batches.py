"""Files and batches by the official SDK, against a live server; and what a kill leaves of them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.helpers import chat_prompt, expected_text
from tests.server.live_process import LiveServer, eventually, live_server

ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, text: str = "hi", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **fields}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def connect(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def records(sdk: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom_id; AssertionError for one that is there twice."""
    if file_id is None:
        return {}
    found = [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()]
    by_id = {record["custom_id"]: record for record in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


def wait(sdk: openai.OpenAI, batch_id: str, timeout: float = 15.0) -> Any:
    eventually(lambda: sdk.batches.retrieve(batch_id).status in ENDED, timeout)
    return sdk.batches.retrieve(batch_id)


def submit(sdk: openai.OpenAI, lines: list[dict[str, Any]], **changes: Any) -> Any:
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return sdk.batches.create(
        **{
            "input_file_id": file.id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            **changes,
        }
    )


def completed(sdk: openai.OpenAI, batch_id: str) -> int:
    counts = sdk.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("batches")
    with live_server(
        folder / "log",
        config={"batches": {"folder": str(folder / "kept"), "max_file_bytes": 100_000}},
    ) as live:
        yield live


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with connect(server) as client:
        yield client


def test_a_batch(sdk: openai.OpenAI) -> None:
    lines = [chat_line(f"line-{i}", f"text {i}") for i in range(20)]
    lines[7]["body"]["max_tokens"] = -1
    lines[9]["body"]["model"] = "nobody"
    file = sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "in.jsonl")
    assert file.bytes == len(jsonl(lines))
    batch = sdk.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"who": "me"},
    )
    assert batch.object == "batch" and batch.metadata == {"who": "me"}
    assert batch.expires_at == batch.created_at + 86_400
    batch = wait(sdk, batch.id)
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 18, "failed": 2}
    assert batch.completed_at >= batch.finalizing_at >= batch.in_progress_at >= batch.created_at

    answers, errors = records(sdk, batch.output_file_id), records(sdk, batch.error_file_id)
    assert sorted(errors) == ["line-7", "line-9"]
    assert set(answers) | set(errors) == {f"line-{i}" for i in range(20)}
    _, text = expected_text(chat_prompt("text 3"), 3)
    response = answers["line-3"]["response"]
    assert response["status_code"] == 200 and response["request_id"]
    assert response["body"]["choices"][0]["message"]["content"] == text
    assert answers["line-3"]["error"] is None
    refused = errors["line-7"]["response"]
    assert refused["status_code"] == 400 and "max_tokens" in refused["body"]["error"]["message"]
    assert errors["line-9"]["response"]["status_code"] == 404

    assert batch.output_file_id is not None
    output = sdk.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output" and batch.id in output.filename
    assert sdk.batches.list(limit=1).data[0].id == batch.id
    for file_id in (file.id, output.id):
        assert sdk.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.content(file_id)


@pytest.mark.thorough
def test_two_thousand_lines_and_two_kills(tmp_path: Path) -> None:
    lines = [chat_line(f"{i}", f"number {i}") for i in range(2000)]
    settings: dict[str, Any] = {
        "backend": {"step_time": 0.001, "num_blocks": 4096},
        "core": {"max_num_seqs": 64},
        "config": {"batches": {"folder": str(tmp_path / "kept"), "concurrency": 64}},
    }
    batch_id, done = "", 0
    for run, wanted in enumerate((600, 1200)):
        with live_server(tmp_path / f"log{run}", **settings) as server, connect(server) as sdk:
            batch_id = batch_id or submit(sdk, lines).id
            before, done = done, completed(sdk, batch_id)
            assert done >= before, "an answer was lost"
            while done < wanted:
                done = completed(sdk, batch_id)
            assert done < 2000
            server.signal(signal.SIGKILL)
            server.wait()
    # nobody asks for it: it goes on by itself
    with live_server(tmp_path / "log", **settings) as server, connect(server) as sdk:
        assert completed(sdk, batch_id) >= done
        batch = wait(sdk, batch_id)
        assert batch.status == "completed" and batch.error_file_id is None
        assert batch.request_counts.model_dump() == {"total": 2000, "completed": 2000, "failed": 0}
        answers = records(sdk, batch.output_file_id)
    assert set(answers) == {f"{i}" for i in range(2000)}
    for i in range(0, 2000, 97):
        _, text = expected_text(chat_prompt(f"number {i}"), 3)
        body = answers[f"{i}"]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == text
