"""The flags of files and batches, on real servers."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli.flags.server_options import batch_config
from paceline.cli.main import build_parser
from tests.cli.conftest import Command
from tests.cli.servers import start_server
from tests.server.live_process import eventually

LINE = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}


def config(*flags: str) -> Any:
    return batch_config(build_parser().parse_args(["serve", *flags]), 1234)


def test_what_flags_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    default = config()
    assert default.folder == tmp_path / "paceline" / "batches" / "1234" and not default.required
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config().folder == tmp_path / ".local/state/paceline/batches/1234"
    assert config("--batch-dir", "off") is None
    named = config("--batch-dir", "here", "--max-batch-requests", "7", "--batch-concurrency", "3")
    assert named.folder == Path.cwd() / "here" and named.required
    assert (named.max_requests, named.concurrency) == (7, 3)
    sized = config("--max-file-size", "1KiB", "--batch-storage", "1MiB")
    assert (sized.max_file_bytes, sized.max_bytes) == (1024, 2**20)


def upload(address: str, content: bytes) -> httpx.Response:
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in", content)}}
    return httpx.post(f"{address}/v1/files", **form)


def test_flags_on_a_server(command: Command, tmp_path: Path) -> None:
    flags = ("--backend", "null", "--batch-dir", str(tmp_path / "kept"))
    limits = ("--max-file-size", "1KiB", "--batch-storage", "1500B", "--max-batch-requests", "2")
    lines = b"\n".join(json.dumps({"custom_id": f"{i}", **LINE}).encode() for i in range(3))
    with start_server(*flags, *limits) as server:
        assert "1024 bytes" in upload(server.address, b"x" * 1025).text
        file = upload(server.address, lines + b" " * 600).json()
        assert "1500 bytes together" in upload(server.address, b"x" * 1000).text
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        status, batch = server.request("/v1/batches", body)
        assert status == 200

        def ended() -> Any:
            found = server.request(f"/v1/batches/{batch['id']}")[1]
            return found if found["status"] == "failed" else None

        eventually(lambda: ended() is not None)
        assert ended()["errors"]["data"][0]["message"] == "a batch may have 2 requests"
        # the folder is this server's
        second = command("serve", "--port", "0", *flags)
        assert second.returncode == 2 and "used by another server" in second.stderr
        assert "Traceback" not in second.stderr
        assert server.stop()[0] == 0
