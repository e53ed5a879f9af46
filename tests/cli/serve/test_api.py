"""Flags of ``paceline serve`` about its API, on a real server with an engine process."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.servers import start_server

KEY = "sk-0123456789abcdef"


def ask(address: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(
        address + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_keys_logs_and_tool_format(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice user {hashlib.sha256(KEY.encode()).hexdigest()}\n")
    flags = ("--api-key-file", str(keys), "--log-format", "json", "--tool-call-parser", "mistral")
    with start_server("--backend", "null", *flags) as server:
        body = {"input": "hi", "structured_outputs": {"regex": "[ab]{3}"}}
        assert ask(server.address, "/v1/responses", body)[0] == 401
        bearer = {"Authorization": f"Bearer {KEY}"}
        # the grammar is compiled in the engine's process
        status, answer = ask(server.address, "/v1/responses", body, **bearer)
        text = answer["output"][0]["content"][0]["text"]
        assert status == 200 and len(text) == 3 and set(text) <= set("ab")
        bad = body | {"structured_outputs": {"regex": "[a"}}
        status, answer = ask(server.address, "/v1/responses", bad, **bearer)
        assert status == 400 and answer["error"]["param"] == "structured_outputs.regex"
        tool = {"type": "function", "function": {"name": "f"}}
        chat = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [tool],
            "tool_choice": "required",
            "return_token_ids": True,
            "max_tokens": 400,
        }
        status, answer = ask(server.address, "/v1/chat/completions", chat, **bearer)
        choice = answer["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
        assert bytes(t for t in choice["token_ids"] if t < 256).startswith(b'[{"name":"f"')
        server.stop()
    lines = [json.loads(line) for line in server.errors]
    assert KEY not in "".join(server.errors)
    events = {line["message"].split()[0]: line.get("fields", {}) for line in lines}
    assert events["request"]["end"] == "done" and events["refused"]["status"] == 400


@pytest.mark.parametrize("text", ["alice user nothex\n", "# none\n"])
def test_a_bad_key_file_is_refused_before_anything_is_loaded(
    command: Command, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    done = command("serve", "no-such-model", "--port", "0", "--api-key-file", path)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline serve: --api-key-file ")
